"""Images of the qcow2 tables, made by the peer's tools."""

import os
import random
import subprocess

from .servers import BenchError, peer_argv

MIB = 1 << 20


def tool(program, *args):
    """Runs a program of the peer; its output."""
    done = subprocess.run(peer_argv(program, *args), capture_output=True, text=True)
    if done.returncode:
        raise BenchError(
            f"{program} {' '.join(args)}: {(done.stderr + done.stdout).strip()[-400:]}"
        )
    return done.stdout


def create(path, size, *options):
    """An empty qcow2."""
    if os.path.exists(path):
        os.unlink(path)
    words = ["-o", ",".join(options)] if options else []
    tool("qemu-img", "create", "-q", "-f", "qcow2", *words, path, str(size))
    return path


def random_raw(path, size):
    """A raw file of random bytes, on the disk."""
    with open(path, "wb") as f:
        for _ in range(size // MIB):
            f.write(os.urandom(MIB))
        os.fsync(f.fileno())
    return path


def compressible_raw(path, size, seed=3):
    """A raw file that compresses to about two fifths: words from a small list between random
    numbers.
    """
    chance = random.Random(seed)
    words = [
        bytes(chance.randrange(97, 123) for _ in range(chance.randrange(3, 12)))
        for _ in range(4000)
    ]
    block = bytearray()
    while len(block) < 16 * MIB:
        block += b" ".join(chance.choice(words) for _ in range(60)) + b" " + os.urandom(48)
    with open(path, "wb") as f:
        for index in range(size // MIB):
            at = (index * 997 * 1021) % (len(block) - MIB)
            f.write(block[at : at + MIB])
        os.fsync(f.fileno())
    return path


def convert(source, target, *options):
    """qemu-img convert to qcow2."""
    tool("qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", *options, source, target)
    return target


def copy(source, target):
    """qemu-img convert from raw to raw; both files are on the disk afterwards."""
    tool("qemu-img", "convert", "-q", "-f", "raw", "-O", "raw", source, target)
    os.sync()
    return target


def chain(directory, base, size, layers):
    """`layers` overlays over a raw `base`, each with a part of the disk."""
    below, fmt = base, "raw"
    step = size // layers // MIB * MIB
    for index in range(layers):
        path = os.path.join(directory, f"layer{layers}-{index}.qcow2")
        create(path, size, f"backing_file={below}", f"backing_fmt={fmt}")
        tool(
            "qemu-io",
            "-f",
            "qcow2",
            "-c",
            f"write -q -P {index + 1} {index * step} {step // 2}",
            path,
        )
        below, fmt = path, "qcow2"
    return below


def spread(path, size, clusters):
    """An empty image of `size` with `clusters` data clusters spread evenly; their offsets."""
    create(path, size)
    offsets = [size // clusters * index // 65536 * 65536 for index in range(clusters)]
    for at in range(0, clusters, 256):
        words = [
            word
            for offset in offsets[at : at + 256]
            for word in ("-c", f"write -q -P 7 {offset} 64k")
        ]
        tool("qemu-io", "-f", "qcow2", *words, path)
    return offsets
