"""Makes the tables of docs/environment.md from jax_intranode/_src/selection/config.py.

    python tools/environment_page.py [--check]

A table stands between <!-- make: READER --> and <!-- end -->, where READER is what reads the
variables. With --check the program writes nothing, and exits with 1 if a table is not up to date.
"""

import argparse
import re
import sys
from pathlib import Path

from jax_intranode._src.selection import config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "environment.md"


def table(reader: str) -> str:
    """The table of the variables that `reader` reads."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for variable in config.VARIABLES:
        if variable.reader == reader:
            cells = (f"`{variable.name}`", variable.values, variable.default, variable.meaning)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def made(page: str) -> str:
    """The page with its tables made again."""
    return re.sub(
        r"^(<!-- make: (\w+) -->\n).*?\n?(<!-- end -->)$",
        lambda block: f"{block[1]}\n{table(block[2])}\n\n{block[3]}",
        page,
        flags=re.MULTILINE | re.DOTALL,
    )


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    if arguments.check:
        return int(made(page) != page)
    PAGE.write_text(made(page))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
