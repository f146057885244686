"""The command line: which command runs, what is said of wrong ones, and broken installations."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
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
    path = list(sys.path)
    try:
        code = command_line.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.path[:] = path
        jax_intranode.uninstall()
    return code, *capsys.readouterr()


def test_help_lists_all_commands_and_has_an_example_of_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run_main(capsys, "--help")
    assert code == 0
    assert run_main(capsys) == (2, out, "")
    for command in command_line.COMMANDS:
        assert f"  {command.name} " in out and command.help in out
        code, of_command, _ = run_main(capsys, command.name, "--help")
        assert code == 0
        for line in importlib.import_module(command.module).EXAMPLES.splitlines():
            assert line.startswith(f"python -m jax_intranode {command.name}"), line
            assert line in of_command


# Wrong command lines, and what the message has: the command or option, the value, the remedy.
# There is a file "text".
WRONG: dict[str, tuple[str, str, str]] = {
    "benhc psum": ("no command", "'benhc'", "did you mean bench?"),
    "bench": ("bench", "NAME", "--help"),
    "bench psum -b 16K -e 1K": ("--minbytes 16K", "1K", "choose a smaller -b"),
    "bench psum -d float12": ("--datatype", "'float12'", "none of bfloat16"),
    "bench psum --devices 64": ("bench: psum", "8 ranks, not 64", "choose --devices 8 or less"),
    "bench all_gather_matmul --shapes 1,2": ("--shapes", "'1,2'", "three positive integers"),
    "bench all_gather_matmul --plan x=1": ("--plan", "'x'", "it has first_pieces"),
    "bench all_gather_matmul --shapes 7,8,9": ("7 x 8 x 9", "M is 7", "multiple of the 2"),
    "bench matmul_all_reduce --devices 3 --preset llama-8b": (
        *("preset llama-8b", "3 devices can't share 4096 columns", "choose --devices"),
    ),
    "bench psum --platform gpu": ("--platform gpu", "no GPU", "check CUDA_VISIBLE_DEVICES"),
    "bench psum --json /no/such/a.json": ("--json", "/no/such/a.json", "make it, or choose"),
    "demo --platform gpu": ("--platform gpu", "0 are visible", "check CUDA_VISIBLE_DEVICES"),
    "run": ("run", "SCRIPT", "--help"),
    "run missing.py": ("run", "missing.py", "name a script"),
    "run --comapre text": ("run", "--comapre", "Did you mean --compare?"),
    "run --steps 10 text": ("--steps", "10", "those of the script stand behind its name"),
    "launch --platfrom cpu -n 2 text": ("launch", "--platfrom", "Did you mean --platform?"),
    "launch -n 2 --platform cpu run --comapre text": (
        *("launch", "--comapre", "Did you mean --compare?"),
    ),
    "launch -n 2 --log-dir /dev/null/logs text": ("--log-dir", "/dev/null/logs", "Not a directory"),
    "launch text": ("launch", "", "say how many processes to start: -n 2"),
    "launch -n 2 --platform gpu text": ("launch", "no GPU that JAX would see", "check CUDA"),
    "launch --restarts -1 train.py": ("--restarts", "'-1'", "use an integer of at least 0"),
    "launch -n 2 --platform cpu run --steps 3 text": ("--steps", "'3'", "integer of at least 9"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_command_line(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "gpu" in line and jax.devices()[0].platform == "gpu":
        pytest.skip("there are GPUs here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no JSON")
    code, out, err = run_main(capsys, *line.split())
    assert (code, out) == (2, "")
    (message,) = err.splitlines()  # one line, and no traceback
    assert message.startswith("python -m jax_intranode")
    assert not [text for text in WRONG[line] if text not in message], message


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


# `info`.


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
    rows = {row["name"]: row["value"] for row in found["environment"]}
    assert (rows["JAX_INTRANODE_SLAB_MIB"], rows["JAX_INTRANODE_STRICT"]) == ("16", None)
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


# Broken installations.


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package, without its native modules, and with two programs."""
    directory = tmp_path_factory.mktemp("broken")
    package = Path(jax_intranode.__file__).parent
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, directory / "jax_intranode", ignore=ignored)
    (directory / "sitecustomize.py").write_text(NO_EDITABLE)
    (directory / "x.py").write_text("import jax_intranode")
    (directory / "program.py").write_text(PROGRAM)
    return directory


