"""One fio run with parts of seconds, fixed numbers of I/Os, or a list of offsets; for the qcow2
tables.
"""

import random
import subprocess

from . import proc
from .fio import parse, program
from .servers import BenchError

ENGINES = {"sync": "psync", "aio": "libaio"}


def run(
    server,
    rw,
    block,
    depth,
    jobs=1,
    size=None,
    seconds=None,
    ios=None,
    ramp_s=0.25,
    offsets=None,
    extra=(),
):
    """Runs fio on the file of `server`; returns rate, MiB/s and the daemon's CPU in µs for each
    I/O.

    `seconds`: time based; `ios`: so many for each job, each block at most once; `offsets`: a file
    of `replay()`.
    """
    engine = "sync" if depth == 1 else "aio"
    command = [
        *program(),
        "--name=t",
        f"--filename={server.path}",
        f"--rw={rw}",
        f"--bs={block}",
        "--direct=1",
        f"--ioengine={ENGINES[engine]}",
        f"--iodepth={depth}",
        f"--numjobs={jobs}",
        "--group_reporting",
        "--thread",
        "--output-format=json",
        "--randrepeat=1",
        *extra,
    ]
    if size:
        command.append(f"--size={size}")
    if seconds:
        command += [
            "--time_based",
            f"--runtime={int(seconds * 1000)}ms",
            f"--ramp_time={int(ramp_s * 1000)}ms",
            "--norandommap",
        ]
    if ios:
        command.append(f"--number_ios={ios}")
    if offsets:
        command += [f"--read_iolog={offsets}", "--replay_no_stall=1"]
    daemon = proc.cpu_seconds(server.pid) if server.pid else 0
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"fio did not end: {' '.join(command)}") from error
    daemon = proc.cpu_seconds(server.pid) - daemon if server.pid else 0
    server.alive()
    if done.returncode:
        raise BenchError(
            f"fio ended with {done.returncode}: {(done.stderr + done.stdout).strip()[-400:]}"
        )
    job = parse(done.stdout)
    parts = [job[op] for op in ("read", "write")]
    iops = sum(part["iops"] for part in parts)
    if iops <= 0:
        raise BenchError(f"fio did no I/O: {' '.join(command)}")
    total = sum(part["total_ios"] for part in parts)
    # The CPU counts the ramp too, the I/Os of a time based run do not.
    all_ios = iops * (seconds + ramp_s) if seconds else total
    return {
        "iops": iops,
        "mib_s": sum(part["bw_bytes"] for part in parts) / (1 << 20),
        "daemon_us": daemon / all_ios * 1e6,
        "command": " ".join(command),
    }


def replay(path, target, offsets, count, op="read", length=4096, seed=1):
    """Writes a list for fio of `count` requests at random ones of `offsets`."""
    chance = random.Random(seed)
    with open(path, "w") as f:
        f.write(f"fio version 2 iolog\n{target} add\n{target} open\n")
        for _ in range(count):
            f.write(f"{target} {op} {chance.choice(offsets)} {length}\n")
        f.write(f"{target} close\n")
