"""All-gather + matmul and matmul + reduce-scatter as one custom call, overlapped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_intranode._src import communicator, compat, config, native, overlap, select, table
from jax_intranode._src.ops import collective


@dataclass(frozen=True)
class Request:
    """An operation that may be overlapped.

    Attributes:
        axis: the dimension of x that is gathered, or of the product that is cut.
        outer: arrays of rows, multiplied as a batch: dimensions before that one.
        rows: rows of each that a rank has to itself.
        ks: the contracted dimension of x; for a sum of products those of all xs.
        ns: columns of each matrix; of a sum they have the same.
        dtypes: of all operands and results.
        precision: of the products.
        transposed: whether matrices are [N, K].
        gathered: whether the gathered x is a result.
        operands: from the operands of the primitive to x and the matrices, or to those of a sum,
            and one more where there are `besides`.
        besides: how many derivatives by matrices are results, too: [N, K] each, products of one
            more operand, of N columns, with the gathered x, or with the first xs of a sum. Never
            with `gathered`.
    """

    axis: int
    outer: int
    rows: int
    ks: tuple[int, ...]
    ns: tuple[int, ...]
    dtypes: tuple[Any, ...]
    precision: Any
    transposed: bool
    gathered: bool = False
    operands: Callable[..., Sequence[Any]] = lambda *operands: operands
    besides: int = 0


def find(
    operation: str,
    place: collective.Place,
    traced_over: tuple[int, ...] | None,
    axes: Sequence[str],
    request: Request,
) -> "Overlapped | str":
    """The operation as one call, or why it is not; the processes of the mesh may meet.

    Args:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        place: where it is lowered.
        traced_over: the devices that it was traced over.
        axes: its axes.
        request: what it is.
    """
    reason = place.reason_for_lax(traced_over)
    if reason is not None:
        return reason
    mesh = place.mesh
    assert mesh is not None  # or there were a reason
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return "CPU devices"
    names = sorted({np.dtype(dtype).name for dtype in request.dtypes})
    if len(names) > 1:
        return f"dtypes {' and '.join(names)}; overlapped are operands and results of one"
    # Of 16-bit operands all of them mean the same.
    precision = request.precision
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if not all(p is None or isinstance(p, lax.Precision) for p in precisions):
        return f"precision {precision}"
    groups = communicator.partition(mesh, tuple(axes))

    def plan_within(ring_bytes: int) -> overlap.Plan | str:
        return overlap.plan(
            operation,
            outer=request.outer,
            rows=request.rows,
            ks=request.ks,
            ns=request.ns,
            dtype=names[0],
            world_size=groups.group_size,
            hardware=table.hardware_of(device.platform, device.device_kind),
            ring_bytes=ring_bytes,
            besides=request.besides,
        )

    # As in collective.chooser: what is not overlapped with any settings needs no rendezvous.
    chosen = plan_within(1 << 62)
    if isinstance(chosen, str):
        return chosen
    rendezvous = communicator.rendezvous_of(mesh.devices.flat)
    reason = rendezvous.reason or rendezvous.reason_for_no_matmuls
    if reason is None and config.get().algorithm == "lax":
        reason = "JAX_INTRANODE_ALGORITHM=lax"
    if reason is not None:
        return reason
    chosen = plan_within(rendezvous.ring_bytes)
    if isinstance(chosen, str):
        return chosen
    reason = communicator.communicator(rendezvous, groups)
    return reason or Overlapped(operation, groups, request, chosen)


# The call: x and matrices, or the operands of a sum of products, and the one beside them if there
# are derivatives by matrices, to products, the gathered x or the derivatives by matrices if asked
# for, and scratch.

_call = Primitive("intranode_overlapped_matmul")
_call.multiple_results = True


@dataclass(frozen=True)
class Overlapped:
    """An operation as one call.

    Attributes:
        operation: its name.
        groups: its groups, which have a communicator.
        request: what it is.
        plan: how it is cut.
    """

    operation: str
    groups: communicator.Partition
    request: Request
    plan: overlap.Plan

    def __call__(self, *operands: Any) -> list[Any]:
        """Products, and the gathered x or derivatives by matrices, from those of the primitive."""
        operands = tuple(self.request.operands(*operands))
        terms = len(self.request.ks)
        if terms > 1 and not self.plan.tile_columns:
            assert not self.request.besides  # which kernels compute only
            # One product of what is joined along K: it is summed in float32 and rounded once.
            x = jnp.concatenate(operands[:terms], -1)
            operands = x, jnp.concatenate(operands[terms:], 1 if self.request.transposed else 0)
        results = _call.bind(*operands, call=self)
        return list(results[:-1])


@_call.def_abstract_eval
def _abstract_eval(x: Any, *others: Any, call: Overlapped) -> list[Any]:
    del others
    axis, columns, size = call.request.axis, call.request.ns, call.groups.group_size
    gathers = call.operation == "all_gather_matmul"
    length = x.shape[axis] * size if gathers else x.shape[axis] // size
    rows = (*x.shape[:axis], length, *x.shape[axis + 1 : -1])
    results = [x.update(shape=(*rows, n), weak_type=False) for n in columns]
    if call.request.gathered:
        results.append(x.update(shape=(*rows, x.shape[-1]), weak_type=False))
    for k in call.request.ks[: call.request.besides]:
        results.append(x.update(shape=(columns[0], k), weak_type=False))
    scratch = native.module("gpu").MATMUL_SCRATCH_BYTES
    if not gathers and call.plan.tile_columns:  # the products for peers
        request = call.request
        sizes = overlap.Sizes(
            call.operation, request.outer, request.rows, request.ks, columns, size
        )
        scratch += sizes.scratch_bytes(call.plan)
    elif not gathers:  # the products of all ranks' rows
        scratch += x.size // x.shape[-1] * columns[0] * x.dtype.itemsize
    return [*results, x.update(shape=(scratch,), dtype=np.dtype(np.uint8), weak_type=False)]


def _lower(ctx: Any, *operands: Any, call: Overlapped) -> Any:
    results = jax.ffi.ffi_lowering("jax_intranode_collective_matmul")(
        ctx,
        *operands,
        device_ids=np.array(call.groups.device_ids, np.int64),
        group_size=np.int64(call.groups.group_size),
        algorithm=np.int32(select.ALGORITHMS.index(call.operation)),
        axis=np.int64(call.request.axis),
        transposed=np.int32(call.request.transposed),
        gathered=np.int32(call.request.gathered),
        besides=np.int32(call.request.besides),
        first_cuts=np.int32(call.plan.first_cuts),
        last_cuts=np.int32(call.plan.last_cuts),
        tile_columns=np.int32(call.plan.tile_columns),
        group_pairs=np.int32(call.plan.group_pairs),
        parts=np.int32(call.plan.parts),
        direct=np.int32(call.plan.direct),
        rounds=np.int32(call.plan.rounds),
        pairs_before=np.int32(call.plan.pairs_before),
        beside_after=np.int32(call.plan.beside_after),
    )
    return compat.called_once(results)


mlir.register_lowering(_call, _lower)
