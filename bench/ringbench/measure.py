"""Runs the plan: interleaved, repeated, medians. A figure that could not be measured is an error,
never a guess.
"""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from . import fio, plan, proc
from .servers import BenchError, Host, Image, peer_argv


def say(text):
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Images:
    """The images on disk, made on first use: a raw file full of random bytes and the same as qcow2.
    """

    def __init__(self, workdir, size):
        self.workdir, self.size, self.made = workdir, size, {}

    def get(self, name):
        """The image of a row by its name in the plan."""
        if name == "null":
            return Image("null", size=self.size)
        if name == "null 1 ms":
            return Image("null", size=self.size, latency_ns=1_000_000)
        if name not in self.made:
            self.made[name] = getattr(self, f"_make_{name}")()
        return self.made[name]

    def _make_file(self):
        path = os.path.join(self.workdir, "image.raw")
        say(f"making {path} ({self.size >> 20} MiB)")
        with open(path, "wb") as f:
            for _ in range(self.size >> 20):
                f.write(os.urandom(1 << 20))
            f.flush()
            os.fsync(f.fileno())
        return Image("file", path, self.size)

    def _make_qcow2(self):
        raw, path = self.get("file"), os.path.join(self.workdir, "image.qcow2")
        say(f"making {path}")
        command = peer_argv("qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", raw.path, path)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"qemu-img convert: {done.stderr.strip()}")
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        return Image("qcow2", path, self.size)


def serve(column, image, images, sides, workdir):
    """The context manager of one column on one image."""
    if column == "host file":
        return Host(image)
    if column == "ringdisk raw":
        return sides["ringdisk"].serve(images.get("file"), workdir)
    return sides[column].serve(image, workdir)


def fio_rows(rows, images, sides, workdir, reps, depth_reps, runtime_s):
    """Measures all rows; every repetition runs each column of a row in turn, in alternating order.

    Returns one dict for each row, `runs` by column in order of repetition. A column that failed has
    an `errors` entry.
    """
    results = {
        row.name: {
            "table": row.table,
            "image": row.image,
            "case": row.case.name,
            "columns": row.columns,
            "depth": row.case.depth,
            "direct": row.case.direct,
            "runs": {c: [] for c in row.columns},
            "errors": [],
        }
        for row in rows
    }
    for rep in range(max(reps, depth_reps)):
        for row in rows:
            if rep >= (depth_reps if row.table == "depth" else reps):
                continue
            result = results[row.name]
            try:
                image = images.get(row.image)
            except (BenchError, OSError) as error:
                result["errors"].append(str(error))
                continue
            for column in (row.columns if rep % 2 == 0 else row.columns[::-1]):
                try:
                    with serve(column, image, images, sides, workdir) as server:
                        run = fio.run(server, row.case, images.size, runtime_s)
                    result["runs"][column].append(run)
                    say(
                        f"[{rep + 1}] {row.name}: {column} {run['iops'] / 1e3:.1f}k, daemon"
                        f" {run['daemon_us']:.2f} µs"
                    )
                except (BenchError, OSError) as error:
                    result["errors"].append(f"{column}: {error}")
                    result["runs"][column].append(None)
                    say(f"[{rep + 1}] {row.name}: {column} FAILED: {error}")
    return [summary(row, results[row.name]) for row in rows]


def ratio(runs, column, figure):
    """Median of ringdisk's figure over the same figure of `column` in the same repetition; None
    without both.
    """
    pairs = [
        (a[figure], b[figure])
        for a, b in zip(runs["ringdisk"], runs[column])
        if a and b and b[figure]
    ]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def summary(row, result):
    """Adds medians by column, ratios to ringdisk and the verdict on each target."""
    runs = result["runs"]
    result["median"] = {}
    for column, values in runs.items():
        good = [v for v in values if v]
        if good:
            pick = lambda get: statistics.median(get(v) for v in good)
            result["median"][column] = {
                "iops": pick(lambda v: v["iops"]),
                "mib_s": pick(lambda v: v["mib_s"]),
                "daemon_us": pick(lambda v: v["daemon_us"]),
                "machine_us": pick(lambda v: v["machine_us"]),
                **{
                    op: {
                        k: pick(lambda v, op=op, k=k: v[op][k])
                        for k in ("iops", "mib_s", "latency_us", "p99_us")
                    }
                    for op in ("read", "write")
                },
            }
    result["ratio"] = {c: ratio(runs, c, "iops") for c in result["columns"] if c != "ringdisk"}
    result["targets"] = []
    for target in row.targets:
        value = ratio(runs, target.column, target.figure)
        result["targets"].append(
            {
                "text": target.text(),
                "bound": target.bound,
                "at_least": target.at_least,
                "column": target.column,
                "figure": target.figure,
                "value": value,
                "met": value is not None and target.met(value),
            }
        )
    return result


