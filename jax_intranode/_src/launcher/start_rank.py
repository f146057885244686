"""The program of a rank under `launch`: runs a script or a module as Python does.

Command line: ``[run] [-m] SCRIPT ...``. With `run`, as ``python -m jax_intranode run`` does.

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
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType

# How long the exit handlers of a rank that has failed may take.
_EXIT_S = 30.0


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
    """Runs the script, and reports an exception as Python does."""
    arguments = sys.argv[1:]
    accelerated = arguments[:1] == ["run"]
    arguments = arguments[accelerated:]
    is_module = arguments[:1] == ["-m"]
    sys.argv = arguments[is_module:]
    script = sys.argv[0]

    def join() -> None:
        import jax_intranode
        from jax_intranode._src.launcher import rank

        rank.join_at_first_use()
        if accelerated:
            jax_intranode.install()

    def import_package() -> None:
        # If it is our package that has imported JAX, it is not complete yet, and this does nothing.
        importlib.import_module("jax_intranode")

    sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    package = Path(__file__).resolve().parents[2]
    if str(package.parent) not in sys.path:
        sys.path.append(str(package.parent))  # the one whose launcher runs
    sys.meta_path.insert(0, _AfterImport({"jax": import_package, "jax_intranode": join}))
    if "jax" in sys.modules:  # something has imported it when Python started
        import_package()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave()
        raise
    except BaseException as error:
        _leave()
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy; all of it if nothing is left."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner or trace


def _leave() -> None:
    """Makes this process end soon, though the other ranks do not: they may wait for this one."""
    with contextlib.suppress(Exception):  # a script may have closed stderr
        faulthandler.dump_traceback_later(_EXIT_S, exit=True)
    rank = sys.modules.get("jax_intranode._src.launcher.rank")
    if rank is not None:
        try:
            rank.leave()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
