"""Keeps the rows of docs/measurements, and makes the tables and figures of pages from them.

    python tools/performance_page.py --add OUT/*_2_*.json
    python tools/performance_page.py [--check] [PAGE...]

The first command takes over files of `bench --json`: each row becomes a line of, for example,
docs/measurements/2_h100.jsonl. There a run replaces the older one of the same name and minor
version of jax. Its name is that of its file, without the number and the kind of devices. Then this
command makes the pages, as the second one does.

The pages are those in PAGES. Each table stands between two comments, of which the first one says
what to make, from which RUN: a file, a minor version of jax, and a name.

    <!-- make: collectives 2_h200/0.12/psum -->
    ...
    <!-- end -->

In a sentence or in the cell of a table, the two comments stand around a figure of it; no line may
begin with them. The program replaces what stands between them. The words after "make:" are

    headline RUN         one sentence: the time of small collectives
    setup RUN...         devices, versions, date and command of runs of the benchmark
    collectives RUN      a table of sizes
    matmuls RUN          a table of shapes
    programs RUN...      a table of whole programs, a row for each run of the benchmark
    losses RUN...        a table of the rows where ours gains little, or loses
    figure PNG RUN...    a plot, written to docs/figures/PNG

and around a figure of a sentence, of all rows together (of collectives, of rows up to 4 MB),

    ratios RUN...        the lowest and the highest ratio
    lowest RUN...        the lowest one
    lowest_gain RUN...   the lowest one that is no loss
    fused RUN...         as ratios: the program that is only accelerated, to ours

For these `jax.lax` needs no longer for an array than for a larger one: so its outliers make no
headline. A table of a run that was not measured yet keeps its text. With --check the program writes
nothing, and exits with 1 if something is not what the rows give.
"""

import argparse
import hashlib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_plots import command as plots

from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.benefits import size_text
from jax_intranode._src.command_line.launcher.runs import PROCESS_PER_DEVICE, SINGLE_PROCESS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [DOCS / "performance.md", DOCS / "when.md", DOCS / "serving.md", ROOT / "README.md"]

_BY = "\N{MULTIPLICATION SIGN}"
_BLOCK = re.compile(r"(?P<head><!-- make: (?P<what>[^>]*?) -->\n?)(?P<text>.*?)<!-- end -->", re.S)
_MODES = {PROCESS_PER_DEVICE: "one process per device", SINGLE_PROCESS: "a single process"}
# Rows below this ratio are listed as losses, or as gains too small to count on.
_GAIN = 1.05
# Sizes of the headline.
_SMALL = 64 << 10
# Sizes of the ratios in sentences.
_MOST = 4 << 20


# The rows.

# What rows repeat of the run's header. The command has the settings.
_OF_RUN = (
    *("operation", "backward", "platform", "device", "devices", "cpus"),
    *("jax", "jaxlib", "jax_intranode", "nccl", "cuda", "driver", "python"),
    *("tuning", "xla_flags", "lax_flags", "date", "command"),
)
# What follows from other fields of a row.
_DERIVED = ("count", "algbw", "busbw", "tflops", "lax_share", "reason")


class _Fields(dict[str, Any]):
    """The fields of a row or a header. Those that a row lacks are None: empty ones are not kept."""

    def __missing__(self, _: str) -> None:
        return None


def _runs(file: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns the rows of a file, if it exists, by minor version of jax and name of the run."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line, object_hook=_Fields)
        found.setdefault((_minor(row["jax"]), row["name"]), []).append(row)
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def read(run: str, folder: Path) -> dict[str, Any] | None:
    """Returns a run, such as "2_h100/0.12/psum", as `bench --json` writes it; None without rows.

    Args:
        folder: docs/measurements.
    """
    file, jax, name = run.split("/")
    rows = _runs(folder / f"{file}.jsonl").get((jax, name))
    if rows is None:
        return None
    peers = [row for row in rows if "library" in row]
    return {
        "header": _Fields((key, rows[0][key]) for key in _OF_RUN),
        "rows": [row for row in rows if "library" not in row],
        "peers": {"versions": peers[0]["libraries"] if peers else [], "rows": peers},
    }


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
            {
                key: value
                for key, value in ({"name": name} | row | header | row).items()
                if key in ("name", *row, *_OF_RUN) and key not in _DERIVED
                if value not in (None, "", [])
            }
            for row in (*result["rows"], *of_peers)
        ]
        runs, run = _runs(to), (_minor(header["jax"]), name)
        if run in runs and runs[run][0]["date"] > header["date"]:
            sys.stderr.write(f"{file}: left out, {to.name} has a run of {runs[run][0]['date']}\n")
            continue
        runs[run] = rows
        to.write_text("".join(json.dumps(row) + "\n" for rows in runs.values() for row in rows))


