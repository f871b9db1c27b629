"""Disks of a real guest: the ways to give it one (the kernel module among them), the virtual
machine of tests/vm, and fio in it; and fio on the host, which no guest can beat.

The guest prints a line before and after each fio run; here the CPU clocks of server and QEMU are
read at those lines. What QEMU spends includes the guest's own work.
"""

import json
import os
import shlex
import subprocess
import tempfile

from . import proc
from .measure import say
from .servers import HERE, PEER, BenchError, Image, peer_argv
from .vhost import SocketServer, qsd_command, ringdisk_command

ROOT = os.path.dirname(HERE)
MARK = "ringdisk-bench"
# Where the guest finds the disk: after the one of the virtual machine itself.
DISK = "/dev/vdb"
BOOT_S = 300
# CPUs of a guest, in two nodes; more where there are more queues.
GUEST_CPUS = 4
MODULE = "/dev/vhost-blk"
# Workers of the module.
WORKERS = (1, 2, 4)


class Way:
    """How a guest gets its disk: a server beside QEMU or none, and QEMU's words. Neither of both:
    no guest, fio on the host.
    """

    def __init__(self, name, text, server=None, words=None, workers=0, path=None):
        self.name, self.text, self.server, self.words, self.workers, self.path = (
            name,
            text,
            server,
            words,
            workers,
            path,
        )

    @property
    def on_host(self):
        """Whether fio runs on the host."""
        return self.words is None


def node(image):
    """QEMU's block device."""
    if image.kind == "null":
        return f"driver=null-co,node-name=d0,size={image.size},read-zeroes=off"
    driver = "host_device" if image.kind == "device" else "file"
    return f"driver={driver},filename={image.path},node-name=d0,cache.direct=on,aio=io_uring"


def own(image, queues, iothreads):
    """Words of QEMU's own virtio-blk: one IOThread, or several with iothread-vq-mapping (QEMU 9.0).
    """
    out = ["-blockdev", node(image)]
    for number in range(iothreads):
        out += ["-object", f"iothread,id=t{number}"]
    if iothreads == 1:
        return [*out, "-device", f"virtio-blk-pci,drive=d0,num-queues={queues},iothread=t0"]
    mapping = [{"iothread": f"t{number}"} for number in range(iothreads)]
    device = {
        "driver": "virtio-blk-pci",
        "drive": "d0",
        "num-queues": queues,
        "iothread-vq-mapping": mapping,
    }
    return [*out, "-device", json.dumps(device, separators=(",", ":"))]


def vhost_user(queues, socket):
    """Words of QEMU for a server beside it; the machine's memory is shared anyway."""
    return [
        "-chardev",
        f"socket,id=vu,path={socket}",
        "-device",
        f"vhost-user-blk-pci,chardev=vu,num-queues={queues}",
    ]


def ways(binary, image, queues, argv=peer_argv):
    """All ways, by name; `argv` makes the command of a program of the peer."""
    served = Image("file" if image.kind == "device" else image.kind, image.path, image.size)
    front_end = lambda socket: vhost_user(queues, socket)
    ours = lambda *more: lambda socket: [
        *ringdisk_command(binary, served, queues, socket),
        "--accel",
        *more,
    ]
    out = []
    if image.kind != "null":
        out.append(Way("host", "no guest: fio on the host", path=image.path))
    out.append(
        Way("qemu", "QEMU's own virtio-blk, one IOThread", words=lambda _: own(image, queues, 1))
    )
    if queues > 1:
        out.append(
            Way(
                "qemu-many",
                f"the same, {queues} IOThreads (iothread-vq-mapping)",
                words=lambda _: own(image, queues, queues),
            )
        )
    out.append(
        Way(
            "qsd",
            "qemu-storage-daemon, vhost-user-blk, one iothread",
            lambda socket: qsd_device(image, queues, socket, argv),
            front_end,
        )
    )
    out.append(Way("ringdisk", "ringdisk serve, in userspace", ours("off"), front_end))
    for workers in WORKERS:
        if workers <= queues:
            out.append(
                Way(
                    f"module-{workers}",
                    f"ringdisk serve, the kernel module with {workers} worker{'s' * (workers > 1)}",
                    ours("require", "--accel-workers", str(workers)),
                    front_end,
                    workers,
                )
            )
    return {way.name: way for way in out}


def obstacle(way, image, tcg, queues):
    """Why this host cannot measure a way, or None."""
    if way.workers and image.kind == "null":
        return "the module needs a device or a raw file (--device), not a null disk"
    if way.workers and not os.path.exists(MODULE):
        return (
            f"there is no {MODULE}: the module is not loaded (modprobe vhost_blk; docs/vhost-blk.md"
            " says how to install it)"
        )
    needed = queues if way.on_host else vcpus(queues) + 2
    if not tcg and (os.cpu_count() or 1) < needed:
        return f"it needs {needed} CPUs" + (
            ""
            if way.on_host
            else f": the guest has {vcpus(queues)}, and there is something beside it"
        )
    return None


