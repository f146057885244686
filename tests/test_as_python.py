"""Scripts see under `run` and `launch` what they see under Python alone, from begin to end."""

import os
import py_compile
import subprocess
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python
from tiers import full

import jax_intranode

WAYS = {
    "run": ("-m", "jax_intranode", "run"),
    "launch": ("-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "1"),
}
# Ends with an exception, whose traceback is shown by Python's hook, or by one of the script.
SHOW = """
    import sys
    print(__name__, __file__, __package__, __cached__, type(__loader__), __spec__ and __spec__.name)
    print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
    import atexit, traceback, helper
    print(sys.argv, sys.path[0], helper.__file__)
    print(sys.flags.bytes_warning, sys.flags.dev_mode, sys.warnoptions)
    def own(kind, error, trace):
        print("own", kind, error, [frame.name for frame in traceback.extract_tb(trace)])
    if "own" in sys.argv:
        sys.excepthook = own
    atexit.register(lambda: print(repr(sys.last_value), sys.excepthook is own))
    def broken():
        raise ValueError("it broke")
    broken()
    """

Output = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """Runs Python: output(arguments) -> exit code, lines of stdout and stderr without prefixes."""

    def run(*arguments: str, **env: str) -> tuple[int, list[str], list[str]]:
        root = str(Path(jax_intranode.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (env.pop("PYTHONPATH", ""), root)))
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        done = python(*arguments, cwd=tmp_path, stderr=subprocess.PIPE, **env)
        lines = [
            [line.removeprefix("[0] ") for line in text.splitlines() if line[:7] != "launch:"]
            for text in (done.stdout, done.stderr)
        ]
        return done.returncode, lines[0], lines[1]

    return run


def write(path: Path, *parts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(textwrap.dedent, parts)))


@pytest.mark.parametrize(
    ("way", "what", "flags"),
    [
        pytest.param(way, what, flags, marks=[pytest.mark.full] * (way == "run" or k > 1))
        for k, (what, flags) in enumerate(
            [
                ("-m package.module a", "-b -X dev -W error::FutureWarning"),
                ("script.py own", "PYTHONSAFEPATH"),
                ("script.py own", "-P"),
                *((what, "") for what in ("folder/../script.py a", "folder a", "archive.zip a")),
                ("script.pyc a", ""),
            ]
        )
        for way in WAYS
    ],
)
def test_a_script_sees_what_it_sees_under_python(
    output: Output, tmp_path: Path, way: str, what: str, flags: str
) -> None:
    """Its names, arguments and path, options of the interpreter, and how its exception is shown.

    With a safe path its folder is not searched, and the user's first entry is not lost.
    """
    for name in ("script.py", "folder/__main__.py", "package/module.py"):
        write(tmp_path / name, SHOW)
    for name in ("helper.py", "users/helper.py"):
        write(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "script.py", "__main__.py")
    py_compile.compile(tmp_path / "script.py", tmp_path / "script.pyc")
    env = {"PYTHONPATH": str(tmp_path / "users")}
    env |= {flags: "1"} if flags == "PYTHONSAFEPATH" else {}
    options = [] if flags == "PYTHONSAFEPATH" else flags.split()
    plain = output(*options, *what.split(), **env)
    code, out, err = output(*options, *WAYS[way], *what.split(), **env)
    assert code == 1 and len(out) > 4, err
    assert (code, out) == plain[:2]
    shown = [line for line in plain[2] if "<frozen runpy>" not in line]
    assert err[: len(shown)] == shown  # `launch` adds the report
    if "own" in what:
        assert out[2].endswith("users/helper.py"), out


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


@pytest.mark.parametrize("way", ["SCRIPT", full("run SCRIPT")])
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