# Tables.


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _time(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}"


def _milliseconds(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.3f}"


def _ratio(row: dict[str, Any]) -> str:
    """Returns lax's time / ours; nothing where both columns time jax.lax."""
    if row["algorithm"] == "lax" or not row["ratio"]:
        return ""
    return f"{row['ratio']:.2f}"


def _share(row: dict[str, Any]) -> str:
    share = row.get("hidden_share")
    return "" if share is None else f"{share:.2f}"


def _runs_as(row: dict[str, Any]) -> str:
    """Returns what a call ran as, in the words of the page."""
    plans = row.get("plans") or []
    kinds = {"fused kernel" if plan["tile_columns"] else "pipeline" for plan in plans}
    if len(kinds) == 1:
        return kinds.pop()
    name = row["algorithm"]
    return "`jax.lax`" if name == "lax" else name.replace("_", "-")


def collectives(result: dict[str, Any]) -> str:
    """Returns the table of a run of the benchmark for a collective."""
    rows = result["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    in_graph = any(row["graph_time_us"] for row in rows)
    several_dtypes = len({row["dtype"] for row in rows}) > 1
    head = [*(["dtype"] if several_dtypes else []), "size"]
    for mode in modes:
        graph = ["in a graph"] if in_graph else []
        first, *others = [*graph, "from JAX", "algorithm", "`jax.lax`", "ratio"]
        head += [f"{_MODES[mode]}: {first}", *others]
    cells = []
    for dtype, size in dict.fromkeys((row["dtype"], row["size"]) for row in rows):
        line = [*([dtype] if several_dtypes else []), size_text(size)]
        for mode in modes:
            row = next(r for r in rows if (r["dtype"], r["size"], r["mode"]) == (dtype, size, mode))
            line += [_time(row["graph_time_us"])] if in_graph else []
            line += [_time(row["time_us"]), _runs_as(row), _time(row["lax_time_us"]), _ratio(row)]
        cells.append(line)
    return "Times in microseconds.\n\n" + _markdown(head, cells)


def matmuls(result: dict[str, Any]) -> str:
    """Returns the table of a run of the benchmark for a collective matmul."""
    rows = result["rows"]
    several_modes = len({row["mode"] for row in rows}) > 1
    libraries = list(dict.fromkeys(peer["library"] for peer in result["peers"]["rows"]))
    bounded = any(row["bound_us"] is not None for row in rows)
    head = [f"M {_BY} K {_BY} N", *(["mode"] if several_modes else []), "matmul alone"]
    head += ["bound", "ours", "bound / ours"] if bounded else ["ours"]
    head += ["runs as", "`jax.lax`", "ratio", *libraries]
    cells = []
    for row in rows:
        shape = f" {_BY} ".join(str(row[name]) for name in "mkn")
        line = [shape, *([_MODES[row["mode"]]] if several_modes else [])]
        line.append(_milliseconds(row["alone_time_us"]))
        line += [_milliseconds(row["bound_us"])] if bounded else []
        line.append(_milliseconds(row["time_us"]))
        line += [f"{row['share']:.2f}"] if bounded else []
        line += [_runs_as(row), _milliseconds(row["lax_time_us"]), _ratio(row)]
        for library in libraries:
            same = (p for p in result["peers"]["rows"] if all(p[k] == row[k] for k in "mkn"))
            times = [p["time_us"] for p in same if p["library"] == library]
            line.append(_milliseconds(times[0]) if times else "")
        cells.append(line)
    return "Times in milliseconds.\n\n" + _markdown(head, cells)


def programs(*results: dict[str, Any]) -> str:
    """Returns a table with a row for each program and mode.

    It shows lax with tuned flags, and the program without communication, where they were run.
    """
    head = ["program", "mode", "ours", "`jax.lax`", "ratio", "`jax.lax`, accelerated", "ratio"]
    rows = [row for result in results for row in result["rows"]]
    has_tuned = any(row.get("lax_tuned_time_us") for row in rows)
    has_none = any(row.get("none_time_us") for row in rows)
    head += ["`jax.lax`, tuned flags"] if has_tuned else []
    head += ["without communication", "hidden share"] if has_none else []
    cells = [
        [
            f"`{row['program']}`",
            _MODES[row["mode"]],
            _milliseconds(row["time_us"]),
            _milliseconds(row["lax_time_us"]),
            f"{row['ratio']:.2f}",
            _milliseconds(row["unedited_time_us"]),
            f"{row['unedited_ratio']:.2f}" if row["unedited_ratio"] else "",
            *([_milliseconds(row.get("lax_tuned_time_us"))] if has_tuned else []),
            *([_milliseconds(row.get("none_time_us")), _share(row)] if has_none else []),
        ]
        for row in rows
    ]
    return "Times in milliseconds.\n\n" + _markdown(head, cells)


def headline(result: dict[str, Any]) -> str:
    """Returns one sentence on small collectives."""
    header = result["header"]
    rows = [row for row in result["rows"] if row["size"] <= _SMALL and row["algorithm"] != "lax"]
    ours, lax = ([row[key] for row in rows] for key in ("time_us", "lax_time_us"))
    ratio = statistics.median(row["ratio"] for row in rows)
    sizes = " to ".join(size_text(pick(row["size"] for row in rows)) for pick in (min, max))
    return (
        f"Between {header['devices']} {_BY} {header['device']} a `{header['operation']}` of "
        f"{sizes} takes {min(ours):.1f} to {max(ours):.1f} µs called from JAX, and that of "
        f"`jax.lax` (jax {header['jax']}) {min(lax):.1f} to {max(lax):.1f} µs: {ratio:.2f} "
        "times as long in the median.\n"
    )


def setup(*results: dict[str, Any]) -> str:
    """Returns devices, versions, date and the command of each run."""
    header = results[0]["header"]
    dates = sorted({result["header"]["date"][:10] for result in results})
    driver = f", driver {header['driver']}" if header.get("driver") else ""
    peers = [version for result in results for version in result["peers"]["versions"]]
    versions = ", ".join([report.versions_text(header), *dict.fromkeys(peers)])
    rows = [row for result in results for row in result["rows"]]
    if "wrong" in rows[0]:
        keys = ("wrong", "lax_wrong", "graph_wrong")
        checked = f"{sum(row.get(key) or 0 for row in rows for key in keys)} wrong elements"
    else:  # whole programs
        checked = f"results differ by at most {max(row['difference'] for row in rows):.1e}"
    commands = "".join(f"    {result['header']['command']}\n" for result in results)
    return (
        f"{header['devices']} {_BY} {header['device']}{driver}, {versions}, {', '.join(dates)}; "
        f"{checked}:\n\n{commands}"
    )


def losses(*results: dict[str, Any]) -> str:
    """Returns the rows in which ours is not faster than jax.lax."""
    cells = []
    for result in results:
        name = result["header"]["operation"]
        name += " backward" if result["header"]["backward"] else ""
        for row in result["rows"]:
            if row["algorithm"] != "lax" and (row["ratio"] or _GAIN) >= _GAIN:
                continue
            if "size" in row:
                what, ours, lax = size_text(row["size"]), row["time_us"], row["lax_time_us"]
                times = [f"{ours:.2f} µs", f"{lax:.2f} µs"]
            else:
                what = f" {_BY} ".join(str(row[key]) for key in "mkn")
                times = [f"{row[key] / 1e3:.3f} ms" for key in ("time_us", "lax_time_us")]
            cells.append([name, what, _MODES[row["mode"]], _runs_as(row), *times, _ratio(row)])
    if not cells:
        return "In no row of these tables.\n"
    head = ["operation", "size or shape", "mode", "runs as", "ours", "`jax.lax`", "ratio"]
    return _markdown(head, cells)


# Figures of sentences.


def _ratios(results: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the ratios of all rows, in rising order; `jax.lax` needs no less for a smaller size.

    A call that falls back has its ratio, too. It is 1 but for noise.
    """
    found = []
    for result in results:
        least: dict[tuple[str, str], float] = {}  # of jax.lax, of this size and larger ones
        for row in sorted(result["rows"], key=lambda row: row.get("size", 0), reverse=True):
            lax = row["lax_time_us"]
            if "size" in row:
                line = row["mode"], row["dtype"]
                lax = least[line] = min(lax, least.get(line, math.inf))
            if row.get("size", 0) <= _MOST:
                found.append(lax / row["time_us"])
    return sorted(found)


def _range(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def ratios(*results: dict[str, Any]) -> str:
    """Returns the lowest and the highest ratio."""
    return _range(_ratios(results))


def lowest(*results: dict[str, Any]) -> str:
    """Returns the lowest ratio."""
    return f"{_ratios(results)[0]:.2f}"


def lowest_gain(*results: dict[str, Any]) -> str:
    """Returns the lowest ratio that is no loss."""
    return f"{next(ratio for ratio in _ratios(results) if ratio >= 1):.2f}"


def fused(*results: dict[str, Any]) -> str:
    """Returns how much longer programs take that are only accelerated."""
    rows = [row for result in results for row in result["rows"]]
    return _range([row["unedited_time_us"] / row["time_us"] for row in rows])


# Figures.


def figure(results: Sequence[dict[str, Any]], png: Path, check: bool) -> str:
    """Draws a figure unless it is that of these runs already; returns its line of Markdown.

    The PNG contains the digest of the runs, so that checking needs no matplotlib.

    Raises:
        ValueError: with `check`, the figure is missing or that of other runs.
    """
    digest = hashlib.sha256(json.dumps(results).encode()).hexdigest()
    if not png.exists() or digest.encode() not in png.read_bytes():
        if check:
            raise ValueError(f"{png.name} is not the figure of the runs")
        plots.draw(results, png, metadata={"Source": digest})
    return f"![{results[0]['header']['operation']}](figures/{png.name})\n"


# The page.

_TABLES: dict[str, Callable[..., str]] = {
    "headline": headline,
    "setup": setup,
    "collectives": collectives,
    "matmuls": matmuls,
    "programs": programs,
    "losses": losses,
}
_IN_SENTENCES: dict[str, Callable[..., str]] = {
    "ratios": ratios,
    "lowest": lowest,
    "lowest_gain": lowest_gain,
    "fused": fused,
}


def render(page: str, docs: Path, check: bool) -> str:
    """Returns the page with its tables made anew, and draws its figures.

    Args:
        page: the page's text.
        docs: the folder with `measurements` and `figures`.
        check: draw nothing.

    Raises:
        ValueError: an unknown word after "make:", a sentence of a run that was not measured, or,
            with `check`, a figure of other runs.
    """

    def make(block: re.Match[str]) -> str:
        kind, *names = block["what"].split()
        png = docs / "figures" / names.pop(0) if kind == "figure" else None
        found = {name: read(name, docs / "measurements") for name in names}
        results = [result for result in found.values() if result is not None]
        missing = [name for name, result in found.items() if result is None]
        if kind not in _TABLES | _IN_SENTENCES and png is None:
            known = ", ".join(_TABLES | _IN_SENTENCES)
            raise ValueError(f"make: {kind} is none of {known}, figure")
        if missing and kind in _IN_SENTENCES:
            raise ValueError(f"make: {kind}: docs/measurements has no {', '.join(missing)}")
        if missing:
            text = block["text"]
        elif png is not None:
            text = figure(results, png, check)
        else:
            text = (_TABLES | _IN_SENTENCES)[kind](*results)
        return f"{block['head']}{text}<!-- end -->"

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
        add(options.add, DOCS / "measurements")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for page in options.pages:
        before = page.read_text()
        try:
            after = render(before, DOCS, options.check)
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
