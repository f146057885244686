"""Parts of commands that only the source tree has: the packages in its folder tools."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line.wrong_input import WrongInput


def load(module: str, what: str) -> Any:
    """Imports a module of a package in tools, and lets processes that start later import it, too.

    It may be importable already. Else it is looked for in the source tree that this package is
    imported from, and in the current directory.

    Args:
        module: the module's name.
        what: what needs it, for the error message.

    Raises:
        WrongInput: there is no such package here.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        folder = _folder(package)
        if folder is None:
            raise WrongInput(
                f"{what} needs the folder tools/{package}, which only the source tree has: run "
                "this in a clone, or set PYTHONPATH to its folder tools"
            )
        sys.path.append(str(folder))
    found = importlib.import_module(module)
    (path,) = importlib.import_module(package).__path__
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (folder_of_it := str(Path(path).parent)) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), folder_of_it])
    return found


def _folder(package: str) -> Path | None:
    """The folder tools that has this package."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "tools" / package / "__init__.py").exists():
            return root / "tools"
    return None
