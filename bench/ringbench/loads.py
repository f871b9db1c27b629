"""What programs do with a served file: fixed placements, large requests, many `dd`, database loads.
Each table is a function of a `Loads`.
"""

import os
import statistics
import subprocess
import time

from . import databases, fio
from .fio import Case
from .measure import say
from .servers import BenchError, Image, Server, Side, qsd_command, ringdisk_command

MIB, GIB = 1 << 20, 1 << 30
STAYS = ("home", "away", "split", "free")


class Loads:
    """What all tables need: the program, a directory, how often and how long."""

    def __init__(self, binary, workdir, threads, reps, runtime_s, quick):
        self.binary, self.workdir, self.threads = binary, workdir, threads
        self.reps, self.runtime_s, self.quick = reps, runtime_s, quick
        self.null = Image("null", size=GIB)
        self.errors = []

    def ours(self, image, *extra, transport="uring"):
        """ringdisk serving an image."""

        def command(mountpoint):
            words = ringdisk_command(self.binary, image, self.threads, mountpoint, transport)
            return [*words[:2], *extra, *words[2:]]

        return Server("ringdisk", command, self.workdir)

    def peer(self, image):
        """QSD serving the same, at its best."""
        return Server(
            "qsd",
            lambda mountpoint: qsd_command(image, self.threads, mountpoint, True),
            self.workdir,
        )

    def sides(self, image, *extra):
        """Both, by name."""
        return {"ringdisk": lambda: self.ours(image, *extra), "qsd": lambda: self.peer(image)}

    def interleaved(self, name, sides, measure):
        """`measure(server)` for each side in turn, `reps` times: lists by side. A failure is an
        error and leaves its place empty.
        """
        found = {side: [] for side in sides}
        for rep in range(self.reps):
            for side in list(sides)[:: 1 if rep % 2 else -1]:
                try:
                    with sides[side]() as server:
                        value = measure(server)
                    say(
                        f"[{rep + 1}] {name}: {side}"
                        f" {value if isinstance(value, float) else value.get('iops')}"
                    )
                    found[side].append(value)
                except (BenchError, OSError, subprocess.SubprocessError) as error:
                    self.errors.append(f"{name}: {side}: {error}")
                    found[side].append(None)
        return found


def line(name, value, bound, figures, at_least=True):
    """One line of a table: what has the bound, and the figures beside it."""
    met = None if bound is None or value is None else value >= bound if at_least else value <= bound
    return {
        "name": name,
        "value": value,
        "bound": bound,
        "at_least": at_least,
        "met": met,
        "figures": figures,
    }


def ratio(found, above, below):
    """Median of the ratios within a repetition; None without any."""
    pairs = [(a, b) for a, b in zip(found[above], found[below]) if a and b]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def median(values):
    """Median of what was measured."""
    good = [value for value in values if value]
    return statistics.median(good) if good else None


def placement(b):
    """The rule against the fixed placements of threads and entries: 4 KiB and large requests on the
    null image.
    """
    cases = [
        Case("rand", op, engine, jobs)
        for engine in ("aio", "sync")
        for jobs in (1, 4)
        for op in ("read", "write")
    ]
    cases += [Case("rand", op, "aio", 1, depth=4) for op in ("read", "write")]
    cases += [
        Case("seq", "read", "aio", jobs, block=block) for block in ("128k", "1m") for jobs in (1, 4)
    ]
    sides = {"ringdisk": lambda: b.ours(b.null)}
    for stay in STAYS:
        sides[stay] = lambda stay=stay: b.ours(b.null, "--stay", stay)
    sides["dev"] = lambda: b.ours(b.null, transport="dev")
    out = []
    for case in cases[:2] if b.quick else cases:
        found = b.interleaved(
            case.name, sides, lambda server: fio.run(server, case, b.null.size, b.runtime_s)
        )
        rates = {side: [run and run["iops"] for run in runs] for side, runs in found.items()}
        medians = {side: median(values) for side, values in rates.items()}
        known = [stay for stay in STAYS if medians[stay]]
        best = max(known, key=lambda stay: medians[stay]) if known else None
        figures = {
            side: f"{medians[side] / 1e3:.1f}" if medians[side] else "failed" for side in sides
        }
        figures["best"] = best or ""
        cpu = {
            side: median([run and run["daemon_us"] for run in found[side]])
            for side in ("ringdisk", best)
            if side
        }
        figures["µs of the daemon, ringdisk / best"] = " / ".join(
            f"{value or 0:.1f}" for value in cpu.values()
        )
        value = ratio(rates, "ringdisk", best) if best else None
        out.append(line(case.name, value, 0.95, figures))
    return out


