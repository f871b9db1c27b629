"""Where results go: files in the build directory, and the pages of docs/benchmarks.

JSON stays in the build directory; `--publish` puts the Markdown and the chart of a result into the
pages, which are in the repository.
"""

import json
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULTS = os.path.join(ROOT, "target/bench")
PAGES = os.path.join(ROOT, "docs/benchmarks")
WIDTH = 100


def add_options(parser, name):
    """The options of every benchmark about its results."""
    parser.add_argument("--name", default=name, help="name of the files (%(default)s)")
    parser.add_argument("--out", default=RESULTS, help="directory of the files (%(default)s)")
    parser.add_argument(
        "--publish", action="store_true", help="also into docs/benchmarks (complete runs only)"
    )


def earlier(directory, name):
    """The document of an earlier result, or nothing."""
    path = os.path.join(directory, f"{name}.json")
    if not os.path.exists(path):
        return {}
    with open(path) as f:
        return json.load(f)


def wrapped(text):
    """Markdown with its paragraphs in lines of WIDTH columns; tables and code stay."""
    out = []
    for block in text.split("\n\n"):
        plain = all(line[:1] not in ("|", "#", " ", "-", "!") for line in block.split("\n"))
        out.append(fill(block) if plain else block)
    return "\n\n".join(out)


def fill(paragraph):
    """One paragraph in lines of WIDTH columns. No word is broken."""
    lines = [""]
    for word in paragraph.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def write(args, doc, markdown, chart=None):
    """The files of a result, and its page where `--publish` asks for that.

    * `args`: the command line, with `out`, `name` and `publish`.
    * `doc`: everything that was measured, for the JSON.
    * `markdown`: the report; `chart`: an SVG, or nothing.
    """
    if chart:
        heading, rest = markdown.split("\n", 1)
        markdown = f"{heading}\n\n![The ratios to the peer, row by row]({args.name}.svg)\n{rest}"
    files = {"md": wrapped(markdown).rstrip() + "\n"} | ({"svg": chart} if chart else {})
    put(args.out, args.name, {"json": json.dumps(doc, indent=1) + "\n"} | files)
    print(os.path.join(args.out, f"{args.name}.md"))
    if not args.publish:
        return
    if doc.get("incomplete") or doc.get("quick") or doc["errors"]:
        print("not published: the pages take only complete runs")
        return
    put(PAGES, args.name, files)
    print(os.path.join(PAGES, f"{args.name}.md"))


def put(directory, name, files):
    """Writes NAME.ENDING for each ending."""
    os.makedirs(directory, exist_ok=True)
    for ending, text in files.items():
        with open(os.path.join(directory, f"{name}.{ending}"), "w") as f:
            f.write(text)
