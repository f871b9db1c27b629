"""What is measured: the tables, their rows and targets. No measuring here.

A row names an image, a fio case, the columns that take part and the targets. A target is a bound on
a ratio to another column (`"qsd"`) or on a figure of ringdisk itself.
"""

from .fio import Case

TABLES = ("null", "bulk", "file", "depth", "cost")


class Target:
    """`ringdisk`'s `figure` against the same figure of `column` (or None: the figure itself) must
    be ≥ or ≤ `bound`.
    """

    def __init__(self, figure, column, bound, at_least=True):
        self.figure, self.column, self.bound, self.at_least = figure, column, bound, at_least

    def text(self):
        """For the tables: `≥ 1.3 × qsd`."""
        sign = "≥" if self.at_least else "≤"
        against = f" × {self.column}" if self.column else ""
        figure = {"iops": "", "daemon_us": "daemon CPU "}.get(self.figure, f"{self.figure} ")
        return f"{figure}{sign} {self.bound:g}{against}"

    def met(self, value):
        """Whether `value` (the ratio, or the figure) is good enough."""
        return value >= self.bound if self.at_least else value <= self.bound


class Row:
    """One line of a table: `columns` are names of sides, in the order they are shown."""

    def __init__(self, table, image, case, columns, targets=()):
        self.table, self.image, self.case, self.columns, self.targets = (
            table,
            image,
            case,
            columns,
            list(targets),
        )

    @property
    def name(self):
        """The key of the row in the JSON file."""
        return f"{self.image}: {self.case.name}"


def faster(bound, column="qsd"):
    """IOPS at least `bound` times those of `column`."""
    return Target("iops", column, bound)


class Bounds:
    """What one transport is to reach: rates as multiples of QSD's, daemon CPU for each I/O as a
    share of QSD's.
    """

    def __init__(self, aio, sync, sync_many, cpu, bulk, file_aio, file_sync, host):
        self.aio, self.sync, self.sync_many, self.cpu, self.bulk = aio, sync, sync_many, cpu, bulk
        self.file_aio, self.file_sync, self.host = file_aio, file_sync, host

    @property
    def cpu_target(self):
        """As a target."""
        return Target("daemon_us", "qsd", self.cpu, at_least=False)


BOUNDS = {
    "dev": Bounds(1.3, 1.2, 1.0, 0.7, 3, 1.2, None, 0.85),
    "uring": Bounds(2, 2.5, 1.6, 0.5, 4.5, 1.25, 1.1, 0.9),
}
# More threads never make a row slower by more than noise, which is about a tenth on these machines.
TWO_THREADS = Target("iops", "ringdisk-1", 0.9)


def null_rows(quick, bounds):
    """Table 1 of the mission on the null image."""
    rows = []
    for jobs in (1, 4):
        for engine in ("aio", "sync"):
            for op in ("read", "write"):
                for order in (["rand"] if quick else ["seq", "rand"]):
                    columns = ["ringdisk", "ringdisk-1", "qsd"]
                    bound = (
                        bounds.aio
                        if engine == "aio"
                        else bounds.sync if jobs == 1 else bounds.sync_many
                    )
                    targets = [faster(bound), bounds.cpu_target, TWO_THREADS]
                    if engine == "aio" and jobs == 1:
                        columns.append("qsd-default")
                        targets.append(faster(2.5, "qsd-default"))
                    rows.append(
                        Row("null", "null", Case(order, op, engine, jobs), columns, targets)
                    )
    return rows


def bulk_rows(quick, bounds):
    """Large sequential reads of the null image."""
    sizes = ("1m",) if quick else ("128k", "1m")
    return [
        Row(
            "bulk",
            "null",
            Case("seq", "read", "aio", jobs, block=block),
            ["ringdisk", "qsd"],
            [faster(bounds.bulk)],
        )
        for block in sizes
        for jobs in ((1,) if quick else (1, 4))
    ]


def file_rows(quick, bounds):
    """Table 1 of the mission on a raw file, and random reads of a fully allocated qcow2."""
    rows = []
    for jobs in ((1,) if quick else (1, 4)):
        for engine in ("aio", "sync"):
            for op in ("read", "write"):
                for order in ("seq", "rand"):
                    case = Case(order, op, engine, jobs)
                    if quick and (order, op, engine) != ("rand", "read", "aio"):
                        continue
                    reference = engine == "aio" and op == "read" and order == "rand"
                    bound = bounds.file_aio if engine == "aio" else bounds.file_sync
                    # Random reads are steady; of the other rows a target is told over io_uring
                    # only.
                    targets = [faster(bound)] if bound and (reference or bounds.file_sync) else []
                    targets += [Target("iops", "host file", bounds.host)] if reference else []
                    columns = ["ringdisk", "qsd"] + (["host file"] if reference else [])
                    rows.append(Row("file", "file", case, columns, targets))
        # The raw file is served once more in the same repetition, next to the qcow2, for the ratio
        # of the two.
        rows.append(
            Row(
                "file",
                "qcow2",
                Case("rand", "read", "aio", jobs),
                ["ringdisk", "ringdisk raw", "qsd"],
                [Target("iops", "ringdisk raw", 0.97)],
            )
        )
    return rows


def depth_rows(quick, _bounds):
    """Table 2 of the mission: does depth count?"""
    rows = []
    for image in ("null", "null 1 ms"):
        for direct in ((1,) if quick else (1, 0)):
            for depth in (1, 64):
                case = Case("rand", "rw", "uring", depth=depth, direct=direct)
                columns = ["ringdisk", "qsd"] if quick else ["ringdisk", "qsd", "qsd-default"]
                rows.append(Row("depth", image, case, columns))
    return rows


def rows(tables, quick, transport):
    """All fio rows of the chosen tables, in order, with the targets of a transport."""
    makers = {"null": null_rows, "bulk": bulk_rows, "file": file_rows, "depth": depth_rows}
    return [
        row
        for table in tables
        if table in makers
        for row in makers[table](quick, BOUNDS[transport])
    ]


# 64 requests at once in place of one: 50 of the possible 64 times.
DEPTH_GAIN = 50
# The targets are 3 and 1; opening and closing the file are counted too (some 20 calls for 20000
# requests).
SYSCALLS_MAX = {1: 3.01, 16: 1.01}
RSS_MIB_MAX = 12
FIRST_BYTE_MS_MAX = 50
# "No CPU": below a thousandth of one CPU, so that a timer tick or two does not fail it.
IDLE_CPU_PERCENT_MAX = 0.1
