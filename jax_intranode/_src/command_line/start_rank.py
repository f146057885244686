"""The program that `launch` and `run` start: it runs a script or a module as Python does.

Command line: ``[rank] [run [OPTION...]] [-m] SCRIPT ...``. With `rank` the process is a rank of
`launch`. With `run` the script is accelerated, as the options say.

It is run as a file and imports the standard library only, so that the script imports JAX itself,
after it has set environment variables that JAX reads when it is imported. As soon as JAX has been
imported, `rank.join_at_first_use` makes the process a rank, and `acceleration.begin` accelerates
it.
"""

import builtins
import contextlib
import faulthandler
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# How long the exit handlers of a rank that has failed may take.
_EXIT_S = 30.0
# Options of `run` that take a value.
_WITH_VALUE = ("--steps",)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions when modules have been imported, each once. Then nothing is left of it."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name and name in self._actions:
                vars(loader).pop("exec_module", None)
                self._actions[name]()
                self._actions.pop(name, None)
            if not self._actions:
                # Another thread may be going through the list.
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

        # Python leaves the frames of its own files out when an import fails.
        code = execute_and_act.__code__
        execute_and_act.__code__ = code.replace(co_filename="<frozen importlib._bootstrap>")
        setattr(loader, "exec_module", execute_and_act)  # noqa: B010, or mypy objects
        return spec


def main() -> None:
    """Runs the script, and makes the process what it is to be when the script imports JAX."""
    arguments = sys.argv[1:]
    is_rank = arguments[:1] == ["rank"]
    accelerated = arguments[is_rank:][:1] == ["run"]
    words = arguments[is_rank + accelerated :]
    options, arguments = split(words) if accelerated else ([], words)
    is_module = arguments[:1] == ["-m"]
    own = sys.argv[1 : len(sys.argv) - len(arguments)]

    def begin() -> None:
        if is_rank:
            from jax_intranode._src.command_line.launcher import rank

            rank.join_at_first_use()
        if accelerated:
            from jax_intranode._src.command_line import acceleration

            acceleration.begin(acceleration.parse_options(options))

    def import_package() -> None:
        # If it is our package that has imported JAX, it is not complete yet, and this does nothing.
        try:
            importlib.import_module("jax_intranode")
        except Exception as error:  # a script that can do without JAX would catch it
            raise SystemExit(
                "python -m jax_intranode: jax_intranode cannot be used here: "
                f"{type(error).__name__}: {error}\n"
                "`python -m jax_intranode info` shows what is installed."
            ) from None

    if importlib.util.find_spec("jax_intranode") is None:
        sys.path.append(str(Path(__file__).resolve().parents[3]))
    sys.meta_path.insert(0, _AfterImport({"jax": import_package, "jax_intranode": begin}))
    if "jax" in sys.modules:  # something has imported it when Python started
        import_package()
    _remain_what_it_is(own)
    sys.orig_argv[sys.orig_argv.index(sys.argv[0]) :] = arguments
    pid = os.getpid()
    try:
        run_as_main(arguments[is_module:], is_module=is_module)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _finish("--compare" in options)
        elif is_rank:
            _tell_launcher(error, pid)
            _fails_with(error)
            _leave()
        raise
    _finish("--compare" in options)


def told_at(coordinator: str) -> str:
    """Where the ranks tell the launcher that they fail: beside JAX's coordination service."""
    return coordinator.removeprefix("unix:").rpartition("/")[0] + "/told"


def _tell_launcher(error: BaseException, pid: int) -> None:
    """Tells the launcher at once: peers that fail because of this rank may end before it.

    A rank that another one's failure has ended says that it follows: it is such a peer.
    """
    failures = sys.modules.get("jax_intranode._src.health.failures")
    code = _exit_code(error)
    with contextlib.suppress(Exception):  # then the launcher goes by the ends of processes
        if code and os.getpid() == pid:
            import _socket  # not `socket`, which gevent replaces

            reason = getattr(failures and failures.current(), "reason", "")
            follows = reason in ("peer_gone", "aborted")
            text = f"{os.environ['JAX_INTRANODE_RANK']} {code} {follows:d}"
            to = told_at(os.environ["JAX_INTRANODE_COORDINATOR"])
            teller = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK)
            teller.sendto(text.encode(), to)
            teller.close()


