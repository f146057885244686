"""Times two installed copies of the package against each other, by `bench` in turns.

    python tools/compare_versions.py BEFORE_SITE AFTER_SITE -- psum -b 1K -e 4M --devices 2

Each SITE is a folder that contains `jax_intranode` with its native modules, as `pip install
--target SITE --no-deps .` makes it. Each round runs `bench` of both versions with the options after
`--`, in the order before, after, after, before, so that a drift affects both alike.

The table has, for each row of `bench`, the median time of both versions and the ratio after /
before: of the times, and of the times divided by those of `jax.lax` in the same run, which takes
out the clocks of the GPUs. The noise is half the interquartile range of that second ratio over the
rounds. Both versions need a `bench` that writes the same JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A row of `bench`: mode, dtype, and the size or the shape.
Key = tuple[Any, ...]
# Of each round, our time and lax's.
Times = dict[Key, list[tuple[float, float]]]


def key_of(row: dict[str, Any]) -> Key:
    """What identifies a row."""
    names = ("mode", "program", "operation", "dtype", "size", "m", "k", "n", "backward")
    return tuple(row[name] for name in names if name in row)


def measure(site: Path, options: list[str], directory: Path) -> dict[Key, tuple[float, float]]:
    """Runs `bench` of a version; returns our time and lax's of each row."""
    file = directory / "rows.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "jax_intranode", "bench", *options, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=directory,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = json.loads(file.read_text())["rows"]
    return {key_of(row): (row["time_us"], row["lax_time_us"]) for row in rows}


def figures(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[float]:
    """The cells of a line: two medians, two ratios, the noise of the second one."""
    medians = [statistics.median(us for us, _ in times) for times in (before, after)]
    shares = [[us / lax for us, lax in times] for times in (before, after)]
    of_rounds = sorted(b / a for a, b in zip(*shares, strict=True) if a)
    quarter = len(of_rounds) // 4
    by_lax = statistics.median(of_rounds) if of_rounds else float("nan")
    noise = (of_rounds[-1 - quarter] - of_rounds[quarter]) / 2 if of_rounds else float("nan")
    return [*medians, medians[1] / medians[0] if medians[0] else float("nan"), by_lax, noise]


def table(before: Times, after: Times) -> str:
    """The table; a row that changed by more than 2 % and the noise is marked."""
    lines = [f"# {'before (us)':>11} {'after (us)':>11} {'ratio':>7} {'by lax':>7} {'noise':>6}"]
    for key, times in before.items():
        us, later_us, ratio, by_lax, noise = figures(times, after[key])
        changed = min(abs(ratio - 1), abs(by_lax - 1)) > max(0.02, noise)
        mark = "" if not changed else " SLOWER" if by_lax > 1 else " faster"
        cells = f"{us:13.2f} {later_us:11.2f} {ratio:7.3f} {by_lax:7.3f} {noise:6.3f}"
        lines.append(f"{cells}  {' '.join(map(str, key))}{mark}")
    return "\n".join(lines)


def main() -> int:
    """Measures in rounds, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="BEFORE_SITE")
    parser.add_argument("after", type=Path, metavar="AFTER_SITE")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each version (default 5)")
    parser.add_argument("options", nargs="+", metavar="...", help="the options of `bench`")
    options = parser.parse_args()
    sites = [options.before.resolve(), options.after.resolve()]
    for site in sites:
        if not (site / "jax_intranode" / "__init__.py").is_file():
            parser.error(f"{site} contains no jax_intranode")
    found: list[Times] = [{}, {}]
    for number in range(options.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            with tempfile.TemporaryDirectory() as directory:
                for key, times in measure(sites[which], options.options, Path(directory)).items():
                    found[which].setdefault(key, []).append(times)
    print(table(*found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
