"""fio in a guest, that verifies what it has written, and a daemon that dies under it."""

import json
import os
import time

from processes import output, require, until

# fio in the guest: what was written is read back and compared, block by block.
VERIFY = (
    "fio --name=v --ioengine=libaio --direct=1 --rw=randwrite --verify=crc32c --verify_fatal=1"
    " --verify_state_save=0"
    " --randrepeat=0 --group_reporting --minimal --output=/dev/null"
)


def load(target, size="8M"):
    """A script that writes and verifies a device or a file, each time with other bytes, until there
    is a file /tmp/stop.
    """
    return (
        f"rm -f /tmp/stop; passes=0; while [ ! -e /tmp/stop ]; do {VERIFY} --filename={target}"
        f" --size={size} --bs=8k --iodepth=16"
        " --numjobs=2 --offset_increment=64M --fsync=64 || exit 1; passes=$((passes + 1)); done;"
        " echo $passes"
    )


def kills(machine, daemon, target, count):
    """fio writes and verifies for as long as the daemon is killed and started again and again."""
    job = machine.begin(load(target))
    for _ in range(count):
        before = daemon.stats()["total"]["writes"]
        until(lambda b=before: daemon.stats()["total"]["writes"] > b + 20, 30, "the guest writes")
        require(not job.done(), f"fio ended early: {job.answer.queue}")
        daemon.kill()
        daemon.start()
    before = daemon.stats()["total"]["writes"]
    until(lambda: daemon.stats()["total"]["writes"] > before or job.done(), 30, "the guest goes on")
    machine.run("touch /tmp/stop")
    require(int(job.output(180)) > 0, "not one pass of writing and verifying")


def kills_of_the_serving_one(machine, daemon, target, count):
    """fio writes and verifies for as long as the process that serves a kept disk is killed again
    and again.
    """
    job = machine.begin(load(target))
    for _ in range(count):
        begun = time.monotonic()
        before = daemon.stats()["total"]["writes"]
        until(lambda b=before: daemon.stats()["total"]["writes"] > b + 20, 30, "the guest writes")
        require(not job.done(), f"fio ended early: {job.answer.queue}")
        time.sleep(max(0, daemon.PAUSE_S - (time.monotonic() - begun)))
        daemon.kill_serving()
    until(lambda: daemon.stats()["total"]["writes"] > 20 or job.done(), 30, "the guest goes on")
    machine.run("touch /tmp/stop")
    require(int(job.output(180)) > 0, "not one pass of writing and verifying")


def checkpoints(machine, daemon, target, count):
    """fio writes and verifies for as long as checkpoints begin and end; a reader of each sees one
    state, however much the guest writes.
    """
    copy = daemon.socket + ".copy"
    job = machine.begin(load(target))

    def writes(what):
        before = daemon.stats()["total"]["writes"]
        until(lambda: daemon.stats()["total"]["writes"] > before + 20, 30, what)
        require(not job.done(), f"fio ended early: {job.answer.queue}")

    for number in range(count):
        writes("the guest writes")
        name = f"c{number}"
        begun = json.loads(daemon.ctl("checkpoint", name, "--json"))
        uri = begun["disks"][0]["uri"]
        output("qemu-img", "convert", "-f", "raw", "-O", "raw", uri, copy)
        writes("the guest goes on")
        # Fails where they differ.
        output("qemu-img", "compare", "-f", "raw", "-F", "raw", copy, uri)
        daemon.ctl("checkpoint", "--end", name)
        os.unlink(copy)
    machine.run("touch /tmp/stop")
    require(int(job.output(180)) > 0, "not one pass of writing and verifying")
