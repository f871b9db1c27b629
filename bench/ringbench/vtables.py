"""The tables of vhost-user-blk: what each measures, and its targets.

A row has columns; each repetition measures all of them in turn, in alternating order. A ratio is
the median of the ratios within a repetition.
"""

import os
import statistics

from . import fio
from .measure import say
from .servers import BenchError
from .vhost import Load

QSD = ("qsd", "qsd main loop")
# A figure of a side that cannot do this.
NOTHING = "–"


class Target:
    """`figure` of `column` must be ≥ or ≤ `bound` times that of one of `against` (the fastest of
    those that the row has).
    """

    def __init__(self, text, column, against, bound, figure="iops", at_least=True):
        self.text, self.column, self.bound, self.figure, self.at_least = (
            text,
            column,
            bound,
            figure,
            at_least,
        )
        self.against = (against,) if isinstance(against, str) else against

    def judge(self, runs):
        """The verdict on the runs of a row."""
        present = [name for name in self.against if any(runs.get(name, []))]
        speed = lambda name: statistics.median(run["iops"] for run in runs[name] if run)
        best = max(present, key=speed, default=None)
        pairs = [
            (a[self.figure], b[self.figure])
            for a, b in zip(runs.get(self.column, []), runs.get(best, []))
            if a and b
        ]
        value = statistics.median(a / b for a, b in pairs) if pairs else None
        met = value is not None and (value >= self.bound if self.at_least else value <= self.bound)
        return {
            "text": self.text,
            "against": best,
            "bound": self.bound,
            "at_least": self.at_least,
            "value": value,
            "met": met,
        }


class Row:
    """`columns`: name to a function that measures one run."""

    def __init__(self, name, columns, targets):
        self.name, self.columns, self.targets = name, columns, targets


def served(bench, side, kind, load):
    """A run of our driver."""

    def measure():
        with bench.serve(side, kind, load.queues) as server:
            bench.run_load(server, load, min(0.2, bench.seconds))
            return bench.run_load(server, load)

    return measure


def imaged(bench, side, depth, rate):
    """A run of `qemu-img bench`; the first one, which is short, tells how many I/Os fit into the
    time.
    """

    def measure():
        with bench.serve(side, "null") as server:
            first = bench.run_qemu_img(server, depth, rate / 20)
            return bench.run_qemu_img(server, depth, min(first["iops"], 4 * rate))

    return measure


def libblkio(bench):
    """Rows of the first table."""
    rows = []
    for depth, rate in ((1, 20_000), (32, 800_000), (128, 500_000)):
        columns = {side: imaged(bench, side, depth, rate) for side in ("ringdisk", *QSD)}
        targets = {
            1: [Target("≥ 2 × QSD", "ringdisk", QSD, 2)],
            32: [
                Target("≥ 1 × QSD", "ringdisk", QSD, 1),
                Target("server CPU ≤ 0.5 × QSD", "ringdisk", QSD, 0.5, "server_us", False),
            ],
            128: [
                Target("≥ 1.6 × QSD", "ringdisk", QSD, 1.6),
                Target("≥ own depth 32", "ringdisk", "ringdisk, depth 32", 1),
            ],
        }[depth]
        if depth == 128:
            columns["ringdisk, depth 32"] = imaged(bench, "ringdisk", 32, 800_000)
        rows.append(Row(f"qemu-img bench, 4 KiB, depth {depth}", columns, targets))
    return rows


def driver(bench):
    """Rows of the second table."""
    rows = []
    for queues, bound in ((1, 1.5), (2, 2)):
        for wait in ("call", "poll"):
            for depth in (1, 32, 128):
                load = Load(depth, queues, wait=wait)
                targets = [] if depth == 1 else [Target(f"≥ {bound} × QSD", "ringdisk", QSD, bound)]
                rows.append(
                    Row(
                        load.name,
                        {side: served(bench, side, "null", load) for side in ("ringdisk", *QSD)},
                        targets,
                    )
                )
    return rows


def files(bench):
    """Rows of the third table: raw and qcow2 of both servers, and the host's file, in one row."""
    rows = []
    cases = [("random", op, 4096, depth) for op in ("read", "write") for depth in (32, 128)]
    cases += [
        ("sequential", op, 128 << 10, depth) for op in ("read", "write") for depth in (32, 128)
    ]
    for order, op, block, depth in cases:
        load = Load(depth, 1, block, op, order)
        case = fio.Case(
            {"random": "rand", "sequential": "seq"}[order], op, "uring", 1, depth, f"{block >> 10}k"
        )
        columns = {
            f"{side} {fmt}": served(bench, side, kind, load)
            for fmt, kind in (("raw", "file"), ("qcow2", "qcow2"))
            for side in ("ringdisk", "qsd")
        }
        columns["host file"] = lambda case=case: bench.run_host(bench.image("file").path, case)
        targets = [
            t
            for fmt in ("raw", "qcow2")
            for t in (
                Target(f"{fmt} ≥ 1.1 × QSD", f"ringdisk {fmt}", f"qsd {fmt}", 1.1),
                Target(f"{fmt} ≥ 0.9 × host", f"ringdisk {fmt}", "host file", 0.9),
            )
        ]
        targets.append(Target("qcow2 ≥ 0.97 × raw", "ringdisk qcow2", "ringdisk raw", 0.97))
        rows.append(Row(load.name, columns, targets))
    return rows


