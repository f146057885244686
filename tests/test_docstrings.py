"""The examples in the docstrings run, and the API page has every public name."""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from devices import need_devices

import jax_intranode

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.rst"
# Examples would disturb other tests, or depend on the machine or on what other tests have done.
WITHOUT_EXAMPLE = {"last_failure", "register_ffi_library", "shutdown", "topology", "uninstall"}

pytestmark = [
    pytest.mark.one_version,
    pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here"),
]


def run(text: str, names: dict[str, Any], name: str) -> int:
    """Runs the examples in a text, and returns how many there are."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    report: list[str] = []
    failures = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert failures.failed == 0, "".join(report)
    names.update(test.globs)  # of which the test has made a copy
    return len(test.examples)


def functions() -> list[str]:
    return [name for name in jax_intranode.__all__ if inspect.isfunction(vars(jax_intranode)[name])]


@pytest.mark.parametrize("name", [name for name in functions() if name not in WITHOUT_EXAMPLE])
def test_example(name: str) -> None:
    need_devices(2)
    names: dict[str, Any] = {}
    assert run(PAGE.read_text(), names, "docs/api.rst") > 0
    text = inspect.getdoc(getattr(jax_intranode, name)) or ""
    try:
        assert run(text, names, name) > 0, f"the docstring of {name} has no example"
    finally:
        jax_intranode.uninstall()  # if the example has failed before it did


def test_the_page_has_every_public_name() -> None:
    listed = re.findall(r"^\.\. auto\w+:: (\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(jax_intranode.__all__)


def test_no_text_becomes_a_link_by_mistake() -> None:
    """Sphinx takes file:line for an address, unless it is marked as code."""
    for name in jax_intranode.__all__:
        text = inspect.getdoc(getattr(jax_intranode, name)) or ""
        assert not re.search(r"\b(file|data|http):\w", re.sub(r"``.*?``", "", text)), name
