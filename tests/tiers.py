"""The tiers of the tests: what only `pytest --full` runs (CONTRIBUTING.md)."""

import functools
from collections.abc import Container, Iterable
from typing import Any

import pytest

# A parameter of the full tier.
full = functools.partial(pytest.param, marks=pytest.mark.full)


def quick(values: Iterable[Any], these: Container[Any]) -> list[Any]:
    """Parameters, of which the quick tier runs these."""
    return [value if value in these else full(value) for value in values]
