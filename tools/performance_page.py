"""Keeps the rows of docs/measurements, and makes the tables and figures of pages from them.

    python tools/performance_page.py --add OUT/*_2_*.json
    python tools/performance_page.py [--check] [PAGE...]

The first command takes over files of `bench --json`: each row becomes a line of, for example,
docs/measurements/2_h100.jsonl. There a run replaces the older one of the same name and minor
version of jax. Its name is that of its file, without the number and the kind of devices. Then this
command makes the pages, as the second one does.

The pages are those in PAGES. Each table stands between two comments, of which the first one says
what to make:

    <!-- make: operation psum -->
    ...
    <!-- end -->

In a sentence or in the cell of a table, the two comments stand around a figure of it; no line may
begin with them. The program replaces what stands between them. The words after "make:" are

    operations NAME...      a table for each: its rows of each number of GPUs; "A+B" is one table
    programs                a table of all programs
    programs NAME=TEXT...   one of these, with fewer columns; "_" is a space of TEXT
    losses                  a table of the rows where ours gains little, or loses
    everything FILE         all runs of a file, such as 2_h100

and around a figure of a sentence, of all rows together (of collectives, of rows up to 4 MB),

    ratios FILE/NAME...     the lowest and the highest ratio of these runs
    fused FILE/NAME...      as ratios: the program that is only accelerated, to ours
    gains FILE/PROGRAM...   how much longer each program takes with the faster `jax.lax`, in percent

All but `everything` show the newest measured version of jax: a table, of GPUs of any number; a
figure, of that file. So new rows change the pages without an edit. For `ratios`, if `jax.lax` took
longer for an array than for a larger one, the shorter time counts: so its outliers make no
headline. With --check the program writes nothing, and exits with 1 if something is not what the
rows give.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_plots import command as plots

from jax_intranode._src.command_line.benefits import size_text
from jax_intranode._src.command_line.launcher.runs import PROCESS_PER_DEVICE, SINGLE_PROCESS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER = DOCS / "measurements"
PAGES = [
    *(DOCS / f"{name}.md" for name in ("performance", "serving", "experts", "halo")),
    *sorted(FOLDER.glob("[0-9]*_*.md")),
    ROOT / "README.md",
]

_BY = "\N{MULTIPLICATION SIGN}"
_BLOCK = re.compile(r"(?P<head><!-- make: (?P<what>[^>]*?) -->\n?)(?P<text>.*?)<!-- end -->", re.S)
_MODES = {PROCESS_PER_DEVICE: "a process per device", SINGLE_PROCESS: "a single process"}
# Rows below this ratio are listed as losses, or as gains too small to count on.
_GAIN = 1.05
# Sizes of the ratios in sentences.
_MOST = 4 << 20
# The files of GPUs.
_GPUS = "[0-9]*_[!c]*.jsonl"


# The rows.

# What rows repeat of the run's header. The command has the settings.
_OF_RUN = (
    *("operation", "backward", "platform", "device", "devices", "cpus"),
    *("jax", "jaxlib", "jax_intranode", "nccl", "cuda", "driver", "python"),
    *("tuning", "xla_flags", "lax_flags", "date", "command"),
)
# What follows from other fields of a row.
_DERIVED = ("count", "algbw", "busbw", "tflops", "lax_share", "reason")


class Row(dict[str, Any]):
    """The fields of a row. Those that a row lacks are None: empty ones are not kept."""

    def __missing__(self, _: str) -> None:
        return None


Runs = dict[tuple[str, str], list[Row]]


def read(file: Path) -> Runs:
    """Returns the rows of a file, if it exists, by minor version of jax and name of the run."""
    found: Runs = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = Row(json.loads(line))
        found.setdefault((_minor(row["jax"]), row["name"]), []).append(row)
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _number_of(jax: str) -> list[int]:
    return [int(part) for part in _minor(jax).split(".")]


def _age(row: Row) -> tuple[list[int], str]:
    """What is larger for the newer row: the minor version of jax, then the date."""
    return _number_of(row["jax"]), row["date"]


def _all(folder: Path) -> list[Row]:
    """Returns all rows of GPUs."""
    files = sorted(folder.glob(_GPUS))
    return [row for file in files for rows in read(file).values() for row in rows]


def newest(folder: Path, name: str) -> dict[str, list[Row]]:
    """Returns the rows of a run, or of a program, on GPUs, by their number and kind.

    They are those with the newest version of jax with which it was measured on any of them. Of a
    program, it is the last row.
    """
    found = {}
    for file in sorted(folder.glob(_GPUS)):
        rows = [row for rows in read(file).values() for row in rows]
        rows = [row for row in rows if name == (row["program"] or row["name"])]
        rows = [row for row in rows if row["mode"] == PROCESS_PER_DEVICE]
        if rows:
            last = max(map(_age, rows))
            node = " ".join(file.stem.upper().split("_"))
            found[node] = last[0], [row for row in rows if _age(row) == last]
    newest_jax = max((jax for jax, _ in found.values()), default=[])
    return {node: rows for node, (jax, rows) in found.items() if jax == newest_jax}


def _runs_named(names: Iterable[str], folder: Path) -> list[list[Row]]:
    """Returns the newest runs with these names, such as "2_h100/psum"."""
    found = []
    for file, name in (name.split("/") for name in names):
        versions = [
            rows for (_, run), rows in read(folder / f"{file}.jsonl").items() if run == name
        ]
        if not versions:
            raise ValueError(f"{folder.name}/{file}.jsonl has no run {name}")
        found.append(max(versions, key=lambda rows: _age(rows[0])))
    return found


def add(files: Sequence[Path], folder: Path) -> None:
    """Takes over JSON files of the benchmark, as the program's description says.

    A run that is older than the one that is there is left out, with a message.

    Raises:
        ValueError: the benchmark did not write a file.
    """
    for file, result in [(file, plots.read(file)) for file in files]:
        header, peers = result["header"], result["peers"]
        kinds = re.findall(r"[A-Z]+\d+", header["device"])
        where = f"{header['devices']}_{(kinds or [header['device']])[0].lower()}"
        to, name = folder / f"{where}.jsonl", file.stem.removesuffix(f"_{where}")
        of_peers = [row | {"libraries": peers["versions"]} for row in peers["rows"]]
        rows = [
            Row(
                (key, value)
                for key, value in ({"name": name} | row | header | row).items()
                if key in ("name", *row, *_OF_RUN) and key not in _DERIVED
                if value not in (None, "", [])
            )
            for row in (*result["rows"], *of_peers)
        ]
        runs, run = read(to), (_minor(header["jax"]), name)
        if run in runs and runs[run][0]["date"] > header["date"]:
            sys.stderr.write(f"{file}: left out, {to.name} has a run of {runs[run][0]['date']}\n")
            continue
        runs[run] = rows
        to.write_text("".join(json.dumps(row) + "\n" for rows in runs.values() for row in rows))


# The cells of tables.

Column = Callable[[Row], str]


def _number(key: str, form: str = ".2f", scale: float = 1) -> Column:
    return lambda row: "" if row[key] is None else format(row[key] * scale, form)


def _time(name: str, digits: int = 2, scale: float = 1, last: bool = True) -> Column:
    """The median, "?" if it is doubtful, and perhaps the 99th percentile in parentheses."""
    doubted = (name or "ours_").replace("_", " ")  # as in "lax spread 56%"

    def cell(row: Row) -> str:
        p50, p99 = (row[f"{name}time{kind}_us"] for kind in ("", "_p99"))
        if p50 is None:
            return ""
        doubtful = any(doubt.startswith(doubted) for doubt in row["doubts"] or ())
        text = f"{p50 * scale:.{digits}f}" + " ?" * doubtful
        return f"{text} ({p99 * scale:.{digits}f})" if last and p99 is not None else text

    return cell


def _together(*columns: Column) -> Column:
    return lambda row: ", ".join(filter(None, (of(row) for of in columns)))


def _quotient(above: str, below: str) -> Column:
    def cell(row: Row) -> str:
        ours = row["algorithm"] != "lax" or "alone_time_us" in (above, below)
        return f"{row[above] / row[below]:.2f}" if row[above] and row[below] and ours else ""

    return cell


def _hidden(row: Row) -> str:
    """The share of the exposed communication that is hidden, beside the faster `jax.lax`.

    "-" where ours is faster than the program without communication.
    """
    ours, none, lax = row["time_us"], row["none_time_us"], _faster_lax(row)
    if not ours or not none or lax <= none:
        return ""
    return "-" if ours < none else f"{(lax - ours) / (lax - none):.0%}"


def _faster_lax(row: Row) -> float:
    return min(filter(None, (row["lax_time_us"], row["lax_tuned_time_us"])), default=0)


def _runs_as(row: Row) -> str:
    plans = row["plans"] or []
    kinds = {"fused kernel" if plan["tile_columns"] else "pipeline" for plan in plans}
    if len(kinds) == 1:
        return kinds.pop()
    name = row["algorithm"] or row["library"] or ""
    return "`jax.lax`" if name == "lax" else name.replace("_", "-")


_RATIO = {"lax / ours": _quotient("lax_time_us", "time_us")}
_COLLECTIVE: dict[str, Column] = {
    "in a graph": _number("graph_time_us"),
    "ours": _time(""),
    "`jax.lax`": _time("lax_"),
    **_RATIO,
    "spreads": _together(_number("spread", ".1%"), _number("lax_spread", ".1%")),
    "SMs, link": _together(_number("sms", "d"), _number("link_share", ".0%")),
    "runs as": _runs_as,
}
_MATMUL: dict[str, Column] = {
    "matmul alone": _number("alone_time_us", ".3f", 1e-3),
    "ours": _time("", 3, 1e-3),
    "`jax.lax`": _time("lax_", 3, 1e-3),
    **_RATIO,
    "alone / ours": _quotient("alone_time_us", "time_us"),
    "spread": _number("spread", ".1%"),
    "runs as": _runs_as,
}
_TIMES = {"lax": "lax_", "lax tuned": "lax_tuned_", "ours": "", "none": "none_"}
_PROGRAM: dict[str, Column] = {
    **{title: _time(name, 3, 1e-3, last=False) for title, name in _TIMES.items()},
    **_RATIO,
    "tuned / ours": _quotient("lax_tuned_time_us", "time_us"),
    "hidden": _hidden,
    "spread": _number("spread", ".1%"),
    "W": _number("watts", ".0f"),
    "MHz": _number("sm_mhz", ".0f"),
}
_PROGRAM_AND_NCCL = _PROGRAM | {"NCCL": lambda row: row["nccl"] or ""}
_GAINS = {
    title: of for title, of in _PROGRAM.items() if title not in ("none", "spread", "W", "MHz")
}
_ALL_OF_PROGRAM: dict[str, Column] = {
    **_PROGRAM,
    **{title: _time(name, 3, 1e-3) for title, name in _TIMES.items()},
    "unedited": _time("unedited_", 3, 1e-3),
}


def _what(row: Row) -> str:
    """Size, shape or program: what tells a row from the others of its table."""
    if row["program"]:
        return f"`{row['program']}`"
    if row["size"]:
        return size_text(row["size"])
    return f" {_BY} ".join(str(row[key]) for key in "mkn") + ", backward" * bool(row["backward"])


# Tables.


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _table(nodes: dict[str, list[Row]], columns: dict[str, Column] | None, first: str = "") -> str:
    """Returns a table with the columns of each node that are not empty.

    The head names each node before its columns, or, if there is one, in the first cell.
    """
    rows = [row for rows in nodes.values() for row in rows]
    if columns is None:
        kinds = {"program": _ALL_OF_PROGRAM, "m": _MATMUL}
        columns = next((of for key, of in kinds.items() if rows[0][key]), _COLLECTIVE)
    names = dict.fromkeys(map(_what, sorted(rows, key=lambda row: row["size"] or 0)))
    one = ": ".join(filter(None, (*nodes, first))) if len(nodes) == 1 else ""
    head, cells = [one or first], [[name] for name in names]
    for node, of_node in nodes.items():
        by_name = {_what(row): row for row in of_node}
        for title, cell in columns.items():
            texts = [cell(by_name[name]) if name in by_name else "" for name in names]
            if any(texts):
                named = f"{node}: " * (node not in "".join(head))
                head.append(named + title)
                for line, text in zip(cells, texts, strict=True):
                    line.append(text)
    return _markdown(head, cells)


def _versions(rows: Sequence[Row]) -> str:
    """Returns versions, date and what was checked."""
    row = rows[0]
    versions = [f"{key} {row[key]}" for key in ("jax", "nccl", "driver") if row[key]]
    dates = ", ".join(sorted({row["date"][:10] for row in rows}))
    if row["program"]:
        checked = f"results differ by at most {max(row['difference'] or 0 for row in rows):.1e}"
    else:
        keys = ("wrong", "lax_wrong", "graph_wrong")
        checked = f"{sum(row[key] or 0 for row in rows for key in keys)} wrong elements"
    text = f"{', '.join(versions)}; {dates}; {checked}"
    return text.replace("nccl", "NCCL")


def operations(names: Sequence[str], folder: Path) -> str:
    """Returns the tables of operations, on each number of GPUs.

    They leave out the rows that fell back: there both columns time the same program.
    """
    tables = []
    for runs in names:
        nodes: dict[str, list[Row]] = {}
        for name in runs.split("+"):
            for node, rows in newest(folder, name).items():
                ours = [row for row in rows if row["algorithm"] != "lax"]
                nodes.setdefault(node, []).extend(ours)
        if not nodes:
            raise ValueError(f"{folder.name} has no run {runs} of GPUs")
        row, *_ = next(iter(nodes.values()))
        versions: dict[str, list[str]] = {}
        for node, rows in nodes.items():
            versions.setdefault(_versions(rows), []).append(node)
        alike = len(versions) == 1
        of_nodes = "; ".join(
            text if alike else f"{', '.join(those)}: {text}" for text, those in versions.items()
        )
        unit, first = ("ms", f"M {_BY} K {_BY} N") if row["m"] else ("\N{MICRO SIGN}s", "size")
        columns, kinds = None, {_runs_as(row) for rows in nodes.values() for row in rows}
        if not row["m"] and len(kinds) == 1 and any(kinds):  # a column of one word
            columns = {title: of for title, of in _COLLECTIVE.items() if title != "runs as"}
            of_nodes += f"; runs as {kinds.pop()}"
        head = f"**`{row['operation']}`**, {row['dtype']}; {of_nodes}; times in {unit}:"
        tables.append(f"{head}\n\n{_table(nodes, columns, first)}")
    return "\n".join(tables)


def programs(names: Sequence[str], folder: Path) -> str:
    """Returns a table of whole programs, on each number of GPUs.

    With texts in place of names it has fewer columns, for readers that don't know the programs.
    """
    texts = dict(name.split("=") for name in names)
    columns = _GAINS if texts else _PROGRAM_AND_NCCL
    rows = [row for row in _all(folder) if row["program"]]
    last = max(_age(row)[0] for row in rows)
    nodes: dict[str, list[Row]] = {}
    for name in texts or sorted({row["program"] for row in rows}):
        for node, of_node in newest(folder, name).items():
            if _age(of_node[0])[0] == last:
                node += f", jax {_minor(of_node[0]['jax'])}"
                nodes.setdefault(node, []).extend(of_node)
    table = _table(nodes, columns, "times in ms")
    for name, text in texts.items():
        table = table.replace(f"| `{name}` |", f"| {text.replace('_', ' ')} |")
    return table


def losses(_: Sequence[str], folder: Path) -> str:
    """Returns the rows of operations in which ours gains little, or loses."""
    cells = []
    rows = [row for row in _all(folder) if row["ratio"] and not row["program"]]
    last = max(_age(row)[0] for row in rows)
    for name in dict.fromkeys(row["name"] for row in rows if _age(row)[0] == last):
        for node, of_node in newest(folder, name).items():
            for row in of_node:
                if row["algorithm"] != "lax" and row["ratio"] < _GAIN:
                    times = [f"{row[f'{key}time_us'] / 1e3:.3f} ms" for key in ("", "lax_")]
                    what = [f"`{row['operation']}`", _what(row), node]
                    cells.append([*what, *times, f"{row['ratio']:.2f}"])
    head = ["operation", "size or shape", "GPUs", "ours", "`jax.lax`", "lax / ours"]
    return _markdown(head, cells)


def everything(names: Sequence[str], folder: Path) -> str:
    """Returns all runs of a file, those of the newest jax first."""
    runs = read(folder / f"{names[0]}.jsonl")
    text = ""
    for version in sorted({jax for jax, _ in runs}, key=_number_of, reverse=True):
        text += f"\n## jax {version}\n"
        for (jax, name), rows in runs.items():
            if jax == version:
                text += f"\n**{name}**: {_versions(rows)}.\n\n    {rows[0]['command']}\n\n"
                modes: dict[str, list[Row]] = {}
                for row in rows:
                    modes.setdefault(_MODES.get(row["mode"], ""), []).append(row)
                text += _table(modes, None)
    return text


# Figures of sentences.


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def ratios(names: Sequence[str], folder: Path) -> str:
    """Returns the lowest and the highest ratio; `jax.lax` needs no less for a smaller size.

    A call that falls back has its ratio, too. It is 1 but for noise.
    """
    found = []
    for rows in _runs_named(names, folder):
        least: dict[tuple[str, str], float] = {}  # of jax.lax, of this size and larger ones
        for row in sorted(rows, key=lambda row: row["size"] or 0, reverse=True):
            lax = row["lax_time_us"]
            if row["size"]:
                line = row["mode"], row["dtype"]
                lax = least[line] = min(lax, least.get(line, math.inf))
            if (row["size"] or 0) <= _MOST:
                found.append(lax / row["time_us"])
    return _range(found)


def fused(names: Sequence[str], folder: Path) -> str:
    """Returns how much longer programs take that are only accelerated."""
    rows = [row for rows in _runs_named(names, folder) for row in rows]
    return _range([row["unedited_time_us"] / row["time_us"] for row in rows])


def gains(names: Sequence[str], folder: Path) -> str:
    """Returns how much longer each program takes with the faster `jax.lax`."""
    found = []
    for file, program in (name.split("/") for name in names):
        row = newest(folder, program)[" ".join(file.upper().split("_"))][-1]
        found.append(f"{(_faster_lax(row) / row['time_us'] - 1) * 100:.0f}")
    return f"{' and '.join(found)} %"


# The page.

_KINDS = (operations, programs, losses, everything, ratios, fused, gains)
_MAKE = {kind.__name__: kind for kind in _KINDS}


def render(page: str, folder: Path) -> str:
    """Returns the page with its tables made anew.

    Args:
        page: the page's text.
        folder: docs/measurements.

    Raises:
        ValueError: an unknown word after "make:", or a run that was not measured.
    """

    def make(block: re.Match[str]) -> str:
        kind, *names = block["what"].split()
        if kind not in _MAKE:
            raise ValueError(f"make: {kind} is none of {', '.join(_MAKE)}")
        if "\n" not in block["head"] and page[: block.start()][-1:] in ("", "\n"):
            raise ValueError(f"make: {kind}: a line begins with it, which ends the paragraph")
        return f"{block['head']}{_MAKE[kind](names, folder)}<!-- end -->"

    page, found = _BLOCK.subn(make, page)
    if found != len(re.findall(r"<!--\s*make:", page)):
        raise ValueError("a comment is not '<!-- make: ... -->' before an '<!-- end -->'")
    return page


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only check whether it is up to date")
    parser.add_argument("--add", nargs="+", default=[], type=Path, metavar="FILE", help="see above")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, metavar="PAGE")
    options = parser.parse_args()
    status = 0
    try:
        add(options.add, FOLDER)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for page in options.pages:
        before = page.read_text()
        try:
            after = render(before, FOLDER)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{page}: {error}\n")
            return 1
        if options.check and after != before:
            sys.stderr.write(f"{page} is not up to date: run tools/performance_page.py\n")
            status = 1
        if not options.check:
            page.write_text(after)
    return status


if __name__ == "__main__":
    sys.exit(_main())
