"""All that one start of processes runs: the cases of all modules, and rows of the contract."""

import functools

import cases_of_collectives  # noqa: F401
import cases_of_experts  # noqa: F401
import cases_of_matmuls  # noqa: F401
import cases_of_norms  # noqa: F401
import cases_of_ragged  # noqa: F401
import cases_of_rewriting
import cases_of_segments  # noqa: F401
import cases_of_set_up
import contract
import jax
import random_programs  # noqa: F401
from cases import CASES as OF_COLLECTIVES
from cases import Case
from contract import rows


def in_ranks(name: str) -> None:
    """Checks a row, whose mesh has the first devices, in the processes of these devices.

    A type that differs with check_vma=False is of no process: test_contract.py runs that, too.
    """
    row = contract.ROWS[name]
    rows.CHECK_VMA = [True]
    if any(d.process_index == jax.process_index() for d in jax.devices()[: row.devices]):
        contract.check(row)


def _runs(row: contract.Row) -> bool:
    """Transformations, layers, and whatever needs four devices."""
    modules = ("contract.control_flow", "contract.differentiation", "contract.layers")
    transforms = row.run.__module__ in modules
    return row.ours and (transforms or row.devices == 4)


CASES = {
    **OF_COLLECTIVES,
    **{
        f"contract_{name}": Case(name, functools.partial(in_ranks, name), row.devices)
        for name, row in contract.ROWS.items()
        if _runs(row)
    },
    # These begin and end without communicators.
    **cases_of_rewriting.CASES,
    **cases_of_set_up.CASES,
}
