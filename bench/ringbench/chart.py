"""A bar chart in SVG, written by hand: ringdisk's rate over QSD's, row by row, with the target as a
tick.
"""

from xml.sax.saxutils import escape

WIDTH, LABEL, RIGHT, BAR, GAP, TOP = 900, 330, 70, 16, 7, 64


def svg(doc):
    """The chart of all rows that have a ratio to QSD; green meets its target, red misses it, grey
    has none.
    """
    rows = [row for row in doc["rows"] if row["ratio"].get("qsd")]
    ratios = [row["ratio"]["qsd"] for row in rows]
    top = max([2.0, *ratios]) * 1.05
    scale = (WIDTH - LABEL - RIGHT) / top
    height = TOP + len(rows) * (BAR + GAP) + 20
    m = doc["machine"]
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif"'
            ' font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        (
            '<text x="12" y="22" font-size="16" font-weight="600">ringdisk against'
            " qemu-storage-daemon (growable=on): ratio of rates</text>"
        ),
        (
            f'<text x="12" y="42" fill="#555555">{escape(doc["date"])} · {m["cpus"]} CPUs · Linux'
            f' {escape(m["kernel"])} · {escape(doc["versions"]["qsd"])} · the black tick is the'
            " target</text>"
        ),
    ]
    one = LABEL + scale
    out.append(
        f'<line x1="{one:.1f}" y1="{TOP - 8}" x2="{one:.1f}" y2="{height - 14}" stroke="#888888"'
        ' stroke-dasharray="3 3"/>'
    )
    for at, row in enumerate(rows):
        y = TOP + at * (BAR + GAP)
        value = row["ratio"]["qsd"]
        bounds = [
            t["bound"] for t in row["targets"] if t["column"] == "qsd" and t["figure"] == "iops"
        ]
        colour = "#9aa5b1" if not bounds else "#2e8b57" if value >= bounds[0] else "#c0392b"
        label = escape(f"{row['image']}: {row['case']}")
        out.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{label}</text>')
        out.append(
            f'<rect x="{LABEL}" y="{y}" width="{value * scale:.1f}" height="{BAR}"'
            f' fill="{colour}"/>'
        )
        out.append(f'<text x="{LABEL + value * scale + 6:.1f}" y="{y + 12}">{value:.2f} ×</text>')
        for bound in bounds:
            x = LABEL + bound * scale
            out.append(
                f'<line x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + BAR + 2}" stroke="#000000"'
                ' stroke-width="2"/>'
            )
    out.append("</svg>")
    return "\n".join(out) + "\n"
