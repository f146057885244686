"""The program of a rank: connects to the other ranks and calls a function of a test file."""

import atexit
import gc
import importlib.util
import json
import logging
import os
import sys
import traceback
from pathlib import Path


def _say_how_it_ended() -> None:
    """Runs after all that JAX and the package do at exit, because it was registered before."""
    failure = sys.modules["jax_intranode"].last_failure()
    print(f"END: {failure and failure.message}\n", end="", flush=True)


def main() -> None:
    platform, file, name, arguments = sys.argv[1:]
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    from jax_intranode._src.command_line.launcher.rank import connect

    logging.basicConfig()
    connect(platform)
    gc.freeze()  # as in conftest.py
    gc.set_threshold(100_000, 50, 100)
    spec = importlib.util.spec_from_file_location("rank_module", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(*json.loads(arguments))


if __name__ == "__main__":
    atexit.register(_say_how_it_ended)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for the other ranks
