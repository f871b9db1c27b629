"""fio as the client: one run, its figures, and what it cost the daemon and the machine."""

import json
import shutil
import subprocess

from . import proc
from .servers import BenchError, peer_argv

RAMP_S = 1


def program():
    """The fio of this machine, or the one of the peer's tree."""
    return ["fio"] if shutil.which("fio") else peer_argv("fio")


class Case:
    """One fio job. `order` seq or rand; `op` read, write or rw; `engine` aio (libaio), sync (psync)
    or uring.
    """

    def __init__(self, order, op, engine, jobs=1, depth=16, block="4k", direct=1):
        self.order, self.op, self.engine = order, op, engine
        self.jobs, self.depth, self.block, self.direct = jobs, depth, block, direct

    @property
    def name(self):
        """For people, and a stable key in the JSON file."""
        depth = "" if self.engine == "sync" else f" depth {self.depth}"
        direct = "" if self.direct else " not direct"
        jobs = f"{self.jobs} job{'s' if self.jobs > 1 else ''}"
        return f"{self.block} {self.order} {self.op} {self.engine}{depth}{direct}, {jobs}"

    def args(self):
        """Words for fio."""
        rw = {
            ("seq", "read"): "read",
            ("rand", "read"): "randread",
            ("seq", "write"): "write",
            ("rand", "write"): "randwrite",
            ("seq", "rw"): "rw",
            ("rand", "rw"): "randrw",
        }[(self.order, self.op)]
        engine = {"aio": "libaio", "sync": "psync", "uring": "io_uring"}[self.engine]
        depth = [] if self.engine == "sync" else [f"--iodepth={self.depth}"]
        return [
            f"--rw={rw}",
            f"--ioengine={engine}",
            *depth,
            f"--bs={self.block}",
            f"--direct={self.direct}",
            f"--numjobs={self.jobs}",
        ]


def parse(output):
    """The single (group) job of fio's JSON; `BenchError` when it failed."""
    try:
        job = json.loads(output[output.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError) as error:
        raise BenchError(f"fio gave no result: {output.strip()[-400:]}") from error
    if job["error"]:
        raise BenchError(f"fio: error {job['error']}")
    return job


def jobs(output):
    """IOPS of each job of fio's JSON by its name; `BenchError` when one failed."""
    try:
        found = json.loads(output[output.index("{") :])["jobs"]
    except (ValueError, KeyError) as error:
        raise BenchError(f"fio gave no result: {output.strip()[-400:]}") from error
    if any(job["error"] for job in found):
        raise BenchError(f"fio: errors {[job['error'] for job in found]}")
    return {job["jobname"]: job["read"]["iops"] + job["write"]["iops"] for job in found}


def run(server, case, size, runtime_s, prefix=()):
    """Runs `case` on the file of `server` for `runtime_s` after a ramp of 1 s; `prefix`: words
    before the command.

    Returns IOPS and MiB/s of reads, writes and both, mean and 99th percentile completion latency in
    µs, CPU in µs for each I/O of the daemon and of the whole machine. The CPU is that of the whole
    run, ramp included, so it is divided by the rate times (runtime + ramp).
    """
    command = [
        *prefix,
        *program(),
        "--name=t",
        f"--filename={server.path}",
        f"--size={size}",
        "--time_based",
        f"--runtime={runtime_s}",
        f"--ramp_time={RAMP_S}",
        "--group_reporting",
        "--thread",
        "--norandommap",
        "--output-format=json",
        *case.args(),
    ]
    daemon = proc.cpu_seconds(server.pid) if server.pid else 0
    machine = proc.machine_busy_seconds()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=runtime_s + RAMP_S + 60
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"fio did not end: {' '.join(command)}") from error
    machine = proc.machine_busy_seconds() - machine
    daemon = proc.cpu_seconds(server.pid) - daemon if server.pid else 0
    server.alive()
    if done.returncode:
        raise BenchError(
            f"fio ended with {done.returncode}: {(done.stderr + done.stdout).strip()[-400:]}"
        )
    job = parse(done.stdout)
    out = {}
    for op in ("read", "write"):
        latency = job[op]["clat_ns"]
        out[op] = {
            "iops": job[op]["iops"],
            "mib_s": job[op]["bw_bytes"] / (1 << 20),
            "latency_us": latency["mean"] / 1e3,
            "p99_us": latency.get("percentile", {}).get("99.000000", 0) / 1e3,
        }
    out["iops"] = out["read"]["iops"] + out["write"]["iops"]
    out["mib_s"] = out["read"]["mib_s"] + out["write"]["mib_s"]
    if out["iops"] <= 0:
        raise BenchError(f"fio did no I/O: {' '.join(command)}")
    done_ios = out["iops"] * (runtime_s + RAMP_S)
    out["daemon_us"] = daemon / done_ios * 1e6
    out["machine_us"] = machine / done_ios * 1e6
    # Percent of the measured time, of all jobs together.
    out["client_us"] = (
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * runtime_s / (out["iops"] * runtime_s) * 1e6
    )
    out["command"] = " ".join(command)
    return out


def count(server, op, depth, ios, size):
    """Does `ios` random 4 KiB I/Os, no ramp; for counting system calls."""
    command = [
        *program(),
        "--name=t",
        f"--filename={server.path}",
        f"--size={size}",
        f"--number_ios={ios}",
        "--ioengine=libaio",
        f"--iodepth={depth}",
        f"--rw=rand{op}",
        "--bs=4k",
        "--direct=1",
        "--thread",
        "--norandommap",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise BenchError(
            f"fio ended with {done.returncode}: {(done.stderr + done.stdout).strip()[-400:]}"
        )
    return parse(done.stdout)[op]["total_ios"]
