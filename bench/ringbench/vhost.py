"""vhost-user-blk: the servers, and the clients that load them. Each client returns one run: a rate,
and the CPU of each side for each I/O.

Server and client are bound to CPUs, the same ones for every server: one queue has a CPU for the
server and one for the client, several queues have all CPUs for both.
"""

import json
import os
import re
import shlex
import stat
import subprocess
import threading
import time

from . import fio, proc
from .measure import Images
from .servers import HERE, READY_S, BenchError, Image, Server, peer_argv

ROOT = os.path.dirname(HERE)
SYSCALLS = "raw_syscalls:sys_enter"


class SocketServer(Server):
    """A server that listens on `socket`, instead of one that mounts a file."""

    @property
    def socket(self):
        """Where clients connect."""
        return os.path.join(self.dir, "vhost.sock")

    def _wait_for_data(self):
        while time.monotonic() - self.started < READY_S:
            try:
                if stat.S_ISSOCK(os.stat(self.socket).st_mode):
                    return time.monotonic() - self.started
            except FileNotFoundError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.001)
        time.sleep(0.2)
        said = b"".join(self.said).decode(errors="replace")[-800:].strip()
        raise BenchError(f"{self.name}: no socket; it said: {said or '(nothing)'}")

    def upgrade(self):
        """Starts the same command again, which takes over from the one that runs."""
        old = self.process
        new = subprocess.Popen(
            [*self.make_command(self.path), "--upgrade"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=lambda: self.said.extend(new.stdout), daemon=True).start()
        try:
            ended = old.wait(READY_S)
        except subprocess.TimeoutExpired:
            ended = "not at all"
        if ended != 0:
            # Whichever of the two serves now, neither stays behind.
            new.kill()
            new.wait()
            said = b"".join(self.said).decode(errors="replace")[-800:].strip()
            raise BenchError(
                f"{self.name}: the one that was to be replaced ended {ended}; they said: {said}"
            )
        self.process = new


def ringdisk_command(binary, image, queues, socket):
    """ringdisk with as many virtqueues, past the page cache."""
    words = [binary, "serve", "--vhost-user-blk", socket, "--queues", str(queues)]
    if image.kind == "null":
        return [*words, "--null", str(image.size)]
    return [
        *words,
        "--direct",
        "--format",
        {"file": "raw", "qcow2": "qcow2"}[image.kind],
        image.path,
    ]


def qsd_command(image, queues, socket, iothread=True, argv=peer_argv):
    """qemu-storage-daemon: O_DIRECT, io_uring. Its export has one event loop: that of an iothread,
    which polls, or the main loop.
    """
    words = ["--object", "iothread,id=t"] if iothread else []
    if image.kind == "null":
        words += ["--blockdev", f"driver=null-co,node-name=d,size={image.size},read-zeroes=off"]
    else:
        name = "d" if image.kind == "file" else "f"
        words += [
            "--blockdev",
            f"driver=file,filename={image.path},node-name={name},cache.direct=on,aio=io_uring",
        ]
        if image.kind == "qcow2":
            words += ["--blockdev", "driver=qcow2,file=f,node-name=d"]
    export = (
        "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,"
        f"addr.path={socket},writable=on,num-queues={queues}"
    )
    if iothread:
        export += ",iothread=t"
    return argv("qemu-storage-daemon", *words, "--export", export)


class Load:
    """What the driver of our own does; see `crates/vhost/examples/load`."""

    def __init__(self, depth, queues=1, block=4096, op="read", order="random", wait="call"):
        self.depth, self.queues, self.block, self.op, self.order, self.wait = (
            depth,
            queues,
            block,
            op,
            order,
            wait,
        )

    def words(self, socket, size, seconds, hold=0):
        """For its command line."""
        return [
            socket,
            "--queues",
            str(self.queues),
            "--depth",
            str(self.depth),
            "--block",
            str(self.block),
            "--op",
            self.op,
            "--order",
            self.order,
            "--wait",
            self.wait,
            "--size",
            str(size),
            "--seconds",
            str(seconds),
            "--hold",
            str(hold),
        ]

    @property
    def name(self):
        """For people, and a key in the JSON file."""
        block = f"{self.block >> 10} KiB"
        queues = f"{self.queues} queue{'s' * (self.queues > 1)}"
        return (
            f"{block} {self.order} {self.op}, depth {self.depth}, {queues},"
            f" {'polling' if self.wait == 'poll' else 'called'}"
        )


class Bench:
    """Programs, images, CPUs, and how long a run is."""

    def __init__(self, binary, load, workdir, size, seconds, quick):
        self.binary, self.load, self.workdir = binary, load, workdir
        self.size, self.seconds, self.quick = size, seconds, quick
        self.images = Images(workdir, size)
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < 2:
            raise BenchError("two CPUs are needed, one for each side")
        self.allowed = ",".join(map(str, allowed))
        self.server_cpu, self.client_cpu = map(str, allowed[:2])

    def on_server(self, queues):
        """Binds a server to its CPUs."""
        return ["taskset", "-c", self.server_cpu if queues == 1 else self.allowed]

    def on_client(self, queues):
        """Binds a client to its CPUs."""
        return ["taskset", "-c", self.client_cpu if queues == 1 else self.allowed]

    def image(self, kind):
        """`null`, `file` or `qcow2`."""
        return self.images.get(kind)

    def serve(self, side, kind, queues=1):
        """One of the sides `ringdisk`, `qsd`, `qsd main loop` serving an image."""
        image = self.image(kind)

        def command(path):
            socket = os.path.join(os.path.dirname(path), "vhost.sock")
            if side == "ringdisk":
                return [
                    *self.on_server(queues),
                    *ringdisk_command(self.binary, image, queues, socket),
                ]
            return [*self.on_server(queues), *qsd_command(image, queues, socket, side == "qsd")]

        return SocketServer(side, command, self.workdir)

    def run_load(self, server, load, seconds=None):
        """The driver of our own as client."""
        command = [
            *self.on_client(load.queues),
            self.load,
            *load.words(server.socket, self.size, seconds or self.seconds),
        ]
        cpu = proc.clock_seconds(server.pid)
        found = parse_load(run(command), command)
        cpu = proc.clock_seconds(server.pid) - cpu
        server.alive()
        return figures(
            found["ios"],
            found["seconds"],
            cpu,
            found["cpu_s"],
            load.block,
            command,
            kicks=found["kicks"] / found["ios"],
            calls=found["calls"] / found["ios"],
            batch=found["ios"] / found["batches"],
        )

    def run_qemu_img(self, server, depth, rate):
        """`qemu-img bench` over libblkio; as many I/Os as `rate` makes in the time of a run. Its
        start is part of its CPU.
        """
        ios = max(int(rate * self.seconds), 1000)
        words = [
            "bench",
            "-c",
            str(ios),
            "-d",
            str(depth),
            "-s",
            "4096",
            "-t",
            "none",
            "--image-opts",
            f"driver=virtio-blk-vhost-user,path={server.socket},cache.direct=on",
        ]
        command = [*self.on_client(1), *peer_argv("qemu-img", *words)]
        cpu = proc.clock_seconds(server.pid)
        before = os.times()
        said = run(command)
        after = os.times()
        cpu = proc.clock_seconds(server.pid) - cpu
        server.alive()
        found = re.search(r"completed in ([\d.]+) seconds", said)
        if not found:
            raise BenchError(f"qemu-img bench: {said.strip()[-400:]}")
        client = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        return figures(
            ios, float(found.group(1)), cpu, client, 4096, ["bench/peer", "run", "qemu-img", *words]
        )

    def run_host(self, path, case):
        """fio on the host's file, on the CPU of the client."""
        got = fio.run(
            HostFile(path), case, self.size, max(1, round(self.seconds)), prefix=self.on_client(1)
        )
        return {
            "iops": got["iops"],
            "mib_s": got["mib_s"],
            "server_us": 0.0,
            "client_us": got["client_us"],
            "command": got["command"],
        }

    def syscalls(self, side, load):
        """System calls of a server for each I/O, counted by perf, which hardly slows it down
        (strace does, and then it sleeps less).
        """
        with self.serve(side, "null", load.queues) as server:
            self.run_load(server, load, 0.2)
            words = ["perf", "stat", "-x", ",", "-e", SYSCALLS, "-p", str(server.pid)]
            try:
                counter = subprocess.Popen(
                    words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
            except OSError as error:
                raise BenchError(f"perf is needed to count system calls: {error}") from error
            time.sleep(0.3)
            command = [
                *self.on_client(load.queues),
                self.load,
                *load.words(server.socket, self.size, self.seconds),
            ]
            try:
                found = parse_load(run(command), command)
            finally:
                counter.send_signal(2)
                said = counter.communicate(timeout=20)[1]
        line = next((line for line in said.splitlines() if SYSCALLS in line), "")
        count = line.split(",")[0]
        if not count.isdigit():
            raise BenchError(f"perf stat: {said.strip()[-300:]}")
        return {
            "syscalls": int(count) / found["ios"],
            "kicks": found["kicks"] / found["ios"],
            "calls": found["calls"] / found["ios"],
        }

    def pause(self, kind, load, upgrade):
        """Longest time in ms that a client gets no answer, with an upgrade of the server in the
        middle or, to compare, without one.
        """
        with self.serve("ringdisk", kind, load.queues) as server:
            self.run_load(server, load, 0.2)
            command = [
                *self.on_client(load.queues),
                self.load,
                *load.words(server.socket, self.size, 1.5),
            ]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as client:
                try:
                    time.sleep(0.5)
                    if upgrade:
                        server.upgrade()
                    if client.poll() is not None:
                        raise BenchError("the client ended before the upgrade did")
                    found = parse_load(client.stdout.readline(), command)
                finally:
                    client.kill()
            server.alive()
            return found["pause_s"] * 1e3

    def idle(self, side, kind, seconds):
        """CPU in percent, context switches in a second and memory in MiB (without shared, so
        without the guest's) of a disk whose guest
        has used it and does nothing now."""
        load = Load(32)
        with self.serve(side, kind) as server:
            command = [
                *self.on_client(1),
                self.load,
                *load.words(server.socket, self.size, 1, seconds + 30),
            ]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as client:
                try:
                    parse_load(client.stdout.readline(), command)
                    time.sleep(1)
                    cpu, switched = proc.clock_seconds(server.pid), proc.switches(server.pid)
                    time.sleep(seconds)
                    cpu, switched = (
                        proc.clock_seconds(server.pid) - cpu,
                        proc.switches(server.pid) - switched,
                    )
                    if client.poll() is not None:
                        raise BenchError("the client has gone")
                    return {
                        "cpu_percent": cpu / seconds * 100,
                        "switches": switched / seconds,
                        "memory_mib": proc.own_mib(server.pid),
                    }
                finally:
                    client.kill()


class HostFile:
    """A file, for fio."""

    def __init__(self, path):
        self.path, self.pid = path, None

    def alive(self):
        """A file does not end."""


def run(command):
    """Output of a client."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise BenchError(
            f"{shlex.join(command)}: status {done.returncode}:"
            f" {(done.stderr + done.stdout).strip()[-400:]}"
        )
    return done.stdout


def parse_load(line, command):
    """The figures that our driver printed."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{shlex.join(command)}: {line.strip()[-400:]}") from error
    if found["failed"] or not found["ios"]:
        raise BenchError(f"{shlex.join(command)}: {line.strip()}")
    return found


def figures(ios, seconds, server_s, client_s, block, command, **more):
    """One run."""
    return {
        "iops": ios / seconds,
        "mib_s": ios * block / seconds / (1 << 20),
        "server_us": server_s / ios * 1e6,
        "client_us": client_s / ios * 1e6,
        "command": shlex.join(command),
        **more,
    }
