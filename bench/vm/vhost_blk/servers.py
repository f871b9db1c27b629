"""What a request of a guest costs the host, by each way to serve it over vhost-user: the kernel
module under `ringdisk serve`, our userspace path, and qemu-storage-daemon. One client for all, the
driver of our own of bench/vhost: random reads of 4 KiB, 32 in flight in each queue.

Runs in the machine of bench/vm/vhost-blk, which has one CPU at work and counts instructions as
time: CPU time in ns is instructions. What interrupts cost is part of whatever they interrupt.

Each row is the difference of a long and a short run of the client, so that neither set-up nor
hand-over counts. Prints a line `ROW {json}` for each; what could not be measured is a line `FAILED
…`, and the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from ringbench import proc, vhost  # noqa: E402
from ringbench.servers import BenchError, peer_argv  # noqa: E402

# Seconds of the two runs, and of those whose system calls are counted (which slows them down).
SHORT_S, LONG_S = 0.03, 0.15
CALLS_SHORT_S, CALLS_LONG_S = 0.02, 0.06
SYSCALLS = "raw_syscalls:sys_enter"
BYTES = 256 << 20


def arguments():
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("ringdisk")
    p.add_argument("load", help="the client")
    p.add_argument("disks", nargs="+", help="block devices and files")
    p.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains TEXT")
    p.add_argument("--profile", action="store_true", help="also where the instructions go, by perf")
    return p.parse_args()


def ours(binary, disk, socket, queues, threads, accel, *more):
    """ringdisk, with or without the module. Direct I/O on tmpfs wants whole pages, which the module
    leaves to the guest.
    """
    more = (*more, *(("--logical-block-size", "4096") if disk.startswith("/dev/shm/") else ()))
    words = [
        binary,
        "serve",
        "--vhost-user-blk",
        socket,
        "--queues",
        str(queues),
        "--direct",
        "--format",
        "raw",
        disk,
        "--accel",
        accel,
        *more,
    ]
    return [
        *words,
        *(["--accel-workers", str(threads)] if accel == "require" else ["--threads", str(threads)]),
    ]


def peers(disk, socket, queues, aio, poll):
    """qemu-storage-daemon with an iothread that polls as it does by default, or not at all."""
    driver = (
        "host_device" if disk.startswith("/dev/") and not disk.startswith("/dev/shm/") else "file"
    )
    return peer_argv(
        "qemu-storage-daemon",
        "--object",
        "iothread,id=t" + ("" if poll else ",poll-max-ns=0"),
        "--blockdev",
        f"driver={driver},filename={disk},node-name=d,cache.direct=on,aio={aio}",
        "--export",
        "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,"
        f"addr.path={socket},writable=on,num-queues={queues},iothread=t",
    )


def ways(binary, disk, queues):
    """Name, threads and command (of a socket) of each."""
    out = []
    block = os.path.realpath(disk).startswith("/dev/") and not disk.startswith("/dev/shm/")
    for threads in sorted({1, queues}):
        for engine in ("kiocb", "bio") if block else ("kiocb",):
            out.append(
                (
                    f"module, {engine}",
                    threads,
                    lambda s, t=threads, e=engine: ours(
                        binary, disk, s, queues, t, "require", "--accel-engine", e
                    ),
                )
            )
        out.append(
            ("userspace", threads, lambda s, t=threads: ours(binary, disk, s, queues, t, "off"))
        )
    out.append(
        (
            "userspace, pinned memory",
            1,
            lambda s: ours(binary, disk, s, queues, 1, "off", "--pin-guest-memory"),
        )
    )
    for aio, poll in (("io_uring", True), ("native", False)):
        out.append(
            (
                f"qsd, {aio}{', polling' * poll}",
                1,
                lambda s, a=aio, p=poll: peers(disk, s, queues, a, p),
            )
        )
    return out


def busy_ns():
    """Time that tasks had the CPU; what the idle one had is not part of it."""
    with open("/proc/schedstat") as f:
        return sum(int(line.split()[7]) for line in f if line.startswith("cpu"))


def counters(server):
    """What the server has cost so far, and all tasks together. Threads that have ended count."""
    return {
        "server": sum(proc.clock_seconds(pid) for pid in proc.tree(server.pid)) * 1e9,
        "switches": proc.switches(server.pid),
        "machine": busy_ns(),
    }


def run(server, client, queues, seconds):
    """One run of the client: what it cost, and what the client says. Its connection is still there
    when counters are read: workers of the module end with it."""
    words = [
        client,
        server.socket,
        "--queues",
        str(queues),
        "--depth",
        "32",
        "--size",
        str(BYTES),
        "--seconds",
        str(seconds),
        "--hold",
        "1",
    ]
    before = counters(server)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            found = vhost.parse_load(process.stdout.readline(), words)
        except BenchError:
            # Why, when the server has ended.
            process.wait(30)
            server.alive()
            raise
        after = counters(server)
        if server.name.startswith("module"):
            accelerated(server)
        process.wait(30)
    server.alive()
    out = {key: after[key] - before[key] for key in after}
    return (
        out
        | {key: found[key] for key in ("ios", "kicks", "calls")}
        | {"client": found["cpu_s"] * 1e9}
    )


def accelerated(server):
    """Raises unless the module did all of it."""
    said = subprocess.run(
        [server.binary, "ctl", server.socket, "stats", "--json"], capture_output=True, text=True
    )
    try:
        stats = json.loads(said.stdout)
        if (
            not stats["accel"]["on"]
            or not sum(queue["reads"] for queue in stats["accel"]["queues"])
            or sum(q["reads"] for q in stats["queues"])
        ):
            raise BenchError(f"{server.name}: not by the module alone: {stats['accel']}")
    except (ValueError, KeyError) as error:
        raise BenchError(
            f"{server.name}: stats: {said.stdout[-300:]}{said.stderr[-300:]}"
        ) from error


def syscalls(server, client, queues, seconds):
    """System calls of all threads of the server during one run, and its requests."""
    pids = ",".join(map(str, proc.tree(server.pid)))
    with subprocess.Popen(
        ["perf", "stat", "-x", ",", "-e", SYSCALLS, "-p", pids],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as perf:
        # Its first system call that is counted is one of ours: no way to see it ready but to wait.
        subprocess.run(["sleep", "2"], check=True)
        found = run(server, client, queues, seconds)
        perf.send_signal(2)
        said = perf.communicate(timeout=60)[1]
    line = next((line for line in said.splitlines() if SYSCALLS in line), "")
    if not line.split(",")[0].isdigit():
        raise BenchError(f"perf stat: {said.strip()[-300:]}")
    return int(line.split(",")[0]), found["ios"]


def profile(server, client, queues):
    """The functions of the whole machine that take most, each with its program."""
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        words = [
            "perf",
            "record",
            "-q",
            "-a",
            "-e",
            "cpu-clock",
            "-c",
            "20000",
            "-o",
            f"{folder}/data",
            "--",
            client,
            server.socket,
            "--queues",
            str(queues),
            "--depth",
            "32",
            "--size",
            str(BYTES),
            "--seconds",
            "0.2",
        ]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        said = subprocess.run(
            [
                "perf",
                "report",
                "-i",
                f"{folder}/data",
                "--stdio",
                "--percent-limit",
                "0.4",
                "--sort",
                "comm,dso,symbol",
            ],
            capture_output=True,
            text=True,
        )
    for line in said.stdout.splitlines():
        if line.strip() and not line.startswith("#"):
            print("PROFILE", server.name, queues, line.strip())


def row(a, disk, queues, way, folder):
    """One row: the figures of one request."""
    name, threads, command = way
    with vhost.SocketServer(
        name, lambda path: command(os.path.join(os.path.dirname(path), "vhost.sock")), folder
    ) as server:
        server.binary = a.ringdisk
        run(server, a.load, queues, SHORT_S)
        short, long = run(server, a.load, queues, SHORT_S), run(server, a.load, queues, LONG_S)
        ios = long["ios"] - short["ios"]
        found = {key: (long[key] - short[key]) / ios for key in short if key != "ios"}
        found["rest"] = found.pop("machine") - found["client"]
        (few, few_ios), (many, many_ios) = [
            syscalls(server, a.load, queues, s) for s in (CALLS_SHORT_S, CALLS_LONG_S)
        ]
        found["syscalls"] = (many - few) / (many_ios - few_ios)
        if a.profile:
            profile(server, a.load, queues)
    return {
        "disk": os.path.basename(disk) if not disk.startswith("/dev/shm/") else "tmpfs",
        "way": name,
        "queues": queues,
        "threads": threads,
        "ios": ios,
    } | found


def main():
    """The exit status."""
    a = arguments()
    failed = 0
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        for disk in a.disks:
            for queues in (1, 4):
                for way in ways(a.ringdisk, disk, queues):
                    if a.only not in f"{disk} {queues} {way[1]} {way[0]}":
                        continue
                    try:
                        print("ROW", json.dumps(row(a, disk, queues, way, folder)), flush=True)
                    except (
                        BenchError,
                        OSError,
                        subprocess.SubprocessError,
                        ZeroDivisionError,
                    ) as error:
                        failed = 1
                        print(
                            "FAILED",
                            disk,
                            queues,
                            way[0],
                            way[1],
                            " ".join(str(error).split()),
                            flush=True,
                        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