def _exit_code(error: BaseException) -> int:
    """The code with which Python ends because of an exception; minus a signal's number."""
    if not isinstance(error, SystemExit):
        return -2 if isinstance(error, KeyboardInterrupt) else 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def command(*options: str) -> list[str]:
    """The beginning of a command that runs this file, with these options and this interpreter's."""
    import subprocess  # not in the script's process

    of_this: list[str] = getattr(subprocess, "_args_from_interpreter_flags")()  # noqa: B009
    for name, value in sys._xoptions.items():
        of_this += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *options, *of_this, __file__]


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits what follows `run`: its options, each with its value as one word, and the rest."""
    options, rest = [], list(words)
    while rest and rest[0].startswith("--"):
        word = rest.pop(0)
        options.append(f"{word}={rest.pop(0)}" if word in _WITH_VALUE and rest else word)
    return options, rest


def run_as_main(arguments: Sequence[str], *, is_module: bool) -> None:
    """Runs the first argument with the others, as ``python [-m] SCRIPT_OR_MODULE ...`` does.

    It is the module `__main__` from here on, also when its last line has run: exit handlers and
    threads may need it then, for instance to pickle objects of its classes. (`runpy` takes it away
    again.) What shows an exception that ends it does not see the frames of this file.
    """
    try:
        # While Python looks for the module, it is not yet the name of its file.
        sys.argv = ["-m" if is_module else arguments[0], *arguments[1:]]
        code, names = _module(arguments[0]) if is_module else _script(arguments[0])
        main = ModuleType("__main__")
        main.__dict__.update(names, __builtins__=builtins)
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _fails_with(error)
        _show_without_own_frames()
        raise


def _finish(compares: bool) -> None:
    """Ends what `run` has begun, when the script has ended well."""
    compare = sys.modules.get("jax_intranode._src.command_line.compare")
    if compare is not None:
        compare.finish()
    elif compares:
        sys.stderr.write("compare: there is nothing to compare: JAX was not imported\n")


def _fails_with(error: BaseException) -> None:
    peers = sys.modules.get("jax_intranode._src.health.peers")
    if peers is not None:
        peers.fails_with(error)


def _module(name: str) -> tuple[CodeType, dict[str, Any]]:
    """The code of a module, and the names that Python gives it as `__main__`."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd())
    _, spec, code = getattr(runpy, "_get_module_details")(name)  # noqa: B009, not in mypy's stubs
    sys.argv[0] = spec.origin
    return code, _names_of(spec)


def _script(name: str) -> tuple[CodeType, dict[str, Any]]:
    """The same of a file with source or bytecode, or of a folder or an archive with such a file."""
    path = str(Path.cwd() / name)
    if pkgutil.get_importer(path) is not None:
        sys.path[: int(not sys.flags.safe_path)] = [path]
        _, spec, code = getattr(runpy, "_get_main_module_details")()  # noqa: B009
        return code, _names_of(spec)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(name).resolve().parent)
    loader: Any = importlib.machinery.SourcelessFileLoader("__main__", path)
    if name.endswith(".pyc"):
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    names = {"__file__": path, "__cached__": None, "__loader__": loader, "__package__": None}
    return code, names


def _names_of(spec: importlib.machinery.ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _show_without_own_frames() -> None:
    """Hides the frames outside of the script from `sys.excepthook`, which Python calls at the end.

    Python itself does all else that it does with an exception that nobody has caught.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and _is_of_loader(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.last_traceback = trace
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def _is_of_loader(filename: str) -> bool:
    own = (main.__code__.co_filename, runpy.__file__)
    return filename in own or filename.startswith("<frozen ")


def _remain_what_it_is(own: list[str]) -> None:
    """Makes the script run by this file when it executes itself again by ``os.execv`` or the like.

    Scripts do this to set variables that the dynamic loader reads. It would be a program of its own
    then: not accelerated, and no rank. `own` are the arguments of this file before the script.
    """
    pid = os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.exec" or os.getpid() != pid:
            return
        path, words = os.fsdecode(arguments[0]), [*map(os.fsdecode, arguments[1])]
        if not Path(path).exists() or not Path(path).samefile(sys.executable) or __file__ in words:
            return
        at = 1
        while words[at : at + 1] and words[at].startswith("-") and words[at] not in ("-m", "-c"):
            at += 2 if words[at] in ("-X", "-W") else 1
        if words[at : at + 1] in ([], ["-c"]):
            return
        own_env = {k: v for k, v in os.environ.items() if k.startswith("JAX_INTRANODE_")}
        env = own_env | dict(os.environ if arguments[2] is None else arguments[2])
        os.execve(path, [*words[:at], __file__, *own, *words[at:]], env)

    sys.addaudithook(hook)


def _leave() -> None:
    """Makes this process end soon, though the other ranks do not: they may wait for this one."""
    with contextlib.suppress(Exception):  # a script may have closed stderr
        faulthandler.dump_traceback_later(_EXIT_S, exit=True)
    distributed = sys.modules.get("jax_intranode._src.jax_private.distributed")
    if distributed is not None:
        try:
            distributed.leave_without_waiting()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
