"""qemu-storage-daemon by its control socket: commands, and the ends of block jobs."""

import json
import os
import socket
import time

from .servers import READY_S, BenchError, Server, peer_argv

JOB_S = 300


class Daemon(Server):
    """A storage daemon with the nodes of `blockdevs` (dicts) and a writable NBD export of `node`;
    the socket of its export is `nbd`.

    An NBD export, as one by FUSE holds a permission that its `stream` and active `commit` refuse;
    in the main loop, as with an iothread QEMU 11.1 fails an assertion when a job begins.
    """

    def __init__(self, blockdevs, node, workdir):
        self.blockdevs, self.node, self.stream = blockdevs, node, None
        super().__init__("QSD", self._command, workdir)

    def _command(self, _):
        words = []
        for blockdev in self.blockdevs:
            words += ["--blockdev", json.dumps(blockdev)]
        export = f"type=nbd,id=e,node-name={self.node},name=d,writable=on"
        return peer_argv(
            "qemu-storage-daemon",
            *words,
            *["--chardev", f"socket,id=q,server=on,wait=off,path={self._place('qmp')}"],
            *["--monitor", "chardev=q"],
            *["--nbd-server", f"addr.type=unix,addr.path={self._place('nbd')}"],
            *["--export", export],
        )

    def _place(self, name):
        return os.path.join(self.dir, name)

    def _wait_for_data(self):
        while time.monotonic() - self.started < READY_S and self.process.poll() is None:
            try:
                s = socket.socket(socket.AF_UNIX)
                s.connect(self._place("qmp"))
                s.settimeout(JOB_S)
                self.stream = s.makefile("rw")
                self.stream.readline()
                self.call("qmp_capabilities")
                return time.monotonic() - self.started
            except OSError:
                time.sleep(0.01)
        said = b"".join(self.said).decode(errors="replace")[-800:].strip()
        raise BenchError(f"QSD: its control socket does not answer; it said: {said}")

    def __exit__(self, *words):
        if self.stream:
            self.stream.close()
        super().__exit__(*words)

    def call(self, command, **arguments):
        """The result of a command; `BenchError` for an error."""
        self.stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.stream.flush()
        while True:
            answer = self._next()
            if "error" in answer:
                raise BenchError(f"QSD: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def _next(self):
        try:
            line = self.stream.readline()
        except OSError:
            line = ""
        if not line:
            time.sleep(0.2)
            said = b"".join(self.said).decode(errors="replace")[-400:].strip()
            status = self.process.poll()
            raise BenchError(f"QSD: its control socket is closed ({status}); it said: {said}")
        return json.loads(line)

    def job(self, command, **arguments):
        """Begins a job and waits for its end; one that gets ready is completed."""
        events = []
        self.stream.write(
            json.dumps({"execute": command, "arguments": {"job-id": "j", **arguments}}) + "\n"
        )
        self.stream.flush()
        while True:
            answer = self._next()
            if "error" in answer:
                raise BenchError(f"QSD: {command}: {answer['error']['desc']}")
            event, data = answer.get("event"), answer.get("data", {})
            events.append(event)
            if event == "BLOCK_JOB_READY":
                self.stream.write(
                    json.dumps({"execute": "block-job-complete", "arguments": {"device": "j"}})
                    + "\n"
                )
                self.stream.flush()
            elif event == "BLOCK_JOB_COMPLETED":
                if data.get("error"):
                    raise BenchError(f"QSD: {command}: {data['error']}")
                return
            elif event in ("BLOCK_JOB_ERROR", "BLOCK_JOB_CANCELLED"):
                raise BenchError(f"QSD: {command}: {event}")
