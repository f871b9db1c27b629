"""`ringdisk serve` of one image: started, killed and started again, and asked for its counters."""

import json
import os
import signal

import processes
from processes import Failure, require

# Set by __main__.
PROGRAM = "ringdisk"
START_S = 30


class Daemon:
    """Serves `image` at `socket`. Several processes, one after another: `start`, then `kill` or
    `stop`, then `start` again.
    """

    def __init__(self, directory, name, image, *options, serial=None):
        self.name = name
        self.image = image
        self.socket = os.path.join(directory, name + ".sock")
        self.log = os.path.join(directory, name + ".log")
        self.options = ["--serial", serial or name, *options]
        # Words before the program: where it runs.
        self.prefix = []
        self.process = None
        self.started = 0

    def start(self, *more):
        """Returns when the socket answers."""
        words = ["serve", self.image, "--vhost-user-blk", self.socket, *self.options, *more]
        argv = [*self.prefix, PROGRAM, *words]
        self.started += 1
        ready = f"{self.log}.{self.started}"
        with open(ready, "wb") as out:
            self.process = processes.start(argv, self.log, stdout=out)

        def answers():
            if self.process.poll() is not None:
                raise Failure(
                    f"{' '.join(argv)}: ended with status"
                    f" {self.process.returncode}\n{processes.tail(self.log)}"
                )
            return os.path.getsize(ready) > 0

        processes.until(answers, START_S, f"{self.name}: the daemon answers")
        if os.geteuid() == 0:
            # What a guest does here it does to a process that can do little.
            with open(f"/proc/{self.serving()}/status", encoding="ascii") as status:
                require(
                    "Seccomp:\t2\n" in status.read(), f"{self.name}: the daemon is in no sandbox"
                )
            require(
                "seccomp" in (self.stats()["sandbox"] or ""), f"{self.name}: nothing is in force"
            )
        return self

    def serving(self):
        """Pid of the process that serves."""
        return self.process.pid

    def alive(self):
        """Fails the test when the process ended by itself."""
        code = self.process.poll() if self.process else None
        require(
            code is None,
            f"{self.name}: the daemon ended with status {code}\n{processes.tail(self.log)}",
        )

    def kill(self):
        """SIGKILL."""
        self.alive()
        processes.kill(self.process)
        self.process = None

    def stop(self):
        """Ends it as Ctrl-C does; fails the test when that is no success."""
        self.alive()
        code = processes.kill(self.process, signal.SIGINT)
        self.process = None
        require(code == 0, f"{self.name}: stopped with status {code}\n{processes.tail(self.log)}")
        require(not os.path.exists(self.socket), f"{self.name}: its socket is left behind")

    def ctl(self, *words):
        """`ringdisk ctl` with this disk."""
        return processes.output(PROGRAM, "ctl", self.socket, *words)

    def job(self, what, name):
        """`ringdisk job` with a job of this disk."""
        return processes.output(PROGRAM, "job", what, self.socket, name)

    def stats(self):
        """The counters, as a dictionary."""
        return json.loads(self.ctl("stats", "--json"))

    def others(self):
        """Requests so far that were neither reads nor writes: flushes, discards, …"""
        total = self.stats()["total"]
        return total["requests"] - total["reads"] - total["writes"]


class Kept(Daemon):
    """Serves with `--keep`: `process` holds the disk, and another one serves it."""

    # New processes within so many seconds of serving; after that the disk is given up.
    PAUSE_S = 10 / 5 + 0.1

    def __init__(self, directory, name, image, *options):
        super().__init__(directory, name, image, "--keep", *options)

    def serving(self):
        """Pid of the process that serves."""

        def child():
            with open(
                f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="ascii"
            ) as children:
                for pid in children.read().split():
                    with (
                        open(f"/proc/{pid}/cmdline", "rb") as words,
                        open(f"/proc/{pid}/stat", encoding="ascii") as stat,
                    ):
                        if (
                            not words.read().startswith(b"ringdisk-helper")
                            and stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
                        ):
                            return int(pid)
            return None

        return processes.until(child, START_S, f"{self.name}: a process serves")

    def kill_serving(self):
        """Kills the process that serves; returns when the next one answers commands."""
        self.alive()
        os.kill(self.serving(), signal.SIGKILL)

        def answers():
            try:
                return self.stats()
            except Failure:
                self.alive()
                return None

        processes.until(answers, START_S, f"{self.name}: the next process answers")