def vcpus(queues):
    """CPUs of a guest with so many queues: one for each, in sockets of two."""
    return max(GUEST_CPUS, queues + queues % 2)


def vcpu_words(queues):
    """Words of QEMU that give the machine of tests/vm more than its own CPUs: further sockets, in
    its two nodes by turns.
    """
    count = vcpus(queues)
    if count == GUEST_CPUS:
        return []
    out = ["-smp", f"{count},sockets={count // 2},cores=2"]
    for socket in range(GUEST_CPUS // 2, count // 2):
        out += ["-numa", f"cpu,node-id={socket % 2},socket-id={socket}"]
    return out


def qsd_device(image, queues, socket, argv):
    """As a file, but block devices have a driver of their own."""
    words = qsd_command(
        Image("file" if image.kind == "device" else image.kind, image.path, image.size),
        queues,
        socket,
        argv=argv,
    )
    if image.kind == "device":
        words = [
            word.replace("driver=file,filename=", "driver=host_device,filename=") for word in words
        ]
    return words


def fio_words(case, seconds, path=DISK):
    """One fio run, in the guest unless told otherwise. One that reads is not able to write."""
    safe = [] if "write" in case["rw"] else ["--readonly"]
    return [
        "fio",
        "--name=t",
        *safe,
        f"--filename={path}",
        f"--rw={case['rw']}",
        "--bs=4k",
        "--direct=1",
        "--ioengine=io_uring",
        f"--iodepth={case['depth']}",
        f"--numjobs={case['jobs']}",
        "--group_reporting",
        "--norandommap",
        "--time_based",
        f"--runtime={seconds}",
        "--ramp_time=1",
        "--output-format=json",
    ]


def cases(queues, writes):
    """What runs by each way: the latency of one request, and a deep load on every queue."""
    return [
        {
            "name": f"{op}, depth {depth}",
            "rw": f"rand{op}",
            "depth": depth,
            "jobs": 1 if depth == 1 else queues,
        }
        for op in (("read", "write") if writes else ("read",))
        for depth in (1, 128)
    ]


def job(todo, seconds):
    """The commands of the guest."""
    out = ["set -e"]
    for number, case in enumerate(todo):
        # The result is one line, so that it cannot be mixed up with marks.
        out.append(
            f"echo {MARK} begin {number}; {shlex.join(fio_words(case, seconds))} >/run/fio.json; "
            f"echo {MARK} end {number}; echo {MARK} result $(tr -d '\\n' </run/fio.json)"
        )
    return "\n".join(out)


def machine_words(todo, seconds, limit_s=None):
    """The virtual machine with its job."""
    return [
        os.path.join(ROOT, "tests/vm/run"),
        "--limit-s",
        str(limit_s or BOOT_S + len(todo) * (seconds + 30)),
        "--command",
        job(todo, seconds),
    ]


def environment(words, accel, folder):
    """For tests/vm/run: its QEMU is the peer's, which is newer than most distributions'."""
    tree = subprocess.run([PEER, "path"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = os.path.join(folder, "qemu-system-x86_64")
    with open(wrapper, "w") as f:
        f.write(
            f"#!/bin/sh\nexec {shlex.quote(PEER)} run qemu-system-x86_64 -L {tree}/usr/share/qemu"
            f' -L {tree}/usr/share/seabios "$@"\n'
        )
    os.chmod(wrapper, 0o755)
    env = dict(
        os.environ, PATH=f"{folder}:{os.environ['PATH']}", RINGDISK_VM_QEMU=" ".join(words), CI="1"
    )
    if accel == "kvm":
        env |= {"RINGDISK_VM_ACCEL": "kvm", "RINGDISK_VM_CPU": "host"}
    return env


class Counters:
    """What is read at each mark."""

    def __init__(self, server, machine, binary):
        self.server, self.machine, self.binary = server, machine, binary

    def qemu(self):
        """The process of QEMU itself."""
        for pid in proc.tree(self.machine.pid):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    if b"\0-nodefaults\0" in f.read():
                        return pid
            except OSError:
                pass
        raise BenchError("QEMU has gone")

    def read(self):
        """CPU seconds of both sides and of the whole host; kicks and calls where the daemon counts
        them.
        """
        out = {
            "qemu_s": proc.clock_seconds(self.qemu()),
            "server_s": proc.clock_seconds(self.server.pid) if self.server else 0.0,
            "host_s": proc.machine_busy_seconds(),
        }
        if self.server and self.server.way.name.startswith(("ringdisk", "module")):
            said = subprocess.run(
                [self.binary, "ctl", self.server.socket, "stats", "--json"],
                capture_output=True,
                text=True,
            )
            try:
                stats = json.loads(said.stdout)
                if not self.server.way.workers:
                    out |= {
                        key: sum(queue[key] for queue in stats["queues"])
                        for key in ("kicks", "calls")
                    }
                elif not stats["accel"]["on"]:
                    raise BenchError(
                        f"{self.server.name}: the module does not serve it:"
                        f" {stats['accel']['reason']}"
                    )
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(
                    f"ringdisk ctl stats: {said.stdout[-200:]}{said.stderr[-200:]}"
                ) from error
        return out


def measure(way, todo, seconds, accel, binary, workdir, pin, queues):
    """Boots one guest and runs all its cases, or runs them on the host. Gives a list of runs."""
    if way.on_host:
        return [on_host(way.path, case, seconds, pin) for case in todo]
    words = lambda socket: [*way.words(socket), *vcpu_words(queues)]
    if way.server is None:
        return boot(None, words(None), todo, seconds, accel, binary, pin)
    command = lambda path: way.server(os.path.join(os.path.dirname(path), "vhost.sock"))
    with SocketServer(way.name, command, workdir) as server:
        server.way = way
        return boot(server, words(server.socket), todo, seconds, accel, binary, pin)


def on_host(path, case, seconds, pin):
    """fio on the host, on the CPUs of the guest."""
    prefix = ["taskset", "-c", pin["guest"]] if pin["guest"] else []
    begin, before = os.times(), proc.machine_busy_seconds()
    done = subprocess.run(
        [*prefix, *fio_words(case, seconds, path)],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    end, after = os.times(), proc.machine_busy_seconds()
    if done.returncode:
        raise BenchError(
            f"fio on the host: status {done.returncode}:"
            f" {(done.stderr + done.stdout).strip()[-400:]}"
        )
    cpu = end.children_user + end.children_system - begin.children_user - begin.children_system
    run = figures(
        case,
        json.loads(done.stdout),
        {"qemu_s": 0.0, "server_s": 0.0, "host_s": before},
        {"qemu_s": cpu, "server_s": 0.0, "host_s": after},
        seconds,
    )
    say(f"host: {case['name']}: {run}")
    return run


def boot(server, words, todo, seconds, accel, binary, pin):
    """One guest."""
    with tempfile.TemporaryDirectory() as folder:
        if server and pin["server"]:
            subprocess.run(
                ["taskset", "-a", "-p", "-c", pin["server"], str(server.pid)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        prefix = ["taskset", "-c", pin["guest"]] if pin["guest"] else []
        with subprocess.Popen(
            [*prefix, *machine_words(todo, seconds)],
            env=environment(words, accel, folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as machine:
            counters, runs, said, before, after = (
                Counters(server, machine, binary),
                [],
                [],
                None,
                None,
            )
            try:
                for line in machine.stdout:
                    said = (said + [line])[-20:]
                    if not line.startswith(MARK):
                        continue
                    _, what, rest = line.split(" ", 2)
                    if what == "begin":
                        before = counters.read()
                    elif what == "end":
                        after = counters.read()
                    else:
                        runs.append(
                            figures(todo[len(runs)], json.loads(rest), before, after, seconds)
                        )
                        say(
                            f"{server.name if server else 'qemu'}: {todo[len(runs) - 1]['name']}:"
                            f" {runs[-1]}"
                        )
            finally:
                machine.terminate()
                machine.wait(30)
    if len(runs) != len(todo):
        raise BenchError(
            f"the guest did {len(runs)} of {len(todo)} cases; it said:"
            f" {''.join(said).strip()[-600:]}"
        )
    return runs


def figures(case, found, before, after, seconds):
    """One run. CPU is that of ramp and run, so it is divided by the rate times both."""
    side = found["jobs"][0]["write" if "write" in case["rw"] else "read"]
    if found["jobs"][0]["error"] or side["iops"] <= 0:
        raise BenchError(f"fio in the guest: error {found['jobs'][0]['error']}")
    ios = side["iops"] * (seconds + 1)
    out = {
        "iops": side["iops"],
        "latency_us": side["clat_ns"]["mean"] / 1e3,
        "p99_us": side["clat_ns"].get("percentile", {}).get("99.000000", 0) / 1e3,
    }
    out |= {
        f"{key[:-2]}_us": (after[key] - before[key]) / ios * 1e6
        for key in ("server_s", "qemu_s", "host_s")
    }
    return out | {
        key: (after[key] - before[key]) / ios for key in ("kicks", "calls") if key in after
    }
