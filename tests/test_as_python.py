"""Scripts see under `run` and `launch` what they see under Python alone, from begin to end."""

import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import jax_intranode

WAYS = {
    "run": ("-m", "jax_intranode", "run"),
    "launch": ("-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "1"),
}
SHOW = """
    import sys
    print(__name__, __file__, __package__, __cached__, type(__loader__), __spec__ and __spec__.name)
    print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
    print(sys.argv, sys.path[0])
    """

Output = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """Runs Python: output(arguments) -> exit code, lines of stdout and stderr without prefixes."""

    def run(*arguments: str, **env: str) -> tuple[int, list[str], list[str]]:
        root = str(Path(jax_intranode.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (env.pop("PYTHONPATH", ""), root)))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=100,
        )
        lines = [
            [line.removeprefix("[0] ") for line in text.splitlines() if line[:7] != "launch:"]
            for text in (done.stdout, done.stderr)
        ]
        return done.returncode, lines[0], lines[1]

    return run


def write(path: Path, *parts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(textwrap.dedent, parts)))


def crossed(of_run: str, of_launch: str, *others: str) -> pytest.MarkDecorator:
    """Each value in both ways; the quick tier takes one value, with `launch`."""
    cases = [(way, value) for value in (of_run, of_launch, *others) for way in WAYS]
    quick = (("launch", of_launch),)
    marks = [() if case in quick else pytest.mark.full for case in cases]
    return pytest.mark.parametrize(
        ("way", "value"), [pytest.param(*c, marks=m) for c, m in zip(cases, marks, strict=True)]
    )


@crossed(
    "folder/../script.py a", "-m package.module a", "folder a", "archive.zip a", "script.pyc a"
)
def test_names_arguments_and_path(output: Output, tmp_path: Path, way: str, value: str) -> None:
    what = value.split()
    for name in ("script.py", "folder/__main__.py", "package/module.py"):
        write(tmp_path / name, SHOW)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "script.py", "__main__.py")
    compiled = "import py_compile; py_compile.compile('script.py', 'script.pyc')"
    assert output("-c", compiled)[0] == 0
    assert output(*WAYS[way], *what)[:2] == output(*what)[:2]


@crossed("-P", "PYTHONSAFEPATH")
def test_a_safe_path_stays_safe(output: Output, tmp_path: Path, way: str, value: str) -> None:
    """Neither is the script's folder searched, nor is the user's first entry lost."""
    write(tmp_path / "script.py", "import helper\nprint(helper.__file__)")
    write(tmp_path / "helper.py")
    write(tmp_path / "users" / "helper.py")
    flags = ["-P"] if value == "-P" else []
    env = {"PYTHONPATH": str(tmp_path / "users")}
    if not flags:
        env[value] = "1"
    expected = [str(tmp_path / "users" / "helper.py")]
    assert output(*flags, *WAYS[way], "script.py", **env)[:2] == (0, expected)


@pytest.mark.parametrize("way", WAYS)
def test_main_is_there_until_exit_handlers_and_threads_have_ended(
    output: Output, tmp_path: Path, way: str
) -> None:
    write(
        tmp_path / "script.py",
        """
        import atexit, pickle, threading, time
        class State:
            pass
        def save(where):
            print(where, type(pickle.loads(pickle.dumps(State()))) is State, flush=True)
        def save_later():
            time.sleep(0.5)
            save("thread")
        atexit.register(save, "at exit")
        threading.Thread(target=save_later).start()
        """,
    )
    code, out, err = output(*WAYS[way], "script.py")
    assert (code, out) == (0, ["thread True", "at exit True"]), err


@crossed("own", "usual")
def test_an_exception_is_shown_and_kept_as_by_python(
    output: Output, tmp_path: Path, way: str, value: str
) -> None:
    write(
        tmp_path / "script.py",
        f"""
        import atexit, sys, traceback
        def own(kind, error, trace):
            print("own", kind, error, [frame.name for frame in traceback.extract_tb(trace)])
        if {value == "own"}:
            sys.excepthook = own
        atexit.register(lambda: print(repr(sys.last_value), sys.excepthook is own))
        def broken():
            raise ValueError("it broke")
        broken()
        """,
    )
    code, out, err = output(*WAYS[way], "script.py")
    plain = output("script.py")
    assert (code, out) == plain[:2]
    assert err[: len(plain[2])] == plain[2]  # `launch` adds the report


def test_launch_passes_on_options_of_the_interpreter(output: Output, tmp_path: Path) -> None:
    write(
        tmp_path / "script.py",
        "import sys\nprint(sys.flags.bytes_warning, sys.flags.dev_mode, sys.warnoptions)",
    )
    options = ("-b", "-X", "dev", "-W", "error::FutureWarning")
    assert output(*options, *WAYS["launch"], "script.py")[:2] == output(*options, "script.py")[:2]


@pytest.mark.parametrize("way", ["SCRIPT", pytest.param("run SCRIPT", marks=pytest.mark.full)])
def test_a_script_that_executes_itself_again_is_still_a_rank(
    output: Output, tmp_path: Path, way: str
) -> None:
    write(
        tmp_path / "script.py",
        """
        import os, sys
        if "AGAIN" not in os.environ:
            child = os.fork()
            if not child:  # is a program of its own
                os.execv(sys.executable, [sys.executable, "-c", "print('child')"])
            os.waitpid(child, 0)
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, "-X", "dev", *sys.argv])
        import jax
        jax.devices()
        print(jax.process_index(), jax.process_count(), sys.argv, sys.flags.dev_mode)
        """,
    )
    words = (word if word == "run" else "script.py" for word in way.split())
    command = (*WAYS["launch"][:-1], "2")
    code, out, err = output(*command, *words, "a")
    assert code == 0, err
    lines = sorted(line for line in out if "Gloo" not in line)
    assert lines == [
        "0 2 ['script.py', 'a'] True",
        "[1] 1 2 ['script.py', 'a'] True",
        "[1] child",
        "child",
    ]
