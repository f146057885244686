"""The command line: which command runs, what is said of wrong ones, and broken installations."""

import importlib
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import python
from tiers import full, quick

import jax_intranode
from jax_intranode import __main__ as command_line
from jax_intranode._src.selection import config

pytestmark = pytest.mark.one_version

# An editable installation finds the package by a hook that comes before PYTHONPATH.
NO_EDITABLE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


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


@pytest.mark.parametrize(
    ("variable", "runs"),
    [("SLURM_LOCALID", False), ("OMPI_COMM_WORLD_LOCAL_RANK", False), ("SLURM_PROCID", True)],
)
def test_one_process_of_a_node_runs_a_command(
    variable: str, runs: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    code, _, err = run_main(capsys, "bench", "psum", "--platform", "cpu", "-b", "1", "-e", "1")
    assert (code, bool(err)) == ((2, True) if runs else (0, False))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package but without its native modules."""
    directory = tmp_path_factory.mktemp("broken")
    package = Path(jax_intranode.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, directory / "jax_intranode", ignore=ignored)
    (directory / "sitecustomize.py").write_text(NO_EDITABLE)
    return directory


def run_in(directory: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(directory), **environ}
    return python(*argv, cwd=directory, stderr=subprocess.PIPE, **environ)


def test_command_in_a_broken_installation(broken: Path) -> None:
    done = run_in(broken, "-m", "jax_intranode", "bench", "psum")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert "bench: jax_intranode cannot be used here: ImportError: " in first
    assert "info" in second


def test_a_program_in_a_broken_installation(broken: Path, tmp_path: Path) -> None:
    """It runs until it imports JAX. A program that can do without JAX does not go on without."""
    program = tmp_path / "program.py"
    program.write_text("print('begins')\nif 'a' in __import__('sys').argv:\n    import jax\n")
    done = run_in(broken, "-m", "jax_intranode", "run", str(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "begins\n", "")
    text = program.read_text().replace("    import jax\n", "    try:\n        import jax\n")
    program.write_text(f"{text}    except ImportError:\n        pass\n")
    done = run_in(broken, "-m", "jax_intranode", "run", str(program), "a")
    assert (done.returncode, done.stdout) == (1, "begins\n")
    first, second = done.stderr.splitlines()
    assert "jax_intranode cannot be used here: ImportError: " in first and "info" in second


@pytest.mark.parametrize(
    "argv",
    [
        ("-c", "import jax_intranode"),
        full(("-m", "jax_intranode._src.command_line.launcher")),
        full(("-m", "x", "-m")),
    ],
)
def test_broken_installation_raises(broken: Path, argv: tuple[str, ...]) -> None:
    (broken / "x.py").write_text("import jax_intranode\n")
    done = run_in(broken, *argv, "jax_intranode")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: jax_intranode is imported from")


# info


def info_of(directory: Path, *argv: str, **environ: str) -> dict[str, Any]:
    """What `info --json` prints in a directory with a broken installation."""
    done = run_in(directory, *argv, "-m", "jax_intranode", "info", "--json", **environ)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_info_starts_no_backend(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom jax_intranode import __main__\nassert __main__.main(['info']) == 0\n"
        "from jax._src import xla_bridge\nassert not xla_bridge._backends\n"
    )
    done = run_in(Path(jax_intranode.__file__).parent.parent, "-c", code)
    assert done.returncode == 0, done.stderr


def test_info_points_out_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_INTRANODE_TIMEOUTS", "5")
    monkeypatch.setenv("JAX_INTRANODE_ALGORITHM", "twoshot")
    monkeypatch.setenv("JAX_INTRANODE_SLAB_MIB", "16")
    _, out, _ = run_main(capsys, "info", "--json")
    found = json.loads(out)
    misspelt, wrong = sorted(found["problems"], key=lambda text: "ALGORITHM" in text)[-2:]
    assert "Did you mean JAX_INTRANODE_TIMEOUT_S?" in misspelt
    assert wrong.startswith("environment: JAX_INTRANODE_ALGORITHM='twoshot': use one of auto")
    rows = {row["name"]: row for row in found["environment"]}
    assert rows["JAX_INTRANODE_SLAB_MIB"]["value"] == "16"
    assert rows["JAX_INTRANODE_STRICT"]["value"] is None
    _, out, _ = run_main(capsys, "info")
    assert "JAX_INTRANODE_SLAB_MIB=16" in out and "JAX_INTRANODE_STRICT (0)" in out


def test_reports_and_messages_leave_out_the_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may still run when somebody shows them."""
    monkeypatch.setenv(config.SECRET, "0123abcd")
    for words in (["info"], ["info", "--json"]):
        code, out, err = run_main(capsys, *words)
        assert code == 0 and "0123abcd" not in out + err
        assert config.SECRET in out
    with pytest.raises(ValueError, match=r"JAX_INTRANODE_SECRET=\.\.\.: use a word of hexadecimal"):
        config.check({config.SECRET: "not hexadecimal"})


BREAKS = {
    "no native module": ({}, "native modules are not built", "CPU part: not built"),
    "a native module of another system": (
        {"jax_intranode/_host.abi3.so": "text"},
        "_host.abi3.so: ",
        "CPU part: it cannot be loaded: ImportError: ",
    ),
    "no jax": (
        {"jax/__init__.py": "raise ImportError(\"No module named 'jax'\")"},
        "ImportError: No module named 'jax'",
        "",
    ),
    "no jaxlib": (
        {"sitecustomize.py": f"{NO_EDITABLE}sys.modules['jaxlib'] = None"},
        "",
        "jaxlib: ",
    ),
    "an old jaxlib": (
        {
            "jaxlib/__init__.py": "",
            "jaxlib/include/xla/ffi/api/c_api.h": "#define XLA_FFI_API_MAJOR 0\n"
            "#define XLA_FFI_API_MINOR 0",
        },
        "`import jax_intranode` fails",
        "CPU part: ",
    ),
    "no pynvml": ({"pynvml.py": "raise ImportError('gone')"}, "", ""),
    "a broken file": ({"jax_intranode/_src/group/communicator.py": "def"}, "SyntaxError: ", ""),
}


QUICK_BREAKS = ("a native module of another system", "an old jaxlib")


@pytest.mark.parametrize("what", quick(BREAKS, QUICK_BREAKS))
def test_info_of_a_broken_installation(what: str, broken: Path, tmp_path: Path) -> None:
    files, first, second = BREAKS[what]
    shutil.copytree(broken, tmp_path, dirs_exist_ok=True)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = info_of(tmp_path)
    assert any(first in problem for problem in found["problems"]), found["problems"]
    assert any(problem.startswith(second) for problem in found["problems"]), found["problems"]
    if what == "no pynvml":
        assert "pip install nvidia-ml-py" in found["driver"]["reason"]


def test_info_and_version_import_nothing_that_may_be_missing(broken: Path) -> None:
    for name in ("jax", "jaxlib", "numpy", "pynvml"):
        (broken / f"{name}.py").write_text("raise ImportError(__name__)")
    try:
        assert len(info_of(broken)["problems"]) >= 2
        done = run_in(broken, "-m", "jax_intranode", "--version")
        assert done.returncode == 0 and "jax_intranode" in done.stdout
    finally:
        for name in ("jax", "jaxlib", "numpy", "pynvml"):
            (broken / f"{name}.py").unlink()
