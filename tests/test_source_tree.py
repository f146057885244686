"""What commands have in the source tree only: an installed package says where to find it."""

import sys
from pathlib import Path

import pytest
from processes import python

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line import source_tree


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("bench psum --peers all", "bench_peers"),
        ("bench psum --platform cpu --plot x.png", "bench_plots"),
        ("bench mlp_block", "bench_programs"),
        ("demo --platform cpu --png x.png", "bench_plots"),
        ("plot rows.json -o x.png", "bench_plots"),
    ],
)
def test_without_the_source_tree(
    line: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(source_tree, "_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        code = command_line.main(line.split())
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"needs {package} in the folder tools, which only the source tree has: run" in message


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with a folder tools, of which a module ends the process with status 3."""
    package = tmp_path / "clone" / "tools" / "bench_plots"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit(3)")
    return tmp_path / "clone"


@pytest.mark.parametrize(("flags", "code"), [([], 3), (["-P"], 2)])
def test_the_current_directory_is_searched_where_python_imports_from_it(
    flags: list[str], code: int, clone: Path
) -> None:
    program = (
        "import pathlib, sys\n"
        "from jax_intranode import __main__ as command_line\n"
        "from jax_intranode._src.command_line import source_tree\n"
        f"source_tree._ROOT = pathlib.Path({str(clone.parent)!r})\n"
        "sys.exit(command_line.main(['plot', 'rows.json', '-o', 'x.png']))\n"
    )
    done = python(*flags, "-c", program, cwd=clone, PYTHONPATH="", PYTHONSAFEPATH="")
    assert done.returncode == code, done.stdout
    assert ("needs bench_plots in the folder tools" in done.stdout) == (code == 2)


def test_the_installed_package_finds_the_tools_of_a_clone(clone: Path) -> None:
    program = (
        "import pathlib\n"
        "import jax_intranode\n"
        "from jax_intranode import __main__ as command_line\n"
        "installed = pathlib.Path(jax_intranode.__file__).parent\n"
        "command_line._run_installed(installed, command_line._find('plot'), ['plot'])\n"
    )
    done = python("-c", program, cwd=clone, PYTHONPATH="", PYTHONSAFEPATH="")
    assert done.returncode == 3, done.stdout
