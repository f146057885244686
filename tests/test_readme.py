"""The programs that README.md and the pages in docs print run as they are printed."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from devices import need_devices
from processes import python

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted(ROOT.glob("docs/*.md")))

pytestmark = pytest.mark.skipif(not README.exists(), reason="the README is not here")


def programs() -> dict[str, str]:
    """The text of each Python block whose first line is a comment with the name of a file."""
    pages = [page.read_text() for page in PAGES if page.exists()]
    found = [re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", page, re.M | re.S) for page in pages]
    return {block.split()[1]: block for blocks in found for block in blocks}


PROGRAMS = programs()
OF_PROCESSES = [name for name, text in PROGRAMS.items() if "jax.distributed.initialize" in text]


def need_modules(program: str) -> None:
    """Skips the test if the program imports a package that is not installed here."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            continue
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                pytest.skip(f"{name} is not installed")


def test_both_kinds_of_programs_are_there() -> None:
    assert 0 < len(OF_PROCESSES) < len(PROGRAMS), list(PROGRAMS)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OF_PROCESSES])
def test_one_process(name: str, tmp_path: Path) -> None:
    need_devices(2)
    need_modules(PROGRAMS[name])
    (tmp_path / name).write_text(PROGRAMS[name])
    done = python(name, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout, done.stdout


@pytest.mark.parametrize("name", OF_PROCESSES)
def test_process_per_device(name: str, tmp_path: Path) -> None:
    need_devices(2)
    (tmp_path / name).write_text(PROGRAMS[name])
    pages = "".join(page.read_text() for page in PAGES if page.exists())
    command = re.search(rf"^    (python -m jax_intranode launch -n 2 (?:.* )?{name})$", pages, re.M)
    assert command, name
    done = python(*command[1].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert re.search(rf"^\[{rank}\] rank {rank} has .*: 1\.0$", done.stdout, re.M), done.stdout
