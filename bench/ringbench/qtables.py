"""The qcow2 tables: what each measures. Each function returns a list of figures; a failure is an
entry of `errors`.
"""

import os
import statistics
import subprocess
import time

from . import job, proc, qimages
from .measure import say
from .servers import Image, Server, peer_argv, qsd_command

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


class Bench:
    """What all tables need: the program, a directory, numbers of repetitions."""

    def __init__(self, binary, workdir, threads, pairs, reps, quick):
        self.binary, self.workdir, self.threads = binary, workdir, threads
        self.pairs, self.reps, self.quick = pairs, reps, quick
        self.errors = []

    def path(self, name):
        """A file in the working directory."""
        return os.path.join(self.workdir, name)

    def ringdisk(self, path, fmt="qcow2", extra=()):
        """ringdisk serving an image with O_DIRECT."""
        make = lambda mountpoint: [
            self.binary,
            "mount",
            "--threads",
            str(self.threads),
            "--direct",
            "--format",
            fmt,
            *extra,
            path,
            mountpoint,
        ]
        return Server("ringdisk", make, self.workdir)

    def qsd(self, path, backing=None):
        """The peer serving the same, at its best."""
        image = Image("qcow2", path, backing=backing)
        return Server(
            "qsd",
            lambda mountpoint: qsd_command(image, self.threads, mountpoint, True),
            self.workdir,
        )


def figure(name, value, bound=None, at_least=True, excused=False, **more):
    """One line of a table; `value` is a ratio or the figure that has the bound, which counts as met
    when it is `excused`.
    """
    met = (
        None
        if bound is None or value is None
        else excused or (value >= bound if at_least else value <= bound)
    )
    say(
        f"{name}: {value if value is None else round(value, 3)} {more.get('text', '')}"
        f" {'' if met is None else 'pass' if met else 'MISS'}"
    )
    return {"name": name, "value": value, "bound": bound, "at_least": at_least, "met": met, **more}


def against_raw(b):
    """Fully allocated qcow2 against raw through the same export, in interleaved pairs."""
    size = 256 * MIB if b.quick else GIB
    source = qimages.random_raw(b.path("source.raw"), size)
    qcow2 = qimages.convert(source, b.path("full.qcow2"))
    # A copy made in the same way at the same time: where a file lies on the disk makes more of a
    # difference than its format.
    raw = qimages.copy(source, b.path("full.raw"))
    os.unlink(source)
    out = []
    with b.ringdisk(raw, "raw") as plain, b.ringdisk(qcow2) as image:
        for rw in ("read", "randread", "write", "randwrite"):
            for depth in (1, 16):
                for jobs in (1, 4):
                    rates, costs = [], []
                    for index in range(b.pairs):
                        order = (image, plain) if index % 2 else (plain, image)
                        got = {
                            s is image: job.run(
                                s, rw, "4k", depth, jobs, size, seconds=0.4 if b.quick else 1
                            )
                            for s in order
                        }
                        rates.append(got[True]["iops"] / got[False]["iops"])
                        costs.append(got[True]["daemon_us"] / got[False]["daemon_us"])
                    rate, cost = statistics.median(rates), statistics.median(costs)
                    low, _, high = (
                        statistics.quantiles(rates, n=4) if len(rates) > 1 else [rate] * 3
                    )
                    spread = (high - low) / 2
                    # Only where the rates spread by more than is missing does the daemon's CPU time
                    # decide.
                    excused = cost <= 1.05 and spread > 0.97 - rate
                    out.append(
                        figure(
                            f"4k {rw}, depth {depth}, {jobs} job{'s' * (jobs > 1)}",
                            rate,
                            0.97,
                            excused=excused,
                            cpu=cost,
                            spread=spread,
                            text=f"± {spread:.2f}, daemon CPU {cost:.2f} of raw",
                        )
                    )
    os.unlink(qcow2)
    os.unlink(raw)
    return out


def fresh(b, name, make, rw, block, depth, ios, bounds, raw_size=None, backing=None):
    """Writes into an image that is made anew for each run: ringdisk, QSD and (with `raw_size`) a
    preallocated raw file.
    """
    runs = {"ringdisk": [], "qsd": [], "raw": []}
    for index in range(b.reps):
        sides = ["ringdisk", "qsd"] + (["raw"] if raw_size else [])
        for side in (sides if index % 2 else sides[::-1]):
            if side == "raw":
                path = b.path("pre.raw")
                subprocess.run(["fallocate", "-l", str(raw_size), path], check=True)
            else:
                path = make()
            os.sync()
            serve = {
                "ringdisk": b.ringdisk,
                "qsd": lambda p: b.qsd(p, backing),
                "raw": lambda p: b.ringdisk(p, "raw"),
            }
            with serve[side](path) as running:
                runs[side].append(job.run(running, rw, block, depth, ios=ios, size=raw_size))
            os.unlink(path)
    median = {
        side: statistics.median(run["iops"] for run in found)
        for side, found in runs.items()
        if found
    }
    ratio = lambda other: statistics.median(
        a["iops"] / c["iops"] for a, c in zip(runs["ringdisk"], runs[other])
    )
    text = ", ".join(f"{side} {rate:.0f}/s" for side, rate in median.items())
    out = [figure(f"{name}, against QSD", ratio("qsd"), bounds[0], text=text, **{"median": median})]
    if raw_size:
        out.append(
            figure(
                f"{name}, against raw preallocated",
                ratio("raw"),
                bounds[1],
                text=text,
                median=median,
            )
        )
    return out


