"""The program of a rank under `launch`: runs a script or a module as Python does.

Command line: ``[run [OPTION...]] [-m] SCRIPT ...``. With `run`, as ``python -m jax_intranode run``
does, with its options.

It is run as a file and imports the standard library only, so that the script imports JAX itself,
after it has set environment variables that JAX reads when it is imported. As soon as JAX has been
imported, `rank.join_at_first_use` makes the process a rank.
"""

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
    """Calls functions when modules have been imported for the first time."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)  # asks the other finders
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                action()

            setattr(spec.loader, "exec_module", execute_and_act)  # noqa: B010, or mypy objects
        return spec


def main() -> None:
    """Makes the process a rank and runs the script."""
    arguments = sys.argv[1:]
    accelerated = arguments[:1] == ["run"]
    options, arguments = split(arguments[1:]) if accelerated else ([], arguments)
    is_module = arguments[:1] == ["-m"]

    def join() -> None:
        from jax_intranode._src.command_line.launcher import rank

        rank.join_at_first_use()
        if accelerated:
            # A command of the layer above, which this program stands in for.
            run = importlib.import_module("jax_intranode._src.command_line.run")
            run.begin(run.parse_options(options))

    def import_package() -> None:
        # If it is our package that has imported JAX, it is not complete yet, and this does nothing.
        importlib.import_module("jax_intranode")

    package = Path(__file__).resolve().parents[3]
    if str(package.parent) not in sys.path:
        sys.path.append(str(package.parent))  # the one whose launcher runs
    sys.meta_path.insert(0, _AfterImport({"jax": import_package, "jax_intranode": join}))
    if "jax" in sys.modules:  # something has imported it when Python started
        import_package()
    _remain_a_rank(["run", *options] if accelerated else [])
    try:
        run_as_main(arguments[is_module:], is_module=is_module)
    except SystemExit as end:
        if end.code not in (None, 0):
            _fails_with(end)
            _leave()
        raise
    except BaseException:
        _leave()
        raise


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits what follows `run`: its options, each with its value as one word, and the rest."""
    options, rest = [], list(words)
    while rest and rest[0].startswith("--"):
        word = rest.pop(0)
        options.append(f"{word}={rest.pop(0)}" if word in _WITH_VALUE and rest else word)
    return options, rest


def run_as_main(arguments: Sequence[str], *, is_module: bool) -> None:
    """Runs a script or a module as ``python SCRIPT ...`` or ``python -m MODULE ...`` does.

    It is the module `__main__` from here on, also when its last line has run: exit handlers and
    threads may need it then, for instance to pickle objects of its classes. (`runpy` takes it away
    again.) What shows an exception that ends it does not see the frames of this file.

    Args:
        arguments: the script or the module, and its own arguments.
        is_module: which of the two.
    """
    try:
        sys.argv = list(arguments)
        code, names = _module(arguments[0]) if is_module else _script(arguments[0])
        main = ModuleType("__main__")
        main.__dict__.update(names)
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code in (None, 0):
            _finish()
        raise
    except BaseException as error:
        _fails_with(error)
        _show_without_own_frames()
        raise
    _finish()


def _finish() -> None:
    """Ends what `run` has begun, when the script has ended well."""
    compare = sys.modules.get("jax_intranode._src.command_line.compare")
    if compare is not None:
        compare.finish()


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
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader
    if name.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    assert code is not None
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
        inner, frame = None, trace
        while frame is not None:
            if frame.tb_frame.f_code is run_as_main.__code__:
                inner = frame.tb_next
            frame = frame.tb_next
        while inner is not None and _is_of_loader(inner.tb_frame.f_code.co_filename):
            inner = inner.tb_next
        hook(kind, error.with_traceback(inner), inner)

    sys.excepthook = show


def _is_of_loader(filename: str) -> bool:
    return filename in (__file__, runpy.__file__) or filename.startswith("<frozen ")


def _remain_a_rank(begin: list[str]) -> None:
    """Makes the script a rank again when it executes itself again by ``os.execv`` or the like.

    Scripts do this to set variables that the dynamic loader reads. It would be a program of its own
    then, and each of the ranks another one.

    Args:
        begin: what stands in front of the script in the arguments of this file.
    """
    pid = os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.exec" or os.getpid() != pid:
            return
        path, words, env = os.fsdecode(arguments[0]), [*map(os.fsdecode, arguments[1])], None
        if not Path(path).exists() or not Path(path).samefile(sys.executable) or __file__ in words:
            return
        at = 1
        while words[at : at + 1] and words[at].startswith("-") and words[at] not in ("-m", "-c"):
            at += 2 if words[at] in ("-X", "-W") else 1
        if words[at : at + 1] in ([], ["-c"]):
            return
        env = dict(os.environ if arguments[2] is None else arguments[2])
        for name, value in os.environ.items():
            if name.startswith("JAX_INTRANODE_"):
                env.setdefault(name, value)
        os.execve(path, [*words[:at], __file__, *begin, *words[at:]], env)

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