ROWS = {"libblkio": libblkio, "driver": driver, "file": files}
TITLES = {
    "libblkio": "Null disk, one queue, `qemu-img bench` (libblkio)",
    "driver": "Null disk, a driver that costs little",
    "file": "Files, O_DIRECT",
    "cost": "Kicks, calls and system calls for each I/O",
    "idle": "A connected disk that nobody uses",
    "upgrade": "A new ringdisk takes over from one in use",
}


def measure_rows(table, bench, reps, only):
    """Measures the rows of a table whose name contains `only`. Gives results and errors."""
    rows = [row for row in ROWS[table](bench) if only in row.name]
    results, errors = [], []
    for row in rows:
        runs, loads = {name: [] for name in row.columns}, []
        for rep in range(reps):
            names = list(row.columns)
            for name in names if rep % 2 == 0 else names[::-1]:
                try:
                    run = row.columns[name]()
                    say(
                        f"[{rep + 1}] {row.name}: {name} {run['iops'] / 1e3:.1f}k, server"
                        f" {run['server_us']:.2f} µs, client {run['client_us']:.2f} µs"
                    )
                except (BenchError, OSError) as error:
                    run = None
                    errors.append(f"{row.name}: {name}: {error}")
                    say(f"[{rep + 1}] {row.name}: {name} FAILED: {error}")
                runs[name].append(run)
            loads.append(os.getloadavg()[0])
        results.append(
            {
                "name": row.name,
                "columns": {name: summary(found) for name, found in runs.items()},
                "load": loads,
                "reps": reps,
                "runs": runs,
                "targets": [target.judge(runs) for target in row.targets],
            }
        )
    return results, errors


def summary(runs):
    """Median of each figure, and the spread of the rate."""
    good = [run for run in runs if run]
    if not good:
        return None
    numbers = [key for key, value in good[0].items() if isinstance(value, float)]
    out = {key: statistics.median(run[key] for run in good) for key in numbers}
    out["low"], out["high"] = min(run["iops"] for run in good), max(run["iops"] for run in good)
    return out


def single(name, unit, values, bound=None):
    """A figure of each side; the bound is for ringdisk."""
    ours = values.get("ringdisk")
    met = None if bound is None else ours is not None and ours <= bound
    return {"name": name, "unit": unit, "values": values, "bound": bound, "met": met}


def cost(bench, reps, only):
    """Kicks, calls and system calls for each I/O."""
    lines, errors = [], []
    for queues in (1, 2):
        for depth in (1, 32, 128):
            load = Load(depth, queues)
            if only not in load.name:
                continue
            found = {}
            for side in ("ringdisk", "qsd"):
                runs = []
                for _ in range(reps):
                    try:
                        runs.append(bench.syscalls(side, load))
                    except (BenchError, OSError) as error:
                        errors.append(f"{load.name}: {side}: {error}")
                if runs:
                    found[side] = {
                        key: statistics.median(run[key] for run in runs) for key in runs[0]
                    }
                    say(f"{load.name}: {side} {found[side]}")
            for key in ("kicks", "calls", "syscalls"):
                lines.append(
                    single(
                        f"{load.name}: {'system calls' if key == 'syscalls' else key}",
                        "",
                        {s: v[key] for s, v in found.items()},
                    )
                )
    return lines, errors


def idle(bench, reps, only):
    """CPU and memory of a disk that nobody uses."""
    lines, errors = [], []
    for kind in ("null", "file", "qcow2"):
        if only not in kind:
            continue
        found = {}
        for side in ("ringdisk", "qsd"):
            try:
                found[side] = bench.idle(side, kind, 2 if bench.quick else 10)
                say(f"idle {kind}: {side} {found[side]}")
            except (BenchError, OSError) as error:
                errors.append(f"idle {kind}: {side}: {error}")
        for key, name, unit, bound in (
            ("cpu_percent", "CPU", "%", 0.05),
            ("switches", "context switches", "/s", None),
            ("memory_mib", "memory beside the guest's", "MiB", 15),
        ):
            lines.append(
                single(
                    f"{kind}: {name}",
                    unit,
                    {side: value[key] for side, value in found.items()},
                    bound,
                )
            )
    return lines, errors


def upgrade(bench, reps, only):
    """The longest pause that clients see while one ringdisk takes over from another, of several
    times; QSD has nothing like it.
    """
    lines, errors = [], []
    for kind, op in (("null", "read"), ("qcow2", "write")):
        for depth in (1, 32):
            load = Load(depth, op=op)
            name = f"{kind}: {load.name}"
            if only not in name:
                continue
            found = {}
            for what, upgrades in (("pause of an upgrade", True), ("pause without one", False)):
                try:
                    found[what] = [bench.pause(kind, load, upgrades) for _ in range(reps)]
                    say(f"{name}: {what} {', '.join(f'{ms:.1f}' for ms in found[what])} ms")
                except (BenchError, OSError) as error:
                    errors.append(f"{name}: {what}: {error}")
            for what, bound in (("pause of an upgrade", 20), ("pause without one", None)):
                values = {"ringdisk": max(found[what])} if what in found else {}
                lines.append(
                    single(f"{name}: longest {what}", "ms", {**values, "qsd": NOTHING}, bound)
                )
    return lines, errors


SINGLES = {"cost": cost, "idle": idle, "upgrade": upgrade}
TABLES = (*ROWS, *SINGLES)
