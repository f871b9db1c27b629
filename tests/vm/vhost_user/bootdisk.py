"""What guests boot from: an initramfs, a root file system with this machine's fio and mkfs.ext4,
and a disk with a boot sector.
"""

import os
import shutil
import struct
import subprocess

from processes import output

HERE = os.path.dirname(os.path.abspath(__file__))
SECTOR = 512
# The root file system, and where it begins on the disk that boots; before it are setup code,
# command line, kernel and initramfs.
ROOT_MIB = 256
ROOT_AT_MIB = 64
FIRST_SECTOR = 2048
# Addresses of the boot protocol (Documentation/arch/x86/boot.rst), and room for the kernel to
# unpack itself below the initramfs.
SETUP_AT, WORDS_AT, KERNEL_AT, INITRAMFS_AT = 0x90000, 0x9E000, 0x100000, 0x8000000
# Offset in boot.S of the list of what to read.
SEGMENTS = 380


def _cpio(tree, busybox, into):
    with open(into, "wb") as out:
        find = subprocess.Popen(["find", "."], cwd=tree, stdout=subprocess.PIPE)
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"],
            cwd=tree,
            stdin=find.stdout,
            stdout=out,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        find.wait()


def _script(name, into):
    shutil.copy(os.path.join(HERE, "guest", name), into)
    os.chmod(into, 0o755)


def initramfs(directory, kernel, busybox):
    """busybox, init and the driver of virtio disks."""
    tree, path = os.path.join(directory, "tree"), os.path.join(directory, "initramfs")
    for each in ("bin", "dev", "proc", "sys", "modules", "root"):
        os.makedirs(os.path.join(tree, each))
    shutil.copy(busybox, os.path.join(tree, "bin/busybox"))
    _script("init", os.path.join(tree, "init"))
    with open(os.path.join(kernel, "version"), encoding="utf-8") as f:
        version = f.read().strip()
    module = os.path.join(
        kernel, "modules/lib/modules", version, "kernel/drivers/block/virtio_blk.ko.xz"
    )
    with open(os.path.join(tree, "modules/virtio_blk.ko"), "wb") as out:
        subprocess.run([busybox, "unxz", "-c", module], stdout=out, check=True)
    _cpio(tree, busybox, path)
    shutil.rmtree(tree)
    return path


def _libraries(program):
    """Files that the loader maps for a program of this machine, the loader itself included."""
    for line in output("ldd", program).splitlines():
        for word in line.split():
            if word.startswith("/"):
                yield word
                break


def root(directory, busybox):
    """An ext4 with busybox, the agent, fio and mkfs.ext4."""
    tree, path = os.path.join(directory, "roottree"), os.path.join(directory, "root.ext4")
    for each in (
        "bin",
        "sbin",
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "mnt",
        "etc",
        "usr/bin",
        "usr/sbin",
    ):
        os.makedirs(os.path.join(tree, each))
    shutil.copy(busybox, os.path.join(tree, "bin/busybox"))
    _script("agent", os.path.join(tree, "agent"))
    for each in output(busybox, "--list").split():
        if each != "busybox":
            os.symlink("/bin/busybox", os.path.join(tree, "bin", each))
    # With the places that a user's path may lack.
    for name in ("fio", "mkfs.ext4", "e2fsck", "blkdiscard"):
        program = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if program is None:
            raise FileNotFoundError(f"this machine has no {name}")
        shutil.copy(os.path.realpath(program), os.path.join(tree, "usr/sbin", name))
        for library in _libraries(program):
            at = tree + library
            os.makedirs(os.path.dirname(at), exist_ok=True)
            if not os.path.exists(at):
                shutil.copy(os.path.realpath(library), at)
    with open(os.path.join(tree, "etc/mke2fs.conf"), "w", encoding="utf-8") as f:
        f.write(
            "[defaults]\n\tbase_features ="
            " sparse_super,large_file,filetype,resize_inode,dir_index,ext_attr\n"
            "\tblocksize = 4096\n\tinode_size = 256\n"
            "[fs_types]\n\text4 = {\n\t\tfeatures ="
            " has_journal,extent,flex_bg,metadata_csum,64bit\n\t}\n"
        )
    with open(path, "wb") as f:
        f.truncate(ROOT_MIB << 20)
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    subprocess.run(["mkfs.ext4", "-q", "-F", "-d", tree, path], check=True, env=env)
    shutil.rmtree(tree)
    return path


