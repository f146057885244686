"""The contract of `lax.psum`: each row with our psum and with lax's."""

import re
from pathlib import Path

import contract
import jax
import pytest
from contract import Raised
from devices import need_devices
from jax import lax

import jax_intranode

TABLE = Path(__file__).resolve().parent.parent / "docs" / "contract.md"


def all_reduces(text: str) -> int:
    """How many all-reduces of XLA a program has."""
    return len(re.findall(r"\ball-reduce(?:-start)?\(", text))


@pytest.mark.parametrize("name", contract.ROWS)
def test_row(name: str) -> None:
    row = contract.ROWS[name]
    need_devices(row.devices)
    ours = contract.outcome(row, jax_intranode.psum)
    theirs = contract.outcome(row, lax.psum)
    assert theirs.calls == 0
    if row.how == contract.DIFFERS:
        # What the second process says of it: values, or the text of an error.
        (ours_saved, ours_loaded), (saved, loaded) = ours.result, theirs.result
        assert ours_saved == saved == "yes"
        assert isinstance(loaded, list)
        assert "needs jax_intranode.initialize(mesh)" in str(ours_loaded)
        return
    contract.compare(ours.result, theirs.result)
    if row.how == contract.ERROR:
        results = jax.tree.leaves(theirs.result)
        assert all(isinstance(result, Raised) for result in results), "lax raises no error"
    calls = [text.count("jax_intranode_psum") > 0 for text in ours.programs]
    reductions = [all_reduces(text) > 0 for text in ours.programs]
    if row.how == contract.ACCELERATED:
        assert ours.calls > 0, "our kernels did not run"
        assert all(calls), "a program without our call"
        assert not any(reductions), "an all-reduce beside our call"
    elif row.how == contract.PARTLY:
        assert ours.calls > 0, "our kernels did not run"
        assert any(calls) and any(reductions)
    elif row.how == contract.DERIVED:
        assert ours.calls > 0, "our kernels did not run"
        assert any(calls) or not calls
        for text, of_lax in zip(ours.programs, theirs.programs, strict=True):
            assert all_reduces(text) <= all_reduces(of_lax), "more all-reduces than with lax"
    elif row.how != contract.AS_LAX:
        assert ours.calls == 0, "our kernels ran"
        assert not any(calls)
        assert [*map(all_reduces, ours.programs)] == [*map(all_reduces, theirs.programs)]


def test_error_outside_any_axis_says_where_to_call_it() -> None:
    """Lax's message, and a hint where lax has none."""
    row = contract.ROWS["unbound-axis-outside"]
    ours, theirs = (row.run(psum) for psum in (jax_intranode.psum, lax.psum))
    for a, b in zip(ours, theirs, strict=True):
        assert a.message.startswith(b.message), (a, b)
        assert "shard_map" in a.message + a.notes, a


@pytest.mark.skipif(not TABLE.exists(), reason="the docs are not here")
def test_table_has_the_rows() -> None:
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    rows = [(row.name, row.what, row.how) for row in contract.ROWS.values()]
    assert lines == rows, "docs/contract.md differs from tests/contract.py"
