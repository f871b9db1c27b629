"""A running guest with four virtqueues: what its disk does, what happens to it, and that it lives
through the death of the daemon.
"""

import hashlib
import os

from daemon import Daemon, Kept
from images import sound
from load import VERIFY, checkpoints, kills, kills_of_the_serving_one
from machine import Machine
from processes import Failure, output, require, until
from results import Group, case, full

MIB = 1 << 20


def allocated(image):
    """Bytes that an image takes on the host."""
    return os.stat(image).st_blocks * 512


def digest(path):
    """Hash of a file."""
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


class Disk(Group):
    """The disk `main` (split virtqueues, qcow2) is there from the start; others are plugged in."""

    name = "disk"

    def setup(self):
        context = self.context
        self.image = os.path.join(context.directory, "main.qcow2")
        output("qemu-img", "create", "-q", "-f", "qcow2", self.image, "1G")
        self.main = Daemon(context.directory, "main", self.image, "--queues", "4").start()
        self.plugs = {}
        self.machine = Machine(
            context.qemu,
            context.directory,
            "disk",
            boot=context.linux,
            cpus=4,
            memory_mib=512,
            disks=[(self.main, ",num-queues=4")],
            extra=context.tools,
        )
        self.machine.boots()
        self.guest = self.machine.run
        self.name_there = self.machine.disk("main")
        self.dev = "/dev/" + self.name_there
        self.sys = "/sys/block/" + self.name_there
        self.flush = (
            f"dd if=/dev/zero of={self.dev} bs=4k count=1 seek=262000 oflag=direct conv=fsync"
        )

    def after(self):
        if self.machine.process is None:  # the last case ended it
            return
        self.machine.alive()
        self.main.alive()
        complaints = self.machine.complaints()
        require(not complaints, "the guest's kernel complained: " + "\n".join(complaints))

    def teardown(self):
        self.machine.kill()
        if self.main.process:
            self.main.stop()
        sound(self.image)

    def other(self, name, image, *options):
        """A daemon for another disk."""
        return Daemon(self.context.directory, name, image, *options).start()

    def make(self, name, *words):
        """A new image."""
        path = os.path.join(self.context.directory, name)
        output("qemu-img", "create", "-q", "-f", "qcow2", *words[:-1], path, *words[-1:])
        return path

    def plugged(self, daemon, options="", number=0, reconnects=True):
        """Plugs a disk in; its device in the guest."""
        self.plugs[number] = daemon
        self.machine.plug(number, daemon, options, reconnects)
        return self.machine.disk(daemon.name)

    def zero(self, start_mib, count_mib):
        """Fails when there are bytes other than zero."""
        count = self.guest(
            f"dd if={self.dev} bs=1M skip={start_mib} count={count_mib} iflag=direct 2>/dev/null |"
            " tr -d '\\000' | wc -c"
        )
        require(count == "0", f"{count} bytes are not zero")

    def unplug(self, number=0):
        """Takes it out again."""
        self.machine.unplug(number)
        del self.plugs[number]

    def recover(self):
        for number, daemon in list(self.plugs.items()):
            try:
                self.guest("touch /tmp/stop; sleep 1; umount /mnt/* 2>/dev/null; true")
                self.unplug(number)
            except Failure as e:
                print(f"vm: {daemon.name}: {e}")
                self.machine.monitor.command("chardev-remove", id=f"pchar{number}")
                self.plugs.pop(number, None)
            finally:
                if daemon.process:
                    daemon.kill()

    @case
    def linux_sees_what_was_offered(self):
        def there(attribute):
            return self.guest(f"cat {self.sys}/{attribute}")

        seen = {
            each: there(each)
            for each in (
                "size",
                "serial",
                "queue/logical_block_size",
                "queue/write_cache",
                "cache_type",
                "ro",
            )
        }
        require(
            seen
            == {
                "size": str(1024 * MIB // 512),
                "serial": "main",
                "queue/logical_block_size": "512",
                "queue/write_cache": "write back",
                "cache_type": "write back",
                "ro": "0",
            },
            f"the guest sees {seen}",
        )
        require(self.guest(f"ls -d {self.sys}/mq/* | wc -l") == "4", "not four queues")
        require(int(there("queue/discard_max_bytes")) > 0, "no discard")
        require(int(there("queue/write_zeroes_max_bytes")) > 0, "no write zeroes")
        # As the driver negotiated them: SEG_MAX, FLUSH, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES,
        # INDIRECT, EVENT_IDX, VERSION_1.
        bits = there("device/features")
        missing = [bit for bit in (2, 9, 11, 12, 13, 14, 28, 29, 32) if bits[bit] != "1"]
        require(not missing, f"virtio features {missing} were not negotiated: {bits}")
        require(bits[34] == "0", "the ring is packed, though it was not asked for")

    @case
    def ext4_and_fio_verify(self):
        self.guest(f"mkfs.ext4 -q -F {self.dev} 400M && mkdir -p /mnt/a && mount {self.dev} /mnt/a")
        self.guest(
            f"cd /mnt/a && {VERIFY} --size=24M --bsrange=4k-128k --iodepth=16 --numjobs=2"
            " --fsync=32",
            120,
        )
        self.guest(f"umount /mnt/a && e2fsck -fn {self.dev}")

    @case
    def each_processor_has_its_queue(self):
        """And each queue its thread, as far as there are CPUs for them."""

        def served():
            return [each["requests"] for each in self.main.stats()["queues"]]

        require(
            self.guest(f"cat {self.sys}/mq/*/cpu_list | sort -n | xargs") == "0 1 2 3",
            "a queue of several CPUs",
        )
        threads = set()
        for cpu in range(4):
            before = served()
            self.guest(
                f"fio --name=q --filename={self.dev} --cpus_allowed={cpu} --ioengine=libaio"
                " --direct=1 --rw=randread --bs=4k"
                " --iodepth=8 --number_ios=200 --minimal"
            )
            grown = [after - b for after, b in zip(served(), before)]
            busy = [thread for thread, requests in enumerate(grown) if requests > 0]
            require(
                len(busy) == 1 and sum(grown) >= 200, f"CPU {cpu}: requests of the threads: {grown}"
            )
            threads |= set(busy)
        require(
            len(threads) == min(4, len(served())) > 1,
            f"all requests were served by the threads {threads}",
        )

    @case
    def a_flush_reaches_the_host_when_the_cache_is_on(self):
        before = self.main.others()
        self.guest(f"dd if=/dev/urandom of={self.dev} bs=64k count=16 seek=1000 oflag=direct")
        require(self.main.others() == before, "writes alone made flushes")
        self.guest(
            f"dd if=/dev/urandom of={self.dev} bs=64k count=1 seek=1000 oflag=direct conv=fsync"
        )
        require(self.main.others() > before, "fsync made no flush")

    @case
    def without_a_write_cache_the_guest_flushes_nothing(self):
        self.guest(f"echo 'write through' >{self.sys}/cache_type")
        require(
            self.guest(f"cat {self.sys}/queue/write_cache") == "write through",
            "the write cache is still on",
        )
        before = self.main.others()
        self.guest(
            f"dd if=/dev/urandom of={self.dev} bs=64k count=16 seek=1000 oflag=direct conv=fsync"
        )
        require(self.main.others() == before, "there were flushes")
        self.guest(f"echo 'write back' >{self.sys}/cache_type")
        require(
            self.guest(f"cat {self.sys}/queue/write_cache") == "write back",
            "the write cache is still off",
        )

    @case
    def discarded_space_is_given_back(self):
        self.guest(
            f"dd if=/dev/urandom of={self.dev} bs=1M count=64 seek=600 oflag=direct conv=fsync"
        )
        before = allocated(self.image)
        self.guest(f"/usr/sbin/blkdiscard -o {600 * MIB} -l {64 * MIB} {self.dev} && {self.flush}")
        freed = before - allocated(self.image)
        require(freed >= 60 * MIB, f"blkdiscard gave back {freed} bytes")
        self.zero(600, 64)

    @case
    def fstrim_gives_space_back(self):
        self.guest(f"mkfs.ext4 -q -F {self.dev} 300M && mkdir -p /mnt/t && mount {self.dev} /mnt/t")
        self.guest(
            "dd if=/dev/urandom of=/mnt/t/big bs=1M count=80 conv=fsync && rm /mnt/t/big && sync"
        )
        before = allocated(self.image)
        self.guest("fstrim -v /mnt/t && umount /mnt/t")
        freed = before - allocated(self.image)
        require(freed >= 70 * MIB, f"fstrim gave back {freed} bytes")

    @case
    def written_zeroes_are_zeroes(self):
        self.guest(f"dd if=/dev/urandom of={self.dev} bs=1M count=8 seek=700 oflag=direct")
        before = self.main.stats()["total"]["writes"]
        # Linux makes write-zeroes requests of this, since the device offers them.
        self.guest(f"/usr/sbin/blkdiscard -z -o {700 * MIB} -l {8 * MIB} {self.dev}")
        require(
            self.main.stats()["total"]["writes"] - before < 8, "the zeroes were written as bytes"
        )
        self.zero(700, 8)

    @case
    def a_running_guest_sees_another_size(self):
        for size in (1100, 1200):
            self.main.ctl("resize", f"{size}M")
            until(
                lambda sectors=str(size * MIB // 512): (
                    self.guest(f"cat {self.sys}/size") == sectors
                ),
                20,
                f"the guest sees {size} MiB",
            )
        self.guest(
            f"dd if=/dev/urandom of=/tmp/end bs=1M count=1 && dd if=/tmp/end of={self.dev} bs=1M"
            " seek=1199 oflag=direct conv=fsync"
            f" && dd if={self.dev} bs=1M skip=1199 iflag=direct | cmp - /tmp/end"
        )

    @case
    def checkpoints_begin_and_end_under_fio_verify(self):
        checkpoints(self.machine, self.main, self.dev, 5)

    @case
    def kills_of_the_daemon_under_fio_verify_lose_nothing(self):
        kills(self.machine, self.main, self.dev, 5)

    @full
    def many_kills_of_the_daemon_under_fio_verify_lose_nothing(self):
        kills(self.machine, self.main, self.dev, 25)

    @case
    def a_packed_ring_comes_goes_and_lives_through_kills(self):
        daemon = self.other("packed", self.make("packed.qcow2", "300M"), "--queues", "4")
        dev = self.plugged(daemon, ",num-queues=4,packed=on")
        bits = self.guest(f"cat /sys/block/{dev}/device/features")
        require(bits[34] == "1", f"the ring is not packed: {bits}")
        self.guest(
            f"mkfs.ext4 -q -F /dev/{dev} && mkdir -p /mnt/p && mount /dev/{dev} /mnt/p"
            f" && cd /mnt/p && {VERIFY} --size=16M --bsrange=4k-128k --iodepth=16 --numjobs=2"
            " --fsync=32",
            120,
        )
        self.guest(f"umount /mnt/p && e2fsck -fn /dev/{dev}")
        kills(self.machine, daemon, "/dev/" + dev, 2)
        self.unplug()
        until(
            lambda: self.guest(f"ls /dev/{dev} 2>/dev/null || true") == "",
            20,
            "the guest's device has gone",
        )
        # The same daemon has a second front end after the first.
        again = self.plugged(daemon, ",num-queues=1,packed=on")
        self.guest(f"dd if=/dev/{again} of=/dev/null bs=1M count=4 iflag=direct")
        self.unplug()
        daemon.stop()

    def kept(self, name, options, count):
        """A disk whose serving process is killed `count` times under fio, with a QEMU that never
        connects again.
        """
        image = self.make(name + ".qcow2", "300M")
        daemon = Kept(self.context.directory, name, image, "--queues", "2").start()
        dev = self.plugged(daemon, ",num-queues=2" + options, reconnects=False)
        kills_of_the_serving_one(self.machine, daemon, "/dev/" + dev, count)
        self.unplug()
        daemon.stop()
        sound(image)

    @case
    def a_kept_disk_goes_on_over_kills_without_a_reconnect(self):
        self.kept("kept", "", 5)

    @case
    def a_kept_disk_with_packed_rings_goes_on_over_kills_without_a_reconnect(self):
        self.kept("keptpacked", ",packed=on", 3)

    @full
    def a_kept_disk_goes_on_over_many_kills_without_a_reconnect(self):
        self.kept("keptlong", "", 20)

    @case
    def unplugged_under_load_it_ends_without_harm(self):
        image = self.make("pulled.qcow2", "100M")
        daemon = self.other("pulled", image)
        dev = self.plugged(daemon, ",num-queues=2")
        job = self.machine.begin(
            f"fio --name=l --filename=/dev/{dev} --ioengine=libaio --direct=1 --rw=randwrite"
            " --bs=4k --iodepth=16"
            " --time_based --runtime=60 --minimal"
        )
        until(lambda: daemon.stats()["total"]["writes"] > 100, 30, "the guest writes")
        self.unplug()
        job.wait(90)
        # fio's errors are the guest's matter, and its kernel says so.
        self.machine.complaints()
        daemon.stop()
        output("qemu-img", "check", "-q", image)

    @case
    def a_disk_of_4096_byte_blocks(self):
        daemon = self.other(
            "large", self.make("large.qcow2", "300M"), "--logical-block-size", "4096"
        )
        dev = self.plugged(daemon, ",num-queues=2")
        sizes = self.guest(
            f"cat /sys/block/{dev}/queue/logical_block_size"
            f" /sys/block/{dev}/queue/physical_block_size"
        ).split()
        require(sizes == ["4096", "4096"], f"block sizes in the guest: {sizes}")
        status, text = self.machine.begin(
            f"fio --name=s --filename=/dev/{dev} --ioengine=psync --direct=1 --rw=read --bs=512"
            " --number_ios=1"
        ).wait()
        require(status != 0 and "nvalid argument" in text, f"a direct read of 512 bytes: {text}")
        self.guest(
            f"mkfs.ext4 -q -F /dev/{dev} && mkdir -p /mnt/l && mount /dev/{dev} /mnt/l && cd /mnt/l"
            f" && {VERIFY} --size=16M --bs=4k --iodepth=16",
            120,
        )
        self.guest(f"umount /mnt/l && e2fsck -fn /dev/{dev}")
        self.unplug()
        daemon.stop()

    @case
    def a_read_only_disk_is_not_written_to(self):
        image = self.make("fixed.qcow2", "64M")
        output("qemu-io", "-c", "write -q -P 7 0 8M", image)
        before = digest(image)
        daemon = self.other("fixed", image, "--read-only")
        dev = self.plugged(daemon, ",num-queues=1")
        require(self.guest(f"cat /sys/block/{dev}/ro") == "1", "the guest may write")
        status, _ = self.machine.begin(
            f"blockdev --setrw /dev/{dev}; dd if=/dev/zero of=/dev/{dev} bs=4k count=1 oflag=direct"
        ).wait()
        require(status != 0, "a write succeeded")
        self.machine.complaints()
        require(
            self.guest(
                f"dd if=/dev/{dev} bs=1M count=8 iflag=direct 2>/dev/null | tr -d '\\007' | wc -c"
            )
            == "0",
            "not what is on it",
        )
        self.unplug()
        daemon.stop()
        require(digest(image) == before, "the image has changed")

    @case
    def a_chain_of_images_is_read_through_and_written_on_top(self):
        base = self.make("base.qcow2", "64M")
        output("qemu-io", "-c", "write -q -P 1 0 16M", base)
        middle = self.make("middle.qcow2", "-b", base, "-F", "qcow2", "64M")
        output("qemu-io", "-c", "write -q -P 2 4M 4M", middle)
        top = self.make("top.qcow2", "-b", middle, "-F", "qcow2", "64M")
        output("qemu-io", "-c", "write -q -P 3 6M 4M", top)
        below = digest(base), digest(middle)
        daemon = self.other("chain", top)
        dev = self.plugged(daemon, ",num-queues=1")
        # Patterns at 0, 4, 6, 10 and 16 MiB, as the layers lie above each other; then a write that
        # covers half a cluster of each.
        found = self.guest(
            f"for i in 0 4 6 9 10 15 16; do dd if=/dev/{dev} bs=4k count=1 skip=$((i * 256))"
            " iflag=direct 2>/dev/null | od -An -tu1 -v"
            " | tr -s ' ' '\\n' | sort -u | grep .; done"
        ).split()
        require(found == ["1", "2", "3", "3", "1", "1", "0"], f"the guest reads {found}")
        self.guest(
            f"dd if=/dev/zero bs=512 count=64 2>/dev/null | tr '\\000' '\\011' >/tmp/nine"
            f" && dd if=/tmp/nine of=/dev/{dev} bs=32k seek=33 oflag=direct && dd if=/tmp/nine"
            f" of=/dev/{dev} bs=32k seek=129"
            " oflag=direct conv=fsync"
        )
        self.unplug()
        daemon.stop()
        require((digest(base), digest(middle)) == below, "an image below the top was written to")
        for where, pattern in (
            (32 * 32, 1),
            (33 * 32, 9),
            (34 * 32, 1),
            (128 * 32, 2),
            (129 * 32, 9),
            (130 * 32, 2),
        ):
            output("qemu-io", "-r", "-c", f"read -q -P {pattern} {where}k 32k", top)
        output("qemu-img", "check", "-q", top)

    @case
    def what_was_synced_outlives_the_daemon_and_qemu(self):
        """The last case: it ends the guest. Fresh clusters, so that the image's tables have to be
        on the host too.
        """
        self.guest(
            f"/usr/sbin/blkdiscard -o {800 * MIB} -l {64 * MIB} {self.dev}"
            f" && dd if=/dev/zero bs=1M count=8 2>/dev/null | tr '\\000' '\\021' >/tmp/p"
            f" && dd if=/tmp/p of={self.dev} bs=64k seek={800 * 16} oflag=direct conv=fsync"
            f" && echo 'write through' >{self.sys}/cache_type"
            f" && dd if=/tmp/p of={self.dev} bs=64k seek={820 * 16} oflag=direct"
        )
        self.main.kill()
        self.machine.kill()
        output("qemu-io", "-r", "-c", f"read -q -P 17 {800 * MIB} {8 * MIB}", self.image)
        output("qemu-io", "-r", "-c", f"read -q -P 17 {820 * MIB} {8 * MIB}", self.image)
        # The image serves again.
        self.main.start().stop()
