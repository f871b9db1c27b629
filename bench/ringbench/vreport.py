"""The report of vhost-user-blk as Markdown, from the JSON document."""

from . import vtables
from .report import number, verdict

NAMES = {
    "qsd": "QSD",
    "qsd main loop": "QSD, main loop",
    "qsd raw": "QSD raw",
    "qsd qcow2": "QSD qcow2",
    "host file": "fio on the host file",
}


def targets_of(doc):
    """All verdicts."""
    rows = [t for table in doc["tables"].values() for row in table for t in row.get("targets", [])]
    return rows + [
        line for table in doc["tables"].values() for line in table if line.get("bound") is not None
    ]


def cell(column, bulk):
    """Rate with its spread, and the CPU of both sides."""
    if not column:
        return "failed"
    scale, unit = (column["mib_s"] / column["iops"], " MiB/s") if bulk else (1e-3, "k")
    spread = f"{number(column['low'] * scale)}–{number(column['high'] * scale)}"
    return (
        f"{number(column['iops'] * scale)}{unit} ({spread}); {column['server_us']:.2f} +"
        f" {column['client_us']:.2f} µs"
    )


def words(target):
    """A target with its value and verdict."""
    return f"{target['text']}: {number(target['value'])} {verdict(target['met'])}"


def rate_table(key, rows):
    """Rows with a column for each server."""
    names = list(dict.fromkeys(name for row in rows for name in row["columns"]))
    out = [
        f"**{vtables.TITLES[key]}**",
        "",
        "| case | " + " | ".join(NAMES.get(n, n) for n in names) + " | targets |",
        "|---|" + "---|" * len(names) + "---|",
    ]
    for row in rows:
        cells = [
            cell(row["columns"][n], "128 KiB" in row["name"]) if n in row["columns"] else ""
            for n in names
        ]
        out.append(
            f"| {row['name']} | "
            + " | ".join(cells)
            + " | "
            + "; ".join(map(words, row["targets"]))
            + " |"
        )
    return out + [""]


def single_table(key, lines):
    """One figure a line."""
    out = [
        f"**{vtables.TITLES[key]}**",
        "",
        "| figure | ringdisk | QSD | target |",
        "|---|---|---|---|",
    ]
    for line in lines:

        def show(side):
            value = line["values"].get(side)
            return (
                "failed"
                if value is None
                else value if isinstance(value, str) else f"{value:.3g} {line['unit']}".strip()
            )

        bound = "" if line["bound"] is None else f"≤ {line['bound']:g}: {verdict(line['met'])}"
        out.append(f"| {line['name']} | {show('ringdisk')} | {show('qsd')} | {bound} |")
    return out + [""]


def markdown(doc):
    """The report."""
    m = doc["machine"]
    loads = [
        load for table in doc["tables"].values() for row in table for load in row.get("load", [])
    ]
    busy = f" Load average during the runs: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    kept = (
        " (with `--merge`: rows that this run did not measure are of earlier runs)"
        if "--merge" in doc["command"]
        else ""
    )
    judged = targets_of(doc)
    out = [
        "# A disk for virtual machines (vhost-user-blk)",
        "",
        (
            f"Made by `{doc['command']}` on {doc['date']}{kept}: {m['cpus']} CPUs ({m['cpu']}),"
            f" Linux {m['kernel']}, {doc['versions']['ringdisk']}, {doc['versions']['qsd']}."
            f" Medians of {doc['reps']} runs of {doc['seconds']:g} s, in brackets the lowest and"
            " the highest; then the CPU of the server and of the client for each I/O. One queue:"
            " the server on one CPU, the client on another; two queues: both on both. All columns"
            " of a row are measured in turn; ratios are medians of ratios within a repetition,"
            f" against the faster of QSD's two event loops.{busy}"
        ),
        "",
        f"Targets met: {sum(t['met'] for t in judged)} of {len(judged)}.",
        "",
    ]
    for key, rows in doc["tables"].items():
        out += rate_table(key, rows) if key in vtables.ROWS else single_table(key, rows)
    out += [f"- Failed: {error}" for error in doc["errors"]]
    return "\n".join(out).rstrip() + "\n"
