"""QEMU with disks of ours: its command line, its monitor (QMP), and the agent in the guest that
runs shell scripts.
"""

import base64
import json
import os
import queue
import re
import socket
import subprocess
import threading
import time

import processes
from processes import Failure, require

# More than any boot takes, also on a busy machine (about 10 s are usual).
BOOT_S = 150
COMMAND_S = 120
# What of the kernel's log means that something went wrong. A soft lockup or a stall of RCU needs
# minutes here (see KERNEL_WORDS).
COMPLAINTS = re.compile(
    r"WARNING:|BUG:|Oops|Kernel panic|INFO: task .* blocked for more than|INFO: rcu|general"
    r" protection fault"
    r"|unable to handle|refcount_t:|possible recursive locking|EXT4-fs error|I/O error|critical .*"
    r" error"
)
# tsc=reliable, no_timer_check: as in tests/vm/lib/machine.sh.
KERNEL_WORDS = (
    "console=ttyS0 loglevel=5 panic=-1 tsc=reliable no_timer_check mitigations=off"
    " random.trust_cpu=on hung_task_timeout_secs=100"
    " watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120 rdinit=/init"
)


class Died(Failure):
    """The machine ended, or did not come up."""


class Job:
    """A script that runs in the guest."""

    def __init__(self, machine, text):
        self.machine, self.text = machine, text
        self.answer = queue.Queue()

    def done(self):
        """Whether it has ended."""
        return not self.answer.empty()

    def wait(self, limit_s=COMMAND_S):
        """Its exit status and what it printed."""
        end = time.monotonic() + limit_s
        while True:
            try:
                return self.answer.get(timeout=0.5)
            except queue.Empty:
                self.machine.alive()
                require(
                    time.monotonic() < end, f"the guest did not end within {limit_s} s: {self.text}"
                )

    def output(self, limit_s=COMMAND_S):
        """What it printed; fails the test when its exit status is not 0."""
        status, text = self.wait(limit_s)
        require(status == 0, f"in the guest: status {status} of: {self.text}\n{text}")
        return text


class Agent(threading.Thread):
    """Reads what the agent says. `jobs` is shared by the agents of the two ends of a migration: it
    is one guest.
    """

    def __init__(self, path, jobs):
        super().__init__(daemon=True)
        self.jobs = jobs
        self.ready = queue.Queue()
        self.socket = connected(path)
        self.start()

    def run(self):
        try:
            for line in self.socket.makefile("rb"):
                words = line.split()
                if words == [b"ready"]:
                    self.ready.put(True)
                elif len(words) >= 2 and words[0].isdigit() and int(words[0]) in self.jobs:
                    text = (
                        base64.b64decode(words[2]).decode(errors="replace")
                        if len(words) > 2
                        else ""
                    )
                    self.jobs.pop(int(words[0])).answer.put((int(words[1]), text))
        except OSError:
            pass


def connected(path):
    """A stream to a socket that QEMU is about to make."""
    stream = socket.socket(socket.AF_UNIX)
    end = time.monotonic() + 20
    while True:
        try:
            stream.connect(path)
            return stream
        except OSError as e:
            if time.monotonic() > end:
                stream.close()
                raise Died(f"QEMU does not listen at {path}: {e}") from None
            time.sleep(0.05)


class Monitor:
    """QMP."""

    def __init__(self, path):
        self.socket = connected(path)
        self.socket.settimeout(60)
        self.lines = self.socket.makefile("rb")
        self.events = []
        self._read()
        self.command("qmp_capabilities")

    def _read(self):
        try:
            line = self.lines.readline()
        except TimeoutError:
            raise Failure("QEMU's monitor does not answer") from None
        except OSError as e:
            raise Died(f"QEMU's monitor: {e}") from None
        if not line:
            raise Died("QEMU closed its monitor")
        message = json.loads(line)
        if "event" in message:
            self.events.append(message)
        return message

    def command(self, name, **arguments):
        """What QEMU returns; an error of QEMU fails the test."""
        words = {"execute": name}
        if arguments:
            words["arguments"] = {key.replace("_", "-"): value for key, value in arguments.items()}
        try:
            self.socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as e:
            raise Died(f"QEMU's monitor: {e}") from None
        while True:
            message = self._read()
            require("error" not in message, f"QEMU: {name} {arguments}: {message.get('error')}")
            if "return" in message:
                return message["return"]

    def happened(self, name, **data):
        """Whether an event came since the last call that found it."""
        self.command("query-status")
        for event in self.events:
            if event["event"] == name and all(
                event["data"].get(key) == value for key, value in data.items()
            ):
                self.events.remove(event)
                return True
        return False