def run_in(directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return python(*argv, cwd=directory, stderr=subprocess.PIPE, PYTHONPATH=str(directory))


# It can do without JAX, but does not go on if its collectives are not accelerated.
PROGRAM = """print("begins")
if "jax" in __import__("sys").argv:
    try:
        import jax
    except ImportError:
        pass
"""
CANNOT = ".*: jax_intranode cannot be used here: ImportError: .*\n.*info.*\n"
RAISED = "Traceback[^~]*\nImportError: .* imported from its source tree.* Run `pip install .`.*\n"
# Arguments of Python, the exit code, stdout, and a pattern of stderr.
IN_A_BROKEN_INSTALLATION = [
    ("-m jax_intranode bench psum", 1, "", CANNOT),
    ("-m jax_intranode run program.py", 0, "begins\n", ""),
    ("-m jax_intranode run program.py jax", 1, "begins\n", CANNOT),
    ("-c import\tjax_intranode", 1, "", RAISED),
    full("-m jax_intranode._src.command_line.launcher jax_intranode", 1, "", RAISED),
    full("-m x -m jax_intranode", 1, "", RAISED),
]


@pytest.mark.parametrize(("line", "code", "out", "err"), IN_A_BROKEN_INSTALLATION)
def test_broken_installation(broken: Path, line: str, code: int, out: str, err: str) -> None:
    done = run_in(broken, *line.split(" "))
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert re.fullmatch(err, done.stderr), done.stderr


OLD_FFI = "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 0"
# Files of a broken installation, and texts of two problems that `info` finds.
BREAKS = {
    "a native module of another system": (
        {"jax_intranode/_host.abi3.so": "text"},
        *("_host.abi3.so: ", "CPU part: it cannot be loaded: ImportError: "),
    ),
    "no package of others": (
        dict.fromkeys(("jax.py", "jaxlib.py", "numpy.py", "pynvml.py"), "raise ImportError('no')"),
        "ImportError: no",
        "CPU part: not built",
    ),
    "no jaxlib": (
        {"sitecustomize.py": f"{NO_EDITABLE}sys.modules['jaxlib'] = None"},
        *("", "jaxlib: "),
    ),
    "an old jaxlib": (
        {"jaxlib/__init__.py": "", "jaxlib/include/xla/ffi/api/c_api.h": OLD_FFI},
        *("`import jax_intranode` fails", "CPU part: "),
    ),
    "a broken file": ({"jax_intranode/_src/group/communicator.py": "def"}, "SyntaxError: ", ""),
}
QUICK_BREAKS = ("a native module of another system", "no package of others", "an old jaxlib")


@pytest.mark.parametrize("what", quick(BREAKS, QUICK_BREAKS))
def test_info_of_a_broken_installation(what: str, broken: Path, tmp_path: Path) -> None:
    files, first, second = BREAKS[what]
    shutil.copytree(broken, tmp_path, dirs_exist_ok=True)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run_in(tmp_path, "-m", "jax_intranode", "info", "--json")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert any(first in problem for problem in found["problems"]), found["problems"]
    assert any(problem.startswith(second) for problem in found["problems"]), found["problems"]
    if what == "no package of others":
        assert "pip install nvidia-ml-py" in found["driver"]["reason"]
        done = run_in(tmp_path, "-m", "jax_intranode", "--version")
        assert done.returncode == 0 and "jax_intranode" in done.stdout


def test_info_starts_no_backend() -> None:
    code = (
        "from jax_intranode import __main__\nassert __main__.main(['info']) == 0\n"
        "from jax._src import xla_bridge\nassert not xla_bridge._backends\n"
    )
    done = run_in(Path(jax_intranode.__file__).parent.parent, "-c", code)
    assert done.returncode == 0, done.stderr
