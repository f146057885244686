"""The `ranks` fixture, and which cases of processes only the full tier runs."""

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


@pytest.hookimpl(tryfirst=True)  # before the other conftest.py looks for the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.module, "is_quick"):
            params = item.callspec.params if "outcome" in item.fixturenames else None
            if params and not item.module.is_quick(params["name"], params["outcome"]):
                item.add_marker(pytest.mark.full)