def _sector_code(directory):
    """The assembled boot sector."""
    code, made = os.path.join(directory, "boot.o"), os.path.join(directory, "boot.bin")
    subprocess.run(["as", "--32", os.path.join(HERE, "boot.S"), "-o", code], check=True)
    subprocess.run(
        ["ld", "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", code, "-o", made],
        check=True,
    )
    with open(made, "rb") as f:
        return bytearray(f.read())


def _setup(image, initramfs_len):
    """The setup code of a kernel with what a boot loader has to write into it, and the kernel
    behind it.
    """
    sectors = image[0x1F1] or 4
    setup = bytearray(image[: (sectors + 1) * SECTOR])
    struct.pack_into("<H", setup, 0x1FA, 0xFFFF)  # video mode: as it is
    setup[0x210] = 0xFF  # an unknown boot loader
    setup[0x211] |= 0x80  # which gives it a heap
    struct.pack_into("<II", setup, 0x218, INITRAMFS_AT, initramfs_len)
    struct.pack_into("<H", setup, 0x224, 0xDE00)
    struct.pack_into("<I", setup, 0x228, WORDS_AT)
    return bytes(setup), image[(sectors + 1) * SECTOR :]


def disk(directory, kernel, initramfs_path, root_path, words):
    """A raw disk that a PC's firmware boots: boot sector, kernel, and `root_path` as its first
    partition.
    """
    path = os.path.join(directory, "boot.raw")
    with open(os.path.join(kernel, "vmlinuz"), "rb") as f:
        image = f.read()
    with open(initramfs_path, "rb") as f:
        ramdisk = f.read()
    setup, rest = _setup(image, len(ramdisk))
    sector = _sector_code(directory) + bytes(SECTOR - 440)
    at = FIRST_SECTOR
    with open(path, "wb") as out:
        out.truncate((ROOT_AT_MIB + ROOT_MIB) << 20)
        loads = (
            (setup, SETUP_AT),
            (words.encode() + b"\0", WORDS_AT),
            (rest, KERNEL_AT),
            (ramdisk, INITRAMFS_AT),
        )
        for number, (content, address) in enumerate(loads):
            sectors = -(-len(content) // SECTOR)
            out.seek(at * SECTOR)
            out.write(content)
            struct.pack_into("<III", sector, SEGMENTS + 12 * number, at, sectors, address)
            at += sectors
        assert at * SECTOR <= ROOT_AT_MIB << 20, (
            "kernel and initramfs do not fit before the root file system"
        )
        # Partition 1: active, Linux.
        struct.pack_into(
            "<B3sB3sII",
            sector,
            446,
            0x80,
            b"\xfe\xff\xff",
            0x83,
            b"\xfe\xff\xff",
            (ROOT_AT_MIB << 20) // SECTOR,
            (ROOT_MIB << 20) // SECTOR,
        )
        sector[510:512] = b"\x55\xaa"
        out.seek(0)
        out.write(sector)
    subprocess.run(["cp", "--sparse=always", path, path + ".sparse"], check=True)
    subprocess.run(
        [
            "dd",
            f"if={root_path}",
            f"of={path}.sparse",
            "bs=1M",
            f"seek={ROOT_AT_MIB}",
            "conv=sparse,notrunc",
            "status=none",
        ],
        check=True,
    )
    os.replace(path + ".sparse", path)
    return path
