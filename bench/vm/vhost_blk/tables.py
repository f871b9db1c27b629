#!/usr/bin/env python3
"""Tables of bench/vm/vhost-blk: standard input is what a part has printed in the machine.
`tables.py module|servers|throughput`.
"""

import json
import re
import statistics
import sys


def table(head, rows):
    """As Markdown."""
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def after(text, word):
    """The number behind a word."""
    found = re.search(re.escape(word) + r" ([\d.]+)", text)
    return float(found.group(1)) if found else None


def driver_rows(lines):
    """Disk, engine, queues, workers, and what the driver said."""
    return [line.split(" ", 5)[1:] for line in lines if line.startswith("ROW ")]


def module(lines):
    """The module alone."""
    columns = [
        ("instructions: worker", "worker ns", 0),
        ("all but the guest", "all but the guest's threads ns", 0),
        ("requests per kick", "per kick", 1),
        ("per call", "per call", 1),
        ("per look", "per look", 1),
        ("switches of workers per request", "switches of workers", 3),
    ]
    rows = []
    for *start, said in driver_rows(lines):
        values = [(after(said, word), digits) for _, word, digits in columns]
        rows.append(
            [*start, *("?" if value is None else f"{value:.{digits}f}" for value, digits in values)]
        )
    table(["disk", "engine", "queues", "workers", *(name for name, _, _ in columns)], rows)


def servers(lines):
    """All ways, and the ratio of each to our userspace path with as many queues and threads."""
    found = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    for row in found:
        row["machine"] = row["rest"] + row["client"]
    base = {
        (row["disk"], row["queues"], row["threads"]): row
        for row in found
        if row["way"] == "userspace"
    }
    rows = []
    for row in found:
        mine = base.get((row["disk"], row["queues"], row["threads"]))
        each = lambda key: f"{1 / row[key]:.1f}" if row[key] > 0 else "none"
        ratios = [
            f"{row[key] / mine[key]:.2f}" if mine else "?" for key in ("server", "rest", "machine")
        ]
        # A difference of two runs may be a little below zero.
        rows.append(
            [
                row["disk"],
                str(row["queues"]),
                row["way"],
                str(row["threads"]),
                f"{row['server']:.0f}",
                f"{row['rest']:.0f}",
                f"{row['client']:.0f}",
                *ratios,
                each("kicks"),
                each("calls"),
                f"{max(row['switches'], 0):.3f}",
                f"{max(row['syscalls'], 0):.3f}",
            ]
        )
    table(
        [
            "disk",
            "queues",
            "way",
            "threads",
            "server",
            "all but the client",
            "client",
            "ratio: server",
            "all but the client",
            "all",
            "requests per kick",
            "per call",
            "switches per request",
            "system calls per request",
        ],
        rows,
    )
    for line in lines:
        if line.startswith("FAILED"):
            print("\nNot measured: " + line[7:].strip())
    for line in lines:
        if line.startswith("PROFILE"):
            print(line.rstrip())


def throughput(lines):
    """Four workers against one."""
    rates, order = {}, []
    for disk, engine, queues, workers, said in driver_rows(lines):
        found = re.search(r"s, (\d+)/s", said)
        if queues == "4" and found:
            if (disk, engine) not in order:
                order.append((disk, engine))
            rates.setdefault((disk, engine, workers), []).append(int(found.group(1)))
    rows = []
    for key in order:
        one, four = (statistics.median(rates[(*key, workers)]) for workers in "14")
        rows.append([*key, f"{one / 1e3:.1f}", f"{four / 1e3:.1f}", f"{four / one:.2f}"])
    table(
        [
            "disk",
            "engine",
            "4 queues, 1 worker: thousand requests per second (median of 5)",
            "4 workers",
            "ratio",
        ],
        rows,
    )


if __name__ == "__main__":
    {"module": module, "servers": servers, "throughput": throughput}[sys.argv[1]](
        sys.stdin.readlines()
    )
