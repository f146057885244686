"""The contract of the collectives of `jax.lax`, row by row: what a program may do with them.

docs/contract.md has one line for each row. tests/test_contract.py runs the rows in one process;
some also run in a process per device.
"""

from contract import axes, control_flow, differentiation, layers, operands, programs, rows, sharding
from contract.rows import Row, check

__all__ = ["ROWS", "SUBJECTS", "Row", "check"]

# The tables of docs/contract.md.
SUBJECTS = {
    "Operands": operands,
    "Axes": axes,
    "Sharding": sharding,
    "Control flow, batching and memory": control_flow,
    "Differentiation": differentiation,
    "Matmuls, norms, experts and ragged exchanges": layers,
    "Programs": programs,
}
# In the order of the tables.
ROWS = {
    row.name: row
    for subject in SUBJECTS.values()
    for row in rows.ROWS.values()
    if row.run.__module__ == subject.__name__
}
