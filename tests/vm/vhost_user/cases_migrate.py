"""Live migration between two QEMUs, each with a daemon of its own, of one image that both open."""

import os

import processes
from images import sound
from load import load
from daemon import Daemon
from machine import Machine
from processes import output, require, until
from results import Group, case, full

MIGRATE_S = 120


class Migrate(Group):
    """One guest, wherever it is: `machine` and `daemon` are those that it is with now."""

    name = "migrate"

    def setup(self):
        context = self.context
        self.image = os.path.join(context.directory, "moving.qcow2")
        output("qemu-img", "create", "-q", "-f", "qcow2", self.image, "512M")
        self.moves = 0
        self.daemon = self._daemon().start()
        self.machine = self._machine(self.daemon)
        self.machine.boots()
        self.dev = "/dev/" + self.machine.disk("moving")

    def after(self):
        self.machine.alive()
        self.daemon.alive()
        complaints = self.machine.complaints()
        require(not complaints, "the guest's kernel complained: " + "\n".join(complaints))

    def teardown(self):
        self.machine.kill()
        self.daemon.stop()
        sound(self.image)

    def _daemon(self):
        self.moves += 1
        return Daemon(
            self.context.directory,
            f"host{self.moves}",
            self.image,
            "--queues",
            "2",
            serial="moving",
        )

    def _machine(self, daemon, extra=()):
        return Machine(
            self.context.qemu,
            self.context.directory,
            f"host{self.moves}",
            boot=self.context.linux,
            cpus=2,
            memory_mib=256,
            disks=[(daemon, ",num-queues=2")],
            extra=[*self.context.tools, *extra],
            jobs=self.machine.jobs if self.moves > 1 else None,
        )

    def _destination(self):
        """Another daemon and a QEMU that wait for the guest."""
        daemon = self._daemon().start("--incoming")
        machine = self._machine(daemon, ["-incoming", "defer"]).start()
        machine.monitor.command("migrate-incoming", uri=f"unix:{machine.path('migration')}")
        return daemon, machine

    def _begin(self, machine, pause=False):
        """Starts the migration to `machine`."""
        monitor = self.machine.monitor
        monitor.command(
            "migrate-set-capabilities",
            capabilities=[{"capability": "pause-before-switchover", "state": pause}],
        )
        monitor.command("migrate-set-parameters", max_bandwidth=1 << 30, downtime_limit=2000)
        monitor.command("migrate", uri=f"unix:{machine.path('migration')}")

    def _status(self):
        return self.machine.monitor.command("query-migrate").get("status")

    def _wait_for(self, *wanted):
        """Until the migration has one of these states."""
        ends = ("completed", "failed", "cancelled")

        def reached():
            status = self._status()
            require(
                status in wanted or status not in ends,
                f"the migration {status}, not {wanted}\n" + processes.tail(self.machine.log),
            )
            return status if status in wanted else None

        return until(reached, MIGRATE_S, f"the migration is {wanted}")

    def _load(self):
        """fio that writes and verifies; not before its first writes returns this."""
        before = self.daemon.stats()["total"]["writes"]
        job = self.machine.begin(load(self.dev))
        until(lambda: self.daemon.stats()["total"]["writes"] > before + 30, 30, "the guest writes")
        return job

    def _goes_on(self, job):
        """The load makes progress here, and all that it has written verifies."""
        job.machine = self.machine
        before = self.daemon.stats()["total"]["writes"]

        def progress():
            self.machine.alive()
            return self.daemon.stats()["total"]["writes"] > before + 30 or job.done()

        until(progress, 60, "the guest goes on")
        require(
            self.daemon.stats()["total"]["errors"] == 0, f"{self.daemon.name} answered with errors"
        )
        self.machine.run("touch /tmp/stop")
        require(int(job.output(180)) > 0, "not one pass of writing and verifying")

    def _move(self):
        """Moves the guest to another host under load."""
        mark = f"moved{self.moves}"
        self.machine.run(
            f"printf '%-512s' {mark} | dd of={self.dev} bs=512 seek=900000 oflag=direct"
        )
        job = self._load()
        daemon, machine = self._destination()
        self._begin(machine)
        self._wait_for("completed")

        def runs():
            machine.alive()
            return machine.monitor.command("query-status")["status"] == "running"

        until(runs, 30, "the destination runs")
        old_machine, old_daemon = self.machine, self.daemon
        self.machine, self.daemon = machine, daemon
        old_machine.kill()
        old_daemon.stop()
        self._goes_on(job)
        found = self.machine.run(
            f"dd if={self.dev} bs=512 count=1 skip=900000 iflag=direct 2>/dev/null"
        ).strip()
        require(found == mark, f"the destination reads {found!r} where the source wrote {mark!r}")

    @case
    def under_load_to_another_daemon(self):
        self._move()

    @case
    def and_back(self):
        self._move()

    @case
    def cancelled_with_its_rings_stopped_it_goes_on_at_the_source(self):
        job = self._load()
        daemon, machine = self._destination()
        self._begin(machine, pause=True)
        self._wait_for("pre-switchover")
        self.machine.monitor.command("migrate_cancel")
        self._wait_for("cancelled")
        machine.kill()
        daemon.stop()
        self._goes_on(job)

    @case
    def a_destination_that_dies_leaves_the_source_running(self):
        job = self._load()
        daemon, machine = self._destination()
        self._begin(machine, pause=True)
        self._wait_for("pre-switchover")
        machine.kill()
        daemon.kill()
        self.machine.monitor.command("migrate-continue", state="pre-switchover")
        self._wait_for("failed")
        self._goes_on(job)

    @case
    def stopped_and_continued_the_guest_goes_on(self):
        job = self._load()
        for _ in range(3):
            self.machine.monitor.command("stop")
            self.machine.monitor.command("cont")
        self._goes_on(job)

    @case
    def paused_it_moves_and_goes_on_where_it_is_continued(self):
        """Nothing tells the daemon of the source about it: its rings stand before, and the log is
        never turned on.
        """
        mark = f"paused{self.moves}"
        self.machine.run(
            f"printf '%-512s' {mark} | dd of={self.dev} bs=512 seek=900001 oflag=direct"
        )
        job = self._load()
        self.machine.monitor.command("stop")
        daemon, machine = self._destination()
        self._begin(machine)
        self._wait_for("completed")
        until(
            lambda: machine.monitor.command("query-status")["status"] == "paused",
            30,
            "the destination is there",
        )
        # The QEMU of the source is there still and may have the disk, until it is wanted.
        machine.monitor.command("cont")
        until(
            lambda: machine.monitor.command("query-status")["status"] == "running",
            30,
            "the destination runs",
        )
        old_machine, old_daemon = self.machine, self.daemon
        self.machine, self.daemon = machine, daemon
        self._goes_on(job)
        old_machine.kill()
        old_daemon.stop()
        found = self.machine.run(
            f"dd if={self.dev} bs=512 count=1 skip=900001 iflag=direct 2>/dev/null"
        ).strip()
        require(found == mark, f"the destination reads {found!r} where the source wrote {mark!r}")

    @full
    def ten_times_there_and_back(self):
        for _ in range(10):
            self._move()