def mixed(b):
    """One client that waits for each reply beside one that keeps 16 requests in flight."""

    def run(server):
        command = [
            *fio.program(),
            f"--filename={server.path}",
            f"--size={b.null.size}",
            "--direct=1",
            "--time_based",
            f"--runtime={b.runtime_s}",
            "--ramp_time=1",
            "--thread",
            "--norandommap",
            "--output-format=json",
            "--bs=4k",
            "--rw=randread",
            "--name=deep",
            "--ioengine=libaio",
            "--iodepth=16",
            "--name=sync",
            "--ioengine=psync",
            "--iodepth=1",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=b.runtime_s + 60)
        server.alive()
        if done.returncode:
            raise BenchError(f"fio ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        jobs = fio.jobs(done.stdout)
        return {"iops": jobs["deep"] + jobs["sync"], **jobs}

    sides = {"ringdisk": lambda: b.ours(b.null)}
    for stay in STAYS:
        sides[stay] = lambda stay=stay: b.ours(b.null, "--stay", stay)
    sides["qsd"] = lambda: b.peer(b.null)
    found = b.interleaved("deep beside sync", sides, run)
    out = []
    for job in ("deep", "sync", "iops"):
        rates = {side: [each and each[job] for each in runs] for side, runs in found.items()}
        medians = {side: median(values) for side, values in rates.items()}
        figures = {
            side: f"{medians[side] / 1e3:.1f}" if medians[side] else "failed" for side in sides
        }
        # No placement is the best for each of the two; their sum has the bound.
        known = [stay for stay in STAYS if medians[stay]]
        best = max(known, key=lambda stay: medians[stay]) if known and job == "iops" else None
        figures["best"] = best or ""
        name = {"iops": "both together"}.get(job, f"the {job} one")
        out.append(
            line(
                name,
                ratio(rates, "ringdisk", best) if best else None,
                0.95 if best else None,
                figures,
            )
        )
    return out


def large(b):
    """Table 3 of the mission: 1 MiB, two clients that wait for each reply, direct and buffered:
    with `--kernel-cache`, and without, where the kernel keeps nothing and a buffered client is
    served as a direct one (as QSD always does).
    """
    out = []
    for direct in (1, 0):
        sides = b.sides(b.null)
        if not direct:
            sides["ringdisk --kernel-cache"] = lambda: b.ours(b.null, "--kernel-cache")
        for order, op in (("seq", "read"), ("rand", "read"), ("seq", "write"), ("rand", "write")):
            case = Case(order, op, "sync", 2, block="1m", direct=direct)
            found = b.interleaved(
                case.name, sides, lambda server: fio.run(server, case, b.null.size, b.runtime_s)
            )
            rates = {side: [run and run["mib_s"] for run in runs] for side, runs in found.items()}
            figures = {side: f"{median(values) or 0:.0f}" for side, values in rates.items()}
            out.append(
                line(case.name, ratio(rates, "ringdisk", "qsd"), 1.8 if direct else None, figures)
            )
            if not direct:
                name = "ringdisk --kernel-cache"
                out.append(line(f"{case.name}, {name}", ratio(rates, name, "qsd"), 1.8, {}))
    return out


def many(b):
    """Table 4 of the mission: `dd` processes, 1 MiB blocks, each on a region of its own."""
    counts = (4, 16) if b.quick else (4, 8, 16, 32, 64, 128)
    total = (1 if b.quick else 8) * GIB
    image = Image("null", size=total)
    out = []
    for op in ("read", "write"):
        rates = {"ringdisk": {}, "qsd": {}}
        for count in counts:

            def run(server, count=count):
                share = total // count // MIB
                start = time.monotonic()
                running = [
                    subprocess.Popen(
                        dd(server.path, op, number * share, share), stderr=subprocess.DEVNULL
                    )
                    for number in range(count)
                ]
                codes = [each.wait(300) for each in running]
                seconds = time.monotonic() - start
                server.alive()
                if any(codes):
                    raise BenchError(f"dd ended with {codes}")
                return total / MIB / seconds

            found = b.interleaved(f"{count} dd, {op}", b.sides(image), run)
            for side, values in found.items():
                rates[side][count] = median(values)
        best = max(rate or 0 for rate in rates["ringdisk"].values())
        for count in counts:
            figures = {side: f"{rates[side][count] or 0:.0f}" for side in rates}
            is_last = count == counts[-1]
            value = (rates["ringdisk"][count] or 0) / best if is_last and best else None
            out.append(line(f"{op}, {count} processes", value, 0.9 if is_last else None, figures))
    return out


def dd(path, op, at_mib, mib):
    """One `dd` on its region."""
    if op == "read":
        return [
            "dd",
            f"if={path}",
            "of=/dev/null",
            "bs=1M",
            f"skip={at_mib}",
            f"count={mib}",
            "iflag=direct",
        ]
    return [
        "dd",
        "if=/dev/zero",
        f"of={path}",
        "bs=1M",
        f"seek={at_mib}",
        f"count={mib}",
        "oflag=direct",
        "conv=notrunc",
    ]


def bulk_loads(b):
    """Bulk loads of SQLite and PostgreSQL on ext4 over a loop device on the mount of a raw file."""
    path = os.path.join(b.workdir, "load.raw")
    image = Image("file", path, 3 * GIB)
    out = []
    for database in (databases.Sqlite, databases.Postgres):
        for writers in ((1, 4) if b.quick else (1, 4, 16)):

            def run(server, database=database, writers=writers):
                with databases.Filesystem(server.path, b.workdir) as root:
                    return database(root, b.quick).load(writers)

            def fresh(make):
                def start():
                    # The same blocks for everybody, and none of them written yet.
                    subprocess.run(["fallocate", "-l", str(image.size), path], check=True)
                    os.sync()
                    return make()

                return start

            sides = {name: fresh(make) for name, make in b.sides(image).items()}
            name = f"{database.name}, {writers} writer{'s' * (writers > 1)}"
            found = b.interleaved(name, sides, run)
            if os.path.exists(path):
                os.unlink(path)
            figures = {side: f"{median(values) or 0:.2f}" for side, values in found.items()}
            out.append(line(name, ratio(found, "ringdisk", "qsd"), None, figures, at_least=False))
    return out


# Name: title, unit of the figures, what the ratio is, function.
TABLES = {
    "placement": (
        "Placement: the rule against fixed ones, null image",
        "kIOPS",
        "of the best fixed",
        placement,
    ),
    "mixed": (
        "A client that waits beside a deep one, 4 KiB random reads, null image",
        "kIOPS",
        "of the best fixed",
        mixed,
    ),
    "large": ("1 MiB, 2 clients, null image", "MiB/s", "against QSD", large),
    "many": ("`dd` processes, 1 MiB, direct, null image", "MiB/s", "of the best row", many),
    "bulk": ("Bulk loads on ext4 over a loop device", "seconds", "of QSD's", bulk_loads),
}
