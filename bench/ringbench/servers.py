"""The servers: how each is started, when it is ready, and that nothing of it stays behind.

A server is a command that serves one file at one mountpoint in the foreground. `Server` is a
context manager; whatever happens inside, leaving it ends the process (and its children) and removes
the mount.
"""

import collections
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from . import proc

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PEER = os.path.join(HERE, "peer")
READY_S = 15
STOP_S = 10


SWITCH = "/sys/module/fuse/parameters/enable_uring"


class BenchError(Exception):
    """A figure could not be measured; the text says why."""


def switched_on():
    """Whether this kernel offers FUSE over io_uring now."""
    try:
        with open(SWITCH) as f:
            return f.read().strip() in ("Y", "1")
    except OSError:
        return False


def peer_argv(program, *args):
    """The command that runs a program of the peer's tree, without a shell in between."""
    done = subprocess.run([PEER, "argv", program, *args], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(done.stderr.strip())
    return done.stdout.splitlines()


class Image:
    """What is served: `null` (with a latency), a raw `file`, or a `qcow2` (over a raw `backing`
    file); sizes in bytes, latency in ns.
    """

    def __init__(self, kind, path=None, size=1 << 30, latency_ns=0, backing=None):
        self.kind, self.path, self.size, self.latency_ns, self.backing = (
            kind,
            path,
            size,
            latency_ns,
            backing,
        )


def ringdisk_command(binary, image, threads, mountpoint, transport="auto"):
    """ringdisk serving `image` with O_DIRECT below."""
    base = [binary, "mount", "--transport", transport, "--threads", str(threads)]
    if image.kind == "null":
        latency = ["--latency", f"{image.latency_ns // 1000}us"] if image.latency_ns else []
        return [*base, "--null", str(image.size), *latency, mountpoint]
    fmt = {"file": "raw", "qcow2": "qcow2"}[image.kind]
    return [*base, "--direct", "--format", fmt, image.path, mountpoint]


def qsd_command(image, threads, mountpoint, growable):
    """qemu-storage-daemon: io_uring, O_DIRECT, one iothread for each queue.

    `growable=on` is its best configuration: without it the export does not negotiate ASYNC_DIO, and
    the kernel runs all direct asynchronous I/O at depth 1. `growable=off` is its default.
    """
    args, names = [], []
    if threads > 1:
        names = [f"io{i}" for i in range(threads)]
        for name in names:
            args += ["--object", f"iothread,id={name}"]
    if image.kind == "null":
        node = f"driver=null-co,node-name=d,size={image.size},read-zeroes=off"
        if image.latency_ns:
            node += f",latency-ns={image.latency_ns}"
        args += ["--blockdev", node]
    else:
        name = "d" if image.kind == "file" else "f"
        args += [
            "--blockdev",
            f"driver=file,filename={image.path},node-name={name},cache.direct=on,aio=io_uring",
        ]
        if image.kind == "qcow2":
            below = ""
            if image.backing:
                # Not said, it would be opened with the page cache.
                args += [
                    "--blockdev",
                    "driver=file,node-name=bf,cache.direct=on,aio=io_uring,read-only=on,"
                    f"filename={image.backing}",
                    "--blockdev",
                    "driver=raw,file=bf,node-name=b,read-only=on",
                ]
                below = ",backing=b"
            args += ["--blockdev", f"driver=qcow2,file=f,node-name=d{below}"]
    export = {
        "type": "fuse",
        "id": "e",
        "node-name": "d",
        "mountpoint": mountpoint,
        "writable": True,
        "growable": growable,
    }
    if names:
        export["iothread"] = names
    return peer_argv("qemu-storage-daemon", *args, "--export", json.dumps(export))


class Side:
    """One column of the tables: a name and how to serve an image."""

    def __init__(self, name, command):
        self.name, self.command = name, command

    def serve(self, image, workdir):
        """A `Server` that is not started yet."""
        return Server(self.name, lambda mountpoint: self.command(image, mountpoint), workdir)


def sides(binary, threads, transport):
    """All columns by name."""
    return {
        "ringdisk": Side(
            "ringdisk", lambda image, m: ringdisk_command(binary, image, threads, m, transport)
        ),
        "ringdisk-1": Side(
            "ringdisk-1", lambda image, m: ringdisk_command(binary, image, 1, m, transport)
        ),
        "qsd": Side("qsd", lambda image, m: qsd_command(image, threads, m, True)),
        "qsd-default": Side("qsd-default", lambda image, m: qsd_command(image, threads, m, False)),
    }


class Server:
    """One server process and its mounted file."""

    def __init__(self, name, make_command, workdir):
        self.name, self.make_command, self.workdir = name, make_command, workdir
        self.process, self.said = None, collections.deque(maxlen=50)

    @property
    def pid(self):
        """The process whose CPU, memory and calls are counted."""
        return self.process.pid

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="bench-", dir=self.workdir)
        self.path = os.path.join(self.dir, "disk")
        open(self.path, "w").close()
        try:
            command = self.make_command(self.path)
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            # Its last lines only: a server in trouble can print gigabytes.
            threading.Thread(
                target=lambda: self.said.extend(self.process.stdout), daemon=True
            ).start()
            self.first_byte_s = self._wait_for_data()
        except OSError as error:
            self.__exit__()
            raise BenchError(f"{self.name}: {error}") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_data(self):
        """Seconds from the start of the process to the first bytes read through the mount."""
        while time.monotonic() - self.started < READY_S:
            with open(self.path, "rb", buffering=0) as f:
                if f.read(4096):
                    return time.monotonic() - self.started
            if self.process.poll() is not None:
                break
            time.sleep(0.0005)
        time.sleep(0.2)
        said = b"".join(self.said).decode(errors="replace")[-800:].strip()
        raise BenchError(
            f"{self.name}: nothing served at {self.path}; it said: {said or '(nothing)'}"
        )

    def alive(self):
        """Raises when the server has ended."""
        if self.process.poll() is not None:
            said = b"".join(self.said).decode(errors="replace")[-800:].strip()
            raise BenchError(
                f"{self.name}: ended with status {self.process.returncode}; it said: {said}"
            )

    def __exit__(self, *_):
        if self.process is not None:
            pids = proc.tree(self.process.pid)
            for number in (signal.SIGTERM, signal.SIGKILL):
                for pid in reversed(pids):
                    try:
                        os.kill(pid, number)
                    except OSError:
                        pass
                try:
                    self.process.wait(STOP_S)
                    break
                except subprocess.TimeoutExpired:
                    pass
        for _ in range(20):
            if not proc.mounted(self.path):
                break
            subprocess.run(["umount", "-l", self.path], stderr=subprocess.DEVNULL)
            time.sleep(0.1)
        shutil.rmtree(self.dir, ignore_errors=True)


class Host:
    """The image itself in place of a server: the reference for what the machine can do."""

    def __init__(self, image):
        self.name, self.path, self.pid = "host file", image.path, None

    def __enter__(self):
        return self

    def alive(self):
        """The host does not end."""

    def __exit__(self, *_):
        pass
