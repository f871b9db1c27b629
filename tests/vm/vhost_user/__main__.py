"""Virtual machines whose disks `ringdisk serve` serves: QEMU, emulated, on this
machine. Called by tests/vm/run vhost-user.

    vhost_user PROGRAM KERNEL BUSYBOX DIRECTORY QEMU-WORDS… [-- FILTER…]

PROGRAM is ringdisk; KERNEL the directory of the kernel (vmlinuz, version, modules); DIRECTORY is
for files of the run; words of QEMU that are -L DIRECTORY name its firmware. A FILTER leaves the
cases whose name contains it. RINGDISK_FULL=1 adds the long ones.
"""

import os
import signal
import sys
import time

import bootdisk
import daemon
import processes
from cases_boot import Boot
from cases_disk import Disk
from cases_migrate import Migrate
from cases_migrate_disk import MigrateDisk
from machine import KERNEL_WORDS, Qemu
from results import Results


class Context:
    """What all groups use."""

    def __init__(self, kernel, busybox, directory, qemu):
        self.kernel, self.directory, self.qemu = kernel, directory, qemu
        self.initramfs = bootdisk.initramfs(directory, kernel, busybox)
        self.root = bootdisk.root(directory, busybox)
        # Linux by QEMU's own loader, with a root file system that is no disk of ours.
        self.linux = [
            "-kernel",
            os.path.join(kernel, "vmlinuz"),
            "-initrd",
            self.initramfs,
            "-append",
            f"{KERNEL_WORDS} ringdisk.root=tools ringdisk.mode=ro",
        ]
        self.tools = [
            "-drive",
            f"file={self.root},format=raw,if=none,id=tools,readonly=on",
            "-device",
            "virtio-blk-pci,drive=tools,serial=tools",
        ]


def main(words):
    """Runs the suite; the exit status."""
    filters = []
    if "--" in words:
        at = words.index("--")
        words, filters = words[:at], words[at + 1 :]
    program, kernel, busybox, directory, *qemu_words = words
    firmware = [qemu_words[i + 1] for i, word in enumerate(qemu_words) if word == "-L"]
    if firmware:
        qemu_words = qemu_words[: qemu_words.index("-L")]
    daemon.PROGRAM = program
    begin = time.monotonic()
    qemu = Qemu(qemu_words, firmware)
    print(f"vm: {qemu.name}", flush=True)
    context = Context(kernel, busybox, directory, qemu)
    print(f"vm: prepared in {time.monotonic() - begin:.1f} s", flush=True)
    results = Results()
    for group in (Boot, Disk, Migrate, MigrateDisk):
        results.run(group(context), filters, bool(os.environ.get("RINGDISK_FULL")))
    print(f"vm: {time.monotonic() - begin:.0f} s", flush=True)
    return results.summary()


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        processes.kill_all()
