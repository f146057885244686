"""Settings, arguments, a mesh and runs for the tests of commands that measure."""

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from devices import need_devices

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS


def settings_of(name: str, **changes: Any) -> Settings:
    """Returns the settings of a tiny run on two CPU devices of this process."""
    usual: dict[str, Any] = {
        "name": name,
        "sizes": [1024, 4096],
        "leaves": 1,
        "dtypes": ["float32"],
        "iterations": 3,
        "warmup_iterations": 1,
        "chain": 2,
        "mode": SINGLE_PROCESS,
        "devices": 2,
        "platform": "cpu",
    }
    return Settings(**{**usual, **changes})


def mesh_of_two() -> jax.sharding.Mesh:
    need_devices(2)
    return jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )


# Runs a command, or tools/bench.py, in this process: run_here(its words) -> exit code, stdout,
# stderr.
RunHere = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunHere:
    def run(words: str) -> tuple[int, str, str]:
        first, *rest = words.split()
        program, argv = "python -m jax_intranode", [first, *rest]
        main = command_line.main
        if first == "tools/bench.py":
            bench = importlib.import_module("bench")
            program, argv, main = first, rest, bench.main
        monkeypatch.setattr(sys, "argv", [program, *argv])
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay
        code = main(argv)
        return code, *capfd.readouterr()

    return run
