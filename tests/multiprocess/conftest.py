"""The `ranks` fixture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multiprocess_ranks import run_in_ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[str]]:
    """`run_in_ranks`, with a directory of the test's own for the logs."""

    def run(function: Callable[..., Any], world: int, **kwargs: Any) -> list[str]:
        return run_in_ranks(function, world, tmp_path / "logs", **kwargs)

    return run