def depth_gain(results):
    """The verdict of table 2: with 1 ms of latency and O_DIRECT, depth 64 against depth 1."""
    by_depth = {
        r["depth"]: r["median"].get("ringdisk", {}).get("iops")
        for r in results
        if r["image"] == "null 1 ms" and r["direct"]
    }
    if not by_depth:
        return []
    low, high = by_depth.get(1), by_depth.get(64)
    value = high / low if low and high else None
    return [figure("null 1 ms: depth 64 against depth 1", "×", value, None, plan.DEPTH_GAIN, True)]


def figure(name, unit, ours, peer, bound=None, at_least=False):
    """One line of the cost table."""
    verdict = None
    if bound is not None:
        verdict = ours is not None and (ours >= bound if at_least else ours <= bound)
    return {
        "name": name,
        "unit": unit,
        "ringdisk": ours,
        "qsd": peer,
        "bound": bound,
        "at_least": at_least,
        "met": verdict,
    }


def syscalls(side, image, depth, ios, workdir):
    """System calls of the server for each random read at `depth`, by `strace -c -f`."""
    if not shutil.which("strace"):
        raise BenchError("strace is not installed")
    with side.serve(image, workdir) as server, tempfile.NamedTemporaryFile(
        "r", dir=workdir
    ) as table:
        time.sleep(0.5)
        tracer = subprocess.Popen(
            ["strace", "-c", "-f", "-q", "-o", table.name, "-p", str(server.pid)],
            stderr=subprocess.PIPE,
        )
        try:
            time.sleep(0.7)
            if tracer.poll() is not None:
                raise BenchError(f"strace: {tracer.stderr.read().decode(errors='replace').strip()}")
            done = fio.count(server, "read", depth, ios, image.size)
        finally:
            if tracer.poll() is None:
                tracer.send_signal(signal.SIGINT)
                try:
                    tracer.wait(20)
                except subprocess.TimeoutExpired:
                    tracer.kill()
                    tracer.wait()
        lines = open(table.name).read().splitlines()
    calls = {}
    for line in lines:
        found = re.match(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", line)
        if found and found.group(2) != "total":
            calls[found.group(2)] = int(found.group(1))
    if not calls:
        raise BenchError("strace counted nothing")
    return sum(calls.values()) / done, calls


def idle(side, image, workdir, seconds):
    """RSS in MiB, CPU in percent and context switches in a second of a mount that nobody uses,
    after it was used once.
    """
    with side.serve(image, workdir) as server:
        with open(server.path, "rb") as f:
            f.read(1 << 20)
        time.sleep(2)
        cpu, switched = proc.run_ns(server.pid), proc.switches(server.pid)
        time.sleep(seconds)
        server.alive()
        cpu, switched = proc.run_ns(server.pid) - cpu, proc.switches(server.pid) - switched
        return proc.rss_mib(server.pid), cpu / seconds / 1e7, switched / seconds


def first_byte_ms(side, image, workdir, times):
    """Median time in ms from the start of the process to the first bytes read through the mount."""
    values = []
    for _ in range(times):
        with side.serve(image, workdir) as server:
            values.append(server.first_byte_s * 1e3)
    return statistics.median(values)


def cost(images, sides, workdir, quick):
    """The cost table: system calls, memory, start, idle; ringdisk beside QSD. Returns (figures,
    errors).
    """
    figures, errors = [], []

    def both(what, measure):
        out = []
        for name in ("ringdisk", "qsd"):
            try:
                value = measure(sides[name])
                say(f"{what}: {name} {value}")
                out.append(value)
            except (BenchError, OSError) as error:
                errors.append(f"{what}: {name}: {error}")
                say(f"{what}: {name} FAILED: {error}")
                out.append(None)
        return out

    for kind in ("null", "file"):
        for depth in (1, 16):
            what = f"system calls for a {kind} read, depth {depth}"
            ios = 2000 if quick else 20000
            pair = both(what, lambda s: syscalls(s, images.get(kind), depth, ios, workdir))
            line = figure(what, "", *[p and p[0] for p in pair], plan.SYSCALLS_MAX[depth])
            line["calls"] = {name: p and p[1] for name, p in zip(("ringdisk", "qsd"), pair)}
            figures.append(line)
    for kind in ("null", "qcow2"):
        pair = both(
            f"idle {kind} mount", lambda s: idle(s, images.get(kind), workdir, 2 if quick else 10)
        )
        for at, (name, unit, bound) in enumerate(
            (
                ("memory (RSS)", "MiB", plan.RSS_MIB_MAX),
                ("CPU", "%", plan.IDLE_CPU_PERCENT_MAX),
                ("context switches", "/s", None),
            )
        ):
            figures.append(
                figure(f"idle {kind} mount: {name}", unit, *[p and p[at] for p in pair], bound)
            )
        pair = both(
            f"start to first byte, {kind}",
            lambda s: first_byte_ms(s, images.get(kind), workdir, 3 if quick else 9),
        )
        figures.append(figure(f"start to first byte, {kind}", "ms", *pair, plan.FIRST_BYTE_MS_MAX))
    return figures, errors