def allocating(b):
    """Writes that need new clusters."""
    size = 2 * GIB if b.quick else 10 * GIB
    empty = lambda: qimages.create(b.path("new.qcow2"), size)
    few = 10 if b.quick else 1
    out = fresh(
        b,
        "4k random into an empty image, depth 64",
        empty,
        "randwrite",
        "4k",
        64,
        40000 // few,
        (2.0, None),
    )
    out += fresh(
        b, "64k sequential, depth 16", empty, "write", "64k", 16, 16000 // few, (1.5, 0.9), GIB
    )
    out += fresh(b, "1m sequential, depth 4", empty, "write", "1m", 4, 1000 // few, (1.5, 0.9), GIB)

    def zeroed():
        path = qimages.create(b.path("zero.qcow2"), GIB)
        qimages.tool("qemu-io", "-f", "qcow2", "-c", f"write -q -z 0 {GIB}", path)
        return path

    def over():
        base = b.path("full.raw")
        if not os.path.exists(base):
            qimages.random_raw(base, GIB)
        return qimages.create(b.path("over.qcow2"), GIB, f"backing_file={base}", "backing_fmt=raw")

    out += fresh(
        b,
        "4k random over zero clusters, depth 16",
        zeroed,
        "randwrite",
        "4k",
        16,
        10000 // few,
        (1.5, None),
    )
    out += fresh(
        b,
        "4k random over a backing file, depth 16",
        over,
        "randwrite",
        "4k",
        16,
        10000 // few,
        (1.5, None),
        backing=b.path("full.raw"),
    )
    return out


def deep(b):
    """A chain of 16 overlays against a single image, once both are cached."""
    size = 256 * MIB
    base = b.path("base.raw")
    qimages.random_raw(base, size)
    single = qimages.convert(base, b.path("single.qcow2"))
    top = qimages.chain(b.workdir, base, size, 16)
    out = []
    with b.ringdisk(top) as chain, b.ringdisk(single) as one:
        for server in (chain, one):
            job.run(server, "read", "64k", 4, size=size, ios=size // 65536)
        for depth in (1, 16):
            rates, costs = [], []
            for index in range(b.pairs):
                order = (chain, one) if index % 2 else (one, chain)
                got = {
                    s is chain: job.run(
                        s, "randread", "4k", depth, size=size, seconds=0.4 if b.quick else 1
                    )
                    for s in order
                }
                rates.append(got[True]["iops"] / got[False]["iops"])
                costs.append(got[True]["daemon_us"] / got[False]["daemon_us"])
            cost = statistics.median(costs)
            out.append(
                figure(
                    f"16 overlays against one image, 4k randread, depth {depth}",
                    statistics.median(rates),
                    0.9,
                    text=f"daemon CPU {cost:.2f} of one image",
                )
            )
    return out


def large(b):
    """A fully mapped image of 1 TiB: memory with random reads all over, and a check."""
    size = TIB // (64 if b.quick else 1)
    path = qimages.create(b.path("large.qcow2"), size, "preallocation=metadata")
    out = []
    with b.ringdisk(path) as server:
        got = job.run(server, "randread", "4k", 16, 2, size, seconds=3 if b.quick else 20)
        rss = proc.rss_mib(server.pid)
        stats = subprocess.run(
            [b.binary, "ctl", server.path, "stats"], capture_output=True, text=True
        ).stdout
        cache = [line.strip() for line in stats.splitlines() if "cache" in line.lower()]
    out.append(
        figure(
            f"{size >> 30} GiB mapped, random reads: memory (MiB)",
            rss,
            150,
            False,
            text=f"{got['iops']:.0f} reads/s; {' '.join(cache)[:200]}",
        )
    )
    times = {"ringdisk": [], "qemu-img": []}
    for _ in range(b.reps):
        for name, command in (
            ("ringdisk", [b.binary, "check", "-q", path]),
            ("qemu-img", peer_argv("qemu-img", "check", "-q", path)),
        ):
            start = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True)
            times[name].append(time.monotonic() - start)
            if done.returncode:
                b.errors.append(
                    f"check by {name} ended with {done.returncode}: {done.stderr[-300:]}"
                )
    pair = {name: statistics.median(found) for name, found in times.items()}
    out.append(
        figure(
            f"check of {size >> 30} GiB, against qemu-img",
            pair["qemu-img"] / pair["ringdisk"],
            2.0,
            text=f"{pair['ringdisk']:.2f} s against {pair['qemu-img']:.2f} s",
        )
    )
    os.unlink(path)
    return out


def compressed(b):
    """Reading compressed clusters, and converting."""
    size = 256 * MIB if b.quick else GIB
    raw = qimages.compressible_raw(b.path("text.raw"), size)
    out = []
    for kind in ("zlib", "zstd"):
        path = qimages.convert(raw, b.path(f"{kind}.qcow2"), "-c", "-o", f"compression_type={kind}")
        for rw, block, depth in (
            ("read", "64k", 4),
            ("read", "1m", 4),
            ("randread", "4k", 16),
            ("randread", "64k", 4),
        ):
            runs = {"ringdisk": [], "qsd": []}
            for _ in range(b.reps):
                for side in runs:
                    with b.ringdisk(path) if side == "ringdisk" else b.qsd(path) as server:
                        runs[side].append(
                            job.run(
                                server, rw, block, depth, size=size, seconds=1 if b.quick else 2
                            )["iops"]
                        )
            ratio = statistics.median(x / y for x, y in zip(runs["ringdisk"], runs["qsd"]))
            text = ", ".join(
                f"{side} {statistics.median(found):.0f}/s" for side, found in runs.items()
            )
            out.append(figure(f"{kind}: {block} {rw}, depth {depth}", ratio, 1.5, text=text))
        os.unlink(path)
    threads = str(os.cpu_count())
    for name, words in (
        (
            "raw to zstd qcow2",
            ["-f", "raw", "-O", "qcow2", "-c", "-o", "compression_type=zstd", raw],
        ),
        ("zstd qcow2 to raw", ["-f", "qcow2", "-O", "raw", b.path("packed.qcow2")]),
    ):
        times = {"ringdisk": [], "qemu-img": []}
        target = b.path("packed.qcow2" if name.startswith("raw") else "unpacked.raw")
        for _ in range(b.reps):
            for side in times:
                if os.path.exists(target):
                    os.unlink(target)
                command = [b.binary] if side == "ringdisk" else peer_argv("qemu-img")
                start = time.monotonic()
                done = subprocess.run(
                    [*command, "convert", "-q", "-m", threads, *words, target],
                    capture_output=True,
                    text=True,
                )
                times[side].append(time.monotonic() - start)
                if done.returncode:
                    b.errors.append(f"convert by {side}: {done.stderr[-300:]}")
        pair = {side: statistics.median(found) for side, found in times.items()}
        out.append(
            figure(
                f"convert {name}, against qemu-img -m {threads}",
                pair["qemu-img"] / pair["ringdisk"],
                1.3,
                text=f"{pair['ringdisk']:.2f} s against {pair['qemu-img']:.2f} s",
            )
        )
    return out


def growth(b):
    """The daemon's CPU for each random 4 KiB read (depth 16) as images grow in one way each."""
    out, count = [], 5000 if b.quick else 30000

    def cost(what, path, offsets):
        line = {"name": what}
        for side, serve in (("ringdisk", b.ringdisk), ("qsd", b.qsd)):
            with serve(path) as server:
                values = []
                for seed in range(b.reps + 1):
                    log = b.path("replay.log")
                    job.replay(log, server.path, offsets, count, seed=seed)
                    values.append(job.run(server, "read", "4k", 16, offsets=log)["daemon_us"])
                # The first one fills the caches.
                line[side] = statistics.median(values[1:])
        say(f"{what}: ringdisk {line['ringdisk']:.2f} µs, QSD {line['qsd']:.2f} µs")
        out.append(line)

    clusters = 256 if b.quick else 2048
    for size in (GIB, 64 * GIB, TIB, 16 * TIB, 64 * TIB):
        path = b.path("spread.qcow2")
        offsets = qimages.spread(path, size, clusters)
        cost(f"virtual size {size >> 30} GiB, {clusters} clusters spread evenly", path, offsets)
    size = 128 * MIB
    everywhere = list(range(0, size, 4096))
    base = qimages.random_raw(b.path("gbase.raw"), size)
    for layers in (1, 4, 16, 64):
        cost(f"chain of {layers}", qimages.chain(b.workdir, base, size, layers), everywhere)
    path = qimages.convert(base, b.path("snap.qcow2"))
    made = 0
    for snapshots in (0, 10, 100):
        while made < snapshots:
            qimages.tool("qemu-img", "snapshot", "-c", f"s{made}", path)
            made += 1
        cost(f"{snapshots} internal snapshots", path, everywhere)
    mixed = qimages.create(b.path("mixed.qcow2"), size)
    order = sorted(range(0, size, 65536), key=lambda offset: offset * 2654435761 % 4294967296)
    for at in range(0, len(order), 256):
        words = [
            word
            for offset in order[at : at + 256]
            for word in ("-c", f"write -q -P 5 {offset} 64k")
        ]
        qimages.tool("qemu-io", "-f", "qcow2", *words, mixed)
    cost("every cluster elsewhere (fragmented)", mixed, everywhere)
    return out


TABLES = {
    "raw": ("Fully allocated qcow2 against raw, same export", against_raw),
    "allocate": ("Writes that allocate", allocating),
    "deep": ("Deep chains", deep),
    "large": ("One TiB", large),
    "compressed": ("Compressed images and convert", compressed),
    "growth": ("How the cost grows: daemon CPU in µs for each random 4 KiB read, depth 16", growth),
}
