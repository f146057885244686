"""Matmuls of few rows as one custom call, which takes as long as reading the matrix does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.health import counts
from jax_intranode._src.jax_private import lowering_context
from jax_intranode._src.native import definitions
from jax_intranode._src.operations import MULTIPLIED
from jax_intranode._src.ops import collective, local_matmuls
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import nbytes
from jax_intranode._src.selection import select


@dataclass(frozen=True)
class FewRows:
    """A matmul of few rows that runs as one custom call.

    Attributes:
        operation: the operation that it is a part of: matmul_all_reduce, which sums over the ranks,
            or column_parallel_matmul.
        groups: its groups, which have a communicator.
        selection: why.
    """

    operation: str
    groups: partition_lib.Partition
    selection: select.Selection

    @property
    def sums(self) -> bool:
        return self.operation == "matmul_all_reduce"

    def __call__(self, x: Any, w: Any) -> list[Any]:
        """Binds the call: [the product, or its sum over the ranks]."""
        return list(_call.bind(x, w, call=self))


def may_be_few(operands: Sequence[Any], dtype: Any, precision: Any, transposed: bool) -> bool:
    """Whether x and w could be those of a matmul of few rows on some GPUs."""
    if len(operands) != 2 or transposed:
        return False
    x, w = operands
    return (
        np.dtype(dtype).name in MULTIPLIED
        and x.dtype == w.dtype == dtype
        and local_matmuls.is_plain(precision)
        and bool(definitions.few_rows_fit(math.prod(x.shape[:-1]), *w.shape))
    )


def find(
    site: LoweringSite, operation: str, operands: Sequence[Any], params: Any
) -> FewRows | None:
    """The matmul of x and w as one custom call; None if it does not run as that.

    If it may run as that, the processes of the mesh rendezvous here, unless they have before.
    """
    mesh, axes = site.mesh, params.axes
    if params.copies or not may_be_few(operands, *params.how):
        return None
    if mesh is None or site.reason_for_lax() is not None:
        return None
    x, w = operands
    rows, (k, n) = math.prod(x.shape[:-1]), w.shape
    groups = partition_lib.partition(mesh, tuple(axes))
    hardware = collective.facts_of(mesh)["hardware"]
    if rows > select.few_rows_limit(hardware, operation, groups.group_size, k, n):
        return None
    selected_by = partial(
        select.select_few_rows, operation, rows=rows, k=k, n=n, dtype=np.dtype(x.dtype).name
    )
    selected = collective.selector(mesh, axes)(None, selected_by)
    return None if selected.algorithm == "lax" else FewRows(operation, groups, selected)


# The primitive.

_call = Primitive("intranode_few_rows")
_call.multiple_results = True


@_call.def_abstract_eval
def _abstract_eval(x: Any, w: Any, *, call: FewRows) -> list[Any]:
    del call
    kind = x.manual_axis_type
    kind = kind.update(varying=kind.varying | w.manual_axis_type.varying)
    shape = local_matmuls.dot_shape(x, w, False)
    return [x.update(shape=shape, weak_type=False, manual_axis_type=kind)]


def _lower(ctx: Any, x: Any, w: Any, *, call: FewRows) -> Any:
    (result,) = ctx.avals_out
    counts.lowered(call.operation, call.selection.algorithm, nbytes(result))
    results = jax.ffi.ffi_lowering("jax_intranode_few_rows")(
        ctx,
        x,
        w,
        device_ids=np.array(call.groups.device_ids, np.int64),
        group_size=np.int64(call.groups.group_size),
        algorithm=np.int32(definitions.ALGORITHMS.index(call.selection.algorithm)),
        sums=np.int32(call.sums),
        site=collective.site_of(ctx, call.operation),
    )
    return lowering_context.called_once(results) if call.sums else results


mlir.register_lowering(_call, _lower)