class Qemu:
    """Which QEMU, and how it spells its options."""

    def __init__(self, argv, firmware):
        self.argv = argv
        self.firmware = firmware
        text = subprocess.run(
            [*argv, "--version"], capture_output=True, text=True, check=True
        ).stdout
        self.version = tuple(
            int(each) for each in re.search(r"version (\d+)\.(\d+)", text).groups()
        )
        self.name = text.splitlines()[0]

    def chardev(self, name, path):
        """Words of a chardev that connects to a daemon, again and again."""
        return f"socket,id={name},path={path}," + (
            "reconnect-ms=100" if self.version >= (9, 2) else "reconnect=1"
        )


class Machine:
    """One QEMU. `disks` are (daemon, options of the device); `boot` is "disk", or the words for
    QEMU that load a kernel. `threads`: "single" emulates all CPUs in one thread, which is slower
    and never lets a boot die.
    """

    def __init__(
        self,
        qemu,
        directory,
        name,
        *,
        boot,
        disks,
        cpus=2,
        memory_mib=384,
        extra=(),
        jobs=None,
        threads="multi",
    ):
        self.qemu, self.name, self.directory = qemu, name, directory
        self.console = os.path.join(directory, name + ".console")
        self.log = os.path.join(directory, name + ".qemu")
        self.boot, self.disks, self.cpus, self.memory_mib, self.extra = (
            boot,
            disks,
            cpus,
            memory_mib,
            list(extra),
        )
        self.jobs = {} if jobs is None else jobs
        self.threads = threads
        self.process = self.monitor = self.agent = None
        self.complained = 0

    def path(self, what):
        """A file of this machine."""
        return os.path.join(self.directory, f"{self.name}.{what}")

    def words(self):
        """The command line."""
        words = [*self.qemu.argv]
        for each in self.qemu.firmware:
            words += ["-L", each]
        words += [
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35,sata=off,smbus=off,memory-backend=m",
        ]
        words += ["-cpu", os.environ.get("RINGDISK_VM_CPU", "max,arch-capabilities=off")]
        words += [
            "-accel",
            os.environ.get("RINGDISK_VM_ACCEL", f"tcg,thread={self.threads},tb-size=256"),
        ]
        words += ["-smp", str(self.cpus), "-m", f"{self.memory_mib}M"]
        words += ["-object", f"memory-backend-memfd,id=m,size={self.memory_mib}M,share=on"]
        words += [
            "-chardev",
            f"file,id=console,path={self.console},append=on",
            "-serial",
            "chardev:console",
        ]
        words += ["-qmp", f"unix:{self.path('qmp')},server=on,wait=off"]
        words += [
            "-device",
            "virtio-serial-pci",
            "-chardev",
            f"socket,id=agent,path={self.path('agent')},server=on,wait=off",
        ]
        words += ["-device", "virtserialport,chardev=agent,name=agent"]
        for each in range(2):
            words += ["-device", f"pcie-root-port,id=plug{each},chassis={each + 1},slot={each + 1}"]
        for number, (daemon, options) in enumerate(self.disks):
            words += ["-chardev", self.qemu.chardev(f"char{number}", daemon.socket)]
            words += [
                "-device",
                f"vhost-user-blk-pci,id=disk{number},chardev=char{number}{options}",
            ]
        if self.boot != "disk":
            words += self.boot
        return words + self.extra

    def start(self):
        """Starts QEMU; returns when its monitor answers."""
        for what in ("qmp", "agent"):
            if os.path.exists(self.path(what)):
                os.unlink(self.path(what))
        with open(self.console, "w", encoding="utf-8"):
            pass
        self.complained = 0
        self.process = processes.start(self.words(), self.log)
        try:
            self.monitor = Monitor(self.path("qmp"))
        except Failure:
            self.alive()
            raise
        self.agent = Agent(self.path("agent"), self.jobs)
        return self

    def boots(self):
        """Starts and waits for the agent; a boot that dies is tried twice more (emulation of
        several CPUs is not perfect).
        """
        for attempt in (1, 2, 3):
            try:
                self.start().comes_up()
                complaints = self.complaints()
                if complaints:
                    raise Died("its kernel complained: " + "\n".join(complaints))
                return self
            except Died as e:
                text = processes.tail(self.console)
                self.kill()
                if attempt == 3:
                    raise
                print(f"vm: {self.name}: {e}; tried once more. Its console:\n{text}", flush=True)
        return self

    def comes_up(self):
        """Waits until the agent is there, as after a reboot."""
        end = time.monotonic() + BOOT_S
        while True:
            try:
                self.agent.ready.get(timeout=0.5)
                return self
            except queue.Empty:
                self.alive()
                if time.monotonic() > end:
                    raise Died(
                        f"{self.name}: not booted within {BOOT_S} s\n{processes.tail(self.console)}"
                    ) from None

    def alive(self):
        """Fails the test when QEMU ended, or when a complaint of the guest's kernel is new."""
        if self.process is None or self.process.poll() is not None:
            code = self.process.returncode if self.process else None
            raise Died(
                f"{self.name}: QEMU ended (status"
                f" {code})\n{processes.tail(self.log)}\n{processes.tail(self.console)}"
            )

    def complaints(self):
        """What the guest's kernel complained about since the last call."""
        with open(self.console, "rb") as f:
            lines = f.read().decode(errors="replace").splitlines()
        found = [line for line in lines if COMPLAINTS.search(line)]
        new, self.complained = found[self.complained :], len(found)
        return new

    def begin(self, script):
        """Starts a script in the guest."""
        job = Job(self, script)
        number = 1 + max([0, *self.jobs], default=0) + int(time.monotonic() * 1000)
        self.jobs[number] = job
        self.agent.socket.sendall(b"%d %s\n" % (number, base64.b64encode(script.encode())))
        return job

    def run(self, script, limit_s=COMMAND_S):
        """Runs a script in the guest and returns what it printed; a status other than 0 fails the
        test.
        """
        return self.begin(script).output(limit_s).strip()

    def disk(self, serial, limit_s=20):
        """Name in the guest of the disk with this serial number, such as vdb."""
        script = (
            f'for i in /sys/block/vd*; do [ "$(cat $i/serial)" = {serial} ]'
            " && echo ${i##*/}; done; true"
        )
        return processes.until(lambda: self.run(script), limit_s, f"the guest sees a disk {serial}")

    def plug(self, number, daemon, options="", reconnects=True):
        """Adds a disk to the running machine, in the root port `number`. `reconnects`: QEMU
        connects again when the daemon has gone.
        """
        words = {
            "id": f"pchar{number}",
            "backend": {
                "type": "socket",
                "data": {
                    "addr": {"type": "unix", "data": {"path": daemon.socket}},
                    "server": False,
                    **(
                        {}
                        if not reconnects
                        else {"reconnect-ms": 100}
                        if self.qemu.version >= (9, 2)
                        else {"reconnect": 1}
                    ),
                },
            },
        }
        self.monitor.command("chardev-add", **words)
        device = {
            "driver": "vhost-user-blk-pci",
            "id": f"pdisk{number}",
            "chardev": f"pchar{number}",
            "bus": f"plug{number}",
        }
        for each in filter(None, options.split(",")):
            key, value = each.split("=")
            device[key] = int(value) if value.isdigit() else {"on": True, "off": False}[value]
        self.monitor.command("device_add", **device)

    def unplug(self, number):
        """Removes a disk; returns when the guest has let go of it."""
        self.monitor.command("device_del", id=f"pdisk{number}")
        processes.until(
            lambda: self.monitor.happened("DEVICE_DELETED", device=f"pdisk{number}"),
            40,
            f"disk {number} is unplugged",
        )
        self.monitor.command("chardev-remove", id=f"pchar{number}")

    def kill(self):
        """SIGKILL for QEMU; harmless when it has gone."""
        if self.process:
            processes.kill(self.process)
        for each in (self.monitor, self.agent):
            if each:
                each.socket.close()
        self.process = self.monitor = self.agent = None
