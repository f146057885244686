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

import jax_intranode

WAYS = {
    "run": ("-m", "jax_intranode", "run"),
    "launch": ("-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "1"),
}
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


# What programs see before and after they import JAX.
IS_ACCELERATED = """
import sys
mode = sys.modules.get("jax_intranode._src.rewrite.mode")
print(mode is not None, bool(mode and mode.enabled.value), file=sys.stderr)
"""
PROGRAMS = {
    # How its exception is shown: by Python's hook, or by one of the script.
    "names": """
        import sys
        print(__name__, __file__, __package__, __cached__, type(__loader__))
        print(__spec__ and __spec__.name, sys.orig_argv[0], sys.orig_argv[-1], sys.executable)
        print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
        import atexit, traceback, helper
        print(sys.argv, sys.path[0], helper.__file__)
        print(sys.flags.bytes_warning, sys.flags.dev_mode, sys.warnoptions, sys._xoptions.get("of"))
        def own(kind, error, trace):
            print("own", kind, error, [frame.name for frame in traceback.extract_tb(trace)])
        if "own" in sys.argv:
            sys.excepthook = own
        atexit.register(lambda: print(repr(sys.last_value), sys.excepthook is own))
        def broken():
            raise ValueError("it broke")
        broken()
        """,
    "modules and variables": """
        import sys
        tops = {name.partition(".")[0] for name in sys.modules}
        print(sorted(tops - sys.stdlib_module_names), "logging" in sys.modules)
        import os
        of_launch = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "JAX_NUM_CPU_DEVICES")
        print([(k, v) for k, v in sorted(os.environ.items())
               if k not in of_launch and not k.startswith("JAX_INTRANODE_")])
        """,
    "variables of JAX": """
        import os
        os.environ.update(JAX_ENABLE_X64="1", JAX_NUM_CPU_DEVICES="4", JAX_LOG_COMPILES="0")
        os.environ.update(JAX_DEFAULT_MATMUL_PRECISION="float32", JAX_PLATFORMS="cpu")
        import jax, jax.numpy as jnp
        print(jnp.ones(3).dtype, jax.device_count(), jax.config.jax_default_matmul_precision)
        """,
    "an import that fails first": """
        import os, sys, traceback
        from pathlib import Path
        for kind in ("ImportError", "ValueError"):
            Path(kind, "jax").mkdir(parents=True, exist_ok=True)
            Path(kind, "jax", "__init__.py").write_text(f"raise {kind}('it broke')")
            sys.path.insert(0, kind)
            try:
                import jax
            except Exception:
                traceback.print_exc(file=sys.stdout)
            print("jax" in sys.modules)
            del sys.path[0]
        import jax
        print(jax.device_count())
        """,
    "children": """
        import multiprocessing, sys
        class State:
            def __eq__(self, other):
                return type(self) is type(other)
        def work(state):
            import os, sys
            print("jax" in sys.modules, "jax_intranode" in sys.modules, __name__, sys.argv)
            print(type(state).__module__)
            import jax
            return state, jax.numpy.ones(3).sum().item()
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(work, [State()]) == [(State(), 3.0)])
            import jax
            print(jax.device_count())
        """,
    "the order of exit handlers": """
        import atexit, sys, threading, weakref
        class Last:
            pass
        last = Last()
        weakref.finalize(last, print, "finalizer")
        atexit.register(print, "first")
        import jax
        atexit.register(print, "second")
        threading.Thread(target=lambda: print("a thread")).start()
        print(jax.device_count(), flush=True)
        sys.exit(7)
        """,
    "an exception": """
        import atexit, sys, traceback
        def last():
            print([frame.name for frame in traceback.extract_tb(sys.last_traceback)])
            print([frame.name for frame in traceback.extract_tb(sys.last_value.__traceback__)])
        atexit.register(last)
        def inner():
            raise KeyError("inner")
        try:
            inner()
        except KeyError as error:
            raise BrokenPipeError("outer") from error
        """,
    "an interrupt": """
        import os, signal, time
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        """,
}
FAILING = {"names": 1, "an exception": 1, "the order of exit handlers": 7, "an interrupt": -2}
# Each command and way: the flags of Python, or a variable; those after the first two are `full`.
COMMANDS = [
    ("-m package.module -- a", "-b -X dev -X of=ours -W error::FutureWarning"),
    ("script.py own", "PYTHONSAFEPATH"),
    ("script.py own", "-P"),
    *((words, "") for words in ("folder/../script.py a", "folder a", "archive.zip a")),
    ("script.pyc a", ""),
]
CASES = [
    pytest.param(way, "names", *command, marks=[pytest.mark.full] * (way == "run" or k > 1))
    for k, command in enumerate(COMMANDS)
    for way in ("run", "launch")
] + [
    pytest.param(way, what, "script.py a --b", "", marks=[pytest.mark.full] * (not is_quick))
    for way in ("run", "launch", "launch run")
    for what in PROGRAMS
    if what != "names"
    for is_quick in [way == "run" and what in ("modules and variables", "variables of JAX")]
]


@pytest.mark.parametrize(("way", "what", "command", "flags"), CASES)
def test_a_program_sees_what_it_sees_alone(
    output: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    what: str,
    command: str,
    flags: str,
) -> None:
    """Nothing of JAX is there before it imports JAX, and then it is accelerated.

    It has the names, arguments, path and options of the interpreter that it has under Python. With
    a safe path its folder is not searched, and the user's first entry is not lost.
    """
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"):  # which JAX of this process has set
        monkeypatch.delenv(name, raising=False)
    ends = FAILING.get(what, 0)
    for name in ("script.py", "folder/__main__.py", "package/module.py"):
        write(tmp_path / name, PROGRAMS[what], "" if ends else IS_ACCELERATED)
    for name in ("helper.py", "users/helper.py"):
        write(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "script.py", "__main__.py")
    py_compile.compile(tmp_path / "script.py", tmp_path / "script.pyc")
    env = {"PYTHONPATH": str(tmp_path / "users")} if what == "names" else {}
    env |= {flags: "1"} if flags == "PYTHONSAFEPATH" else {}
    options = [] if flags == "PYTHONSAFEPATH" else flags.split()
    plain = output(*options, *command.split(), **env)
    first, *rest = way.split()
    code, out, err = output(*options, *WAYS[first], *rest, *command.split(), **env)
    assert plain[0] == ends, plain
    assert code == (130 if ends < 0 and first == "launch" else ends), err
    assert out == plain[1], err
    if ends:
        shown = [line for line in plain[2] if "<frozen runpy>" not in line]
        assert err[: len(shown)] == shown  # `launch` adds the report
    elif "import jax" in PROGRAMS[what] and what != "children":
        assert plain[2][-1] == "False False"
        assert err[-1] == f"True {way != 'launch'}"
    if "own" in command:
        assert out[3].endswith("users/helper.py"), out


@pytest.mark.full
@pytest.mark.parametrize("way", ["SCRIPT", "run SCRIPT"])
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
