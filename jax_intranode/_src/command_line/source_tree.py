"""Parts of commands that only the source tree has: modules and packages in its folder tools."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from jax_intranode._src.command_line.options import WrongInput

_ROOT = Path(__file__).resolve().parents[3]


def load(module: str, what: str) -> Any:
    """Imports a module in tools, and lets processes that start later import it, too.

    It may be importable already. Else it is looked for in the source tree that this package is
    imported from, and in the current directory if Python imports from there: not with -P.

    Raises:
        WrongInput: there is no such module here.
    """
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        imports_from_here = not {"", os.getcwd()}.isdisjoint(sys.path)
        for folder in (_ROOT / "tools", *([Path.cwd() / "tools"] if imports_from_here else [])):
            if (folder / top / "__init__.py").exists() or (folder / f"{top}.py").exists():
                sys.path.append(str(folder))
                break
        else:
            raise WrongInput(
                f"{what} needs {top} in the folder tools, which only the source tree has: run this "
                "in a clone, or set PYTHONPATH to its folder tools"
            )
        spec = importlib.util.find_spec(top)
    found = importlib.import_module(module)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), str(folder)])
    return found
