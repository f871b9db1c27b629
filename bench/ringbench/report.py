"""Results as Markdown. Takes the JSON document, so an old result can be rendered again."""

COLUMN_NAMES = {
    "ringdisk": "ringdisk",
    "ringdisk-1": "ringdisk, 1 thread",
    "qsd": "QSD growable=on",
    "qsd-default": "QSD default",
    "host file": "fio on the host file",
    "ringdisk raw": "ringdisk, raw",
}
TITLES = {
    "null": "Null image, 4 KiB, O_DIRECT",
    "bulk": "Null image, large sequential reads",
    "file": "Raw file and qcow2, 4 KiB, O_DIRECT",
    "depth": "Depth: fio io_uring randrw 4 KiB",
}


def transport(doc):
    """How ringdisk was reached; results before 2026-11-22 do not say."""
    return {"uring": "io_uring", "dev": "`/dev/fuse`", None: "`/dev/fuse`"}[doc.get("transport")]


def verdict(met):
    """One word for a target."""
    return {True: "pass", False: "**miss**", None: ""}[met]


def number(value):
    """Three significant digits."""
    if value is None:
        return "failed"
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    )


def kiops(median):
    """Rate with the daemon's and the machine's CPU for each I/O."""
    if not median:
        return "failed"
    return f"{median['iops'] / 1e3:.1f} ({median['daemon_us']:.1f} / {median['machine_us']:.1f})"


def rate_table(table, rows):
    """Rows of table 1: kIOPS or MiB/s by column, ratios, targets."""
    columns = []
    for row in rows:
        columns += [c for c in row["columns"] if c not in columns]
    out = [f"### {TITLES[table]}", ""]
    unit = "MiB/s" if table == "bulk" else "kIOPS (CPU µs for each I/O: daemon / machine)"
    out += [f"Median {unit}; ratios are medians of the ratios within a repetition.", ""]
    out.append(
        "| case | " + " | ".join(COLUMN_NAMES[c] for c in columns) + " | against QSD | targets |"
    )
    out.append("|---|" + "---|" * len(columns) + "---|---|")
    for row in rows:
        cells = []
        for column in columns:
            median = row["median"].get(column)
            if column not in row["columns"]:
                cells.append("")
            elif table == "bulk":
                cells.append(f"{median['mib_s']:.0f}" if median else "failed")
            else:
                cells.append(kiops(median))
        against = row["ratio"].get("qsd")
        targets = "; ".join(
            f"{t['text']}: {number(t['value'])} {verdict(t['met'])}" for t in row["targets"]
        )
        out.append(
            f"| {row['image']}: {row['case']} | "
            + " | ".join(cells)
            + f" | {number(against)} × | {targets} |"
        )
    return out + [""]


def depth_table(rows):
    """Rows of table 2: reads, writes and their sum, with latency."""
    out = [
        f"### {TITLES['depth']}",
        "",
        (
            "| image, case | server | reads IOPS | MiB/s | latency µs | writes IOPS | MiB/s "
            "| latency µs | sum IOPS | sum MiB/s | daemon CPU µs |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for column in row["columns"]:
            m = row["median"].get(column)
            head = f"| {row['image']}: {row['case']} | {COLUMN_NAMES[column]} |"
            if not m:
                out.append(head + " failed |" + " |" * 8)
                continue
            cells = [
                x
                for op in ("read", "write")
                for x in (
                    f"{m[op]['iops']:.0f}",
                    f"{m[op]['mib_s']:.1f}",
                    number(m[op]["latency_us"]),
                )
            ]
            out.append(
                head
                + " "
                + " | ".join(cells)
                + f" | {m['iops']:.0f} | {m['mib_s']:.1f} | {number(m['daemon_us'])} |"
            )
    return out + [""]


def cost_table(title, figures):
    """Single figures with their bounds."""
    out = [
        f"### {title}",
        "",
        "| figure | ringdisk | QSD growable=on | target | |",
        "|---|---|---|---|---|",
    ]
    for line in figures:
        bound = (
            "" if line["bound"] is None else f"{'≥' if line['at_least'] else '≤'} {line['bound']:g}"
        )
        peer = number(line["qsd"]) if not line["at_least"] else ""
        out.append(
            f"| {line['name']} {line['unit']} | {number(line['ringdisk'])} | {peer} | {bound} "
            f"| {verdict(line['met'])} |"
        )
    return out + [""]


def markdown(doc):
    """The whole report."""
    m = doc["machine"]
    out = [
        "# " + heading(doc),
        "",
        (
            f"{doc['date']} · {m['cpus']} CPUs ({m['cpu']}) · Linux {m['kernel']} ·"
            f" {doc['versions']['ringdisk']} · {doc['versions']['qsd']} · {doc['versions']['fio']}"
        ),
        "",
        (
            f"Made by `{doc['command']}`: {doc['reps']} repetitions ({doc['depth_reps']} of the"
            f" depth table), {doc['runtime_s']} s each after 1 s of ramp, {doc['threads']} threads"
            f" each, ringdisk over {transport(doc)}. All servers of a row run in turn within each"
            " repetition."
        ),
        "",
    ]
    if doc["incomplete"]:
        out += ["**Incomplete: this run was cut short or had failures.**", ""]
    met = sum(1 for t in doc_targets(doc) if t["met"])
    out += [f"Targets met: {met} of {len(doc_targets(doc))}.", ""]
    for table in ("null", "bulk", "file", "depth"):
        rows = [row for row in doc["rows"] if row["table"] == table]
        if rows:
            out += depth_table(rows) if table == "depth" else rate_table(table, rows)
    if doc["depth_gain"]:
        out += cost_table("What depth brings", doc["depth_gain"])
    if doc["cost"]:
        out += cost_table("What it costs", doc["cost"])
    if doc["errors"]:
        out += ["### Failures", ""] + [f"- {error}" for error in doc["errors"]] + [""]
    return "\n".join(out)


def heading(doc):
    """What the page is about: the tables and the transport."""
    tables = {row["table"] for row in doc["rows"]}
    what = "Files" if tables == {"file"} else "A disk as a file"
    return f"{what}, over {transport(doc).strip('`')}: ringdisk against qemu-storage-daemon"


def doc_targets(doc):
    """Every target of the document, met or not."""
    return [t for row in doc["rows"] for t in row["targets"]] + [
        f for f in doc["depth_gain"] + doc["cost"] if f["met"] is not None
    ]
