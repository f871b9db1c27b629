"""A PC's firmware loads Linux from a qcow2 of ours, which then lives on the same disk."""

import os

import bootdisk
from daemon import Daemon
from images import sound
from load import kills
from machine import KERNEL_WORDS, Machine
from processes import output, require
from results import Group, case


class Boot(Group):
    """One machine without any other disk: SeaBIOS (one queue, few features), then Linux (two
    queues, all features).
    """

    name = "boot"

    def setup(self):
        context = self.context
        words = f"{KERNEL_WORDS} ringdisk.root=boot ringdisk.mode=rw"
        raw = bootdisk.disk(
            context.directory, context.kernel, context.initramfs, context.root, words
        )
        self.image = os.path.join(context.directory, "boot.qcow2")
        # By QEMU's tool, so that the image is not one of our own making.
        output("qemu-img", "convert", "-q", "-O", "qcow2", raw, self.image)
        os.unlink(raw)
        self.daemon = Daemon(context.directory, "boot", self.image, "--queues", "2").start()
        self.machine = Machine(
            context.qemu,
            context.directory,
            "boot",
            boot="disk",
            cpus=2,
            threads="single",
            disks=[(self.daemon, ",num-queues=2,bootindex=0")],
        )
        self.machine.boots()

    def after(self):
        self.daemon.alive()
        self.machine.alive()
        complaints = self.machine.complaints()
        require(not complaints, "the guest's kernel complained: " + "\n".join(complaints))

    def teardown(self):
        self.machine.kill()
        self.daemon.stop()
        sound(self.image)
        os.unlink(self.image)

    def _console(self):
        with open(self.machine.console, "rb") as f:
            return f.read()

    @case
    def firmware_and_linux_boot_from_a_qcow2(self):
        require(b"ringdisk boots" in self._console(), "the boot sector of the disk did not run")
        words = self.machine.run("cat /proc/cmdline")
        require("ringdisk.root=boot" in words, f"not the kernel of the disk: {words}")
        root = self.machine.run("awk '$2 == \"/\" {print $1}' /proc/mounts")
        require(root.endswith("/dev/vda1"), f"the root file system is {root}")
        require(self.machine.disk("boot") == "vda", "the disk has another name")
        require(
            self.machine.run("ls -d /sys/block/vda/mq/* | wc -l") == "2",
            "Linux does not use two queues",
        )

    @case
    def what_was_synced_is_there_after_a_reboot(self):
        reads = self.daemon.stats()["total"]["reads"]
        self.machine.run("echo before >/etc/mark && sync && md5sum /usr/sbin/fio >/etc/sum && sync")
        boots = self._console().count(b"ringdisk boots")
        self.machine.begin("sleep 0.5; reboot -f")
        self.machine.comes_up()
        require(
            self._console().count(b"ringdisk boots") == boots + 1,
            "the firmware did not boot the disk again",
        )
        require(
            self.machine.run("cat /etc/mark") == "before",
            "what was synced before the reboot is not there",
        )
        self.machine.run("md5sum -c /etc/sum")
        require(self.daemon.stats()["total"]["reads"] > reads, "nothing was read")

    @case
    def it_lives_through_kills_of_the_daemon_under_fio_verify(self):
        """The daemon holds the only disk: programs, libraries and the file that fio verifies come
        from it.
        """
        self.machine.run("md5sum /usr/sbin/fio /usr/sbin/mkfs.ext4 >/etc/sum && sync")
        kills(self.machine, self.daemon, "/root-load", 5)
        self.machine.run(
            "rm -f /root-load; sync; echo 3 >/proc/sys/vm/drop_caches; md5sum -c /etc/sum"
        )

    @case
    def a_reset_in_the_middle_of_writes_is_survived(self):
        self.machine.run("echo kept >/etc/kept && sync")
        self.machine.begin(
            "while :; do dd if=/dev/urandom of=/etc/load bs=64k count=200 conv=fsync; done"
        )
        self.machine.run("sleep 1.5")
        self.machine.monitor.command("system_reset")
        self.machine.comes_up()
        require(
            self.machine.run("cat /etc/kept") == "kept",
            "what was synced before the reset is not there",
        )
        self.machine.run("rm -f /etc/load; sync")
