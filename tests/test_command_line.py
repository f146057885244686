"""The command line: which command runs, what is said of wrong ones, and broken installations."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_intranode
from jax_intranode import __main__ as command_line


def run_main(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """The exit code and the output of a command line that runs in this process."""
    try:
        code = command_line.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "--help")
    assert code == 0
    for command in command_line.COMMANDS:
        assert f"  {command.name} " in out and command.help in out
    assert run_main(capsys) == (2, out, "")


@pytest.mark.parametrize("command", command_line.COMMANDS, ids=lambda command: command.name)
def test_help_of_a_command_has_an_example(
    command: command_line.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_main(capsys, command.name, "--help")
    assert code == 0
    module = importlib.import_module(command.module)
    assert module.EXAMPLES
    for line in module.EXAMPLES.splitlines():
        assert line.startswith(f"python -m jax_intranode {command.name}"), line
        assert line in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "--version")
    assert code == 0
    assert out.startswith(f"jax_intranode {jax_intranode.__version__} (with")
    assert ", jax " in out and ", jaxlib " in out


@pytest.mark.parametrize(
    ("variable", "runs"),
    [("SLURM_LOCALID", False), ("OMPI_COMM_WORLD_LOCAL_RANK", False), ("SLURM_PROCID", True)],
)
def test_one_process_of_a_node_runs_a_command(
    variable: str, runs: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    code, _, err = run_main(capsys, "plot", "missing.json", "-o", "x.png")
    assert (code, bool(err)) == ((2, True) if runs else (0, False))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package but without its native modules."""
    directory = tmp_path_factory.mktemp("broken")
    package = Path(jax_intranode.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, directory / "jax_intranode", ignore=ignored)
    return directory


def run_in(directory: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_in_a_broken_installation(broken: Path) -> None:
    done = run_in(broken, "-m", "jax_intranode", "plot", "a.json", "-o", "b.png")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert "plot: jax_intranode cannot be used here: ImportError: " in first
    assert "info" in second


@pytest.mark.parametrize(
    "argv",
    [("-c", "import jax_intranode"), ("-m", "jax_intranode._src.launcher"), ("-m", "x", "-m")],
)
def test_broken_installation_raises(broken: Path, argv: tuple[str, ...]) -> None:
    (broken / "x.py").write_text("import jax_intranode\n")
    done = run_in(broken, *argv, "jax_intranode")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: jax_intranode is imported from")
