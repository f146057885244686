"""All-gather + matmul and matmul + reduce-scatter as one custom call, overlapped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_intranode._src import reasons
from jax_intranode._src.group import communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.health import counts
from jax_intranode._src.jax_private import lowering_context
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.ops import collective, local_matmuls
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.selection import config, select, tuning
from jax_intranode._src.selection.overlap import choice, profiles
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.sizes import Sizes


@dataclass(frozen=True)
class Request:
    """An operation that may be overlapped, in the form that the kernels take.

    Attributes:
        sizes: its sizes; `outer` is the product of the dimensions before `axis`.
        axis: the dimension of x that is gathered, or of the product that is scattered.
        dtypes: dtypes of all operands and results.
        precision: precision of the products.
        transposed: whether the matrices are [N, K].
        gathered: whether the gathered x is a result. Never together with `wgrads`.
        operands: maps the operands of the primitive to those of the custom call: x and the
            matrices, or the xs and the matrices of a sum, then the cotangent if there are `wgrads`.
        wgrads: number of weight gradients that are results, too, [N, K] each: products of the
            cotangent, which has N columns, with the gathered x or with the first xs of a sum.
    """

    sizes: Sizes
    axis: int
    dtypes: tuple[Any, ...]
    precision: Any
    transposed: bool
    gathered: bool = False
    operands: Callable[..., Sequence[Any]] = lambda *operands: operands
    wgrads: int = 0


def find(
    site: LoweringSite,
    axes: Sequence[str],
    request: Request | str,
) -> "Overlapped | str":
    """Returns the operation as one overlapped call, or why it is not overlapped.

    If it may be overlapped, the processes of the mesh rendezvous here, unless they have before.
    """
    if isinstance(request, str):
        return request
    reason = site.reason_for_lax() or _reason_for_operands(site.mesh, request)
    if reason is not None:
        return reason
    mesh = site.mesh
    assert mesh is not None  # or there would be a reason
    groups = partition_lib.partition(mesh, tuple(axes))
    dtype = np.dtype(request.dtypes[0]).name
    kinds = [d.device_kind for d in mesh.devices.flat]
    known = tuning.profile_for(kinds) or profiles.known_from_kinds(kinds)
    reason = choice.static_reason(request.sizes, dtype=dtype, profile=known)
    if reason is not None:
        return reason
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    reason = rendezvous.reason or rendezvous.reason_for_no_matmuls
    if reason is None and config.get().algorithm == "lax":
        reason = reasons.ALGORITHM_LAX
    if reason is not None:
        return reason
    # `bench` also lowers what is shipped, where the rendezvous was under a tuning.
    profile = tuning.profile_for(kinds) or rendezvous.shipped_profile
    if isinstance(profile, str):
        return profile
    assert profile is not None  # or there would be a reason
    chosen = choice.choose(
        request.sizes,
        dtype=dtype,
        profile=profile,
        ring_bytes=rendezvous.ring_bytes,
        wgrads=request.wgrads,
    )
    if isinstance(chosen, str):
        return chosen
    reason = communicator.communicator(rendezvous, groups)
    return reason or Overlapped(groups, request, chosen, profile.note)


def _reason_for_operands(mesh: jax.sharding.Mesh | None, request: Request) -> str | None:
    """Returns why operands of these kinds are not overlapped on these devices, or None."""
    assert mesh is not None  # or there would be a reason
    if mesh.devices.flat[0].platform != "gpu":
        return reasons.CPU_DEVICES
    names = sorted({np.dtype(dtype).name for dtype in request.dtypes})
    if len(names) > 1:
        return reasons.DTYPES_DIFFER.of(dtypes=" and ".join(names))
    if local_matmuls.is_plain(request.precision):
        return None
    return reasons.PRECISION.of(precision=request.precision)


# The primitive. Operands: x and the matrices, or the xs and the matrices of a sum, then the
# cotangent if there are weight gradients. Results: the products, the gathered x or the weight
# gradients if requested, and scratch memory.

_call = Primitive("intranode_overlapped_matmul")
_call.multiple_results = True


@dataclass(frozen=True)
class Overlapped:
    """An operation that runs as one overlapped custom call.

    Attributes:
        groups: its groups, which have a communicator.
        request: its sizes, dtypes and operands.
        plan: how it runs.
        note: what `explain` says about the constants that the plan was chosen by; may be empty.
    """

    groups: partition_lib.Partition
    request: Request
    plan: Plan
    note: str = ""

    @property
    def selection(self) -> select.Selection:
        """What `explain` says."""
        reason = f"overlapped, {self.plan}" + (f"; {self.note}" if self.note else "")
        return select.Selection(self.request.sizes.operation, reason)

    def __call__(self, *operands: Any) -> list[Any]:
        """Binds the call to the operands of the operation's own primitive.

        Returns:
            The products, then the gathered x or the weight gradients if requested.
        """
        operands = tuple(self.request.operands(*operands))
        terms = len(self.request.sizes.ks)
        if terms > 1 and not self.plan.fused:
            assert not self.request.wgrads  # only the fused kernel computes them
            # The pipeline takes one term. Joined along K, the terms are summed in float32 and
            # rounded once.
            x = jnp.concatenate(operands[:terms], -1)
            operands = x, jnp.concatenate(operands[terms:], 1 if self.request.transposed else 0)
        results = _call.bind(*operands, call=self)
        return list(results[:-1])


@_call.def_abstract_eval
def _abstract_eval(x: Any, *others: Any, call: Overlapped) -> list[Any]:
    del others
    axis, sizes = call.request.axis, call.request.sizes
    size = sizes.world_size
    length = x.shape[axis] * size if sizes.gathers else x.shape[axis] // size
    rows = (*x.shape[:axis], length, *x.shape[axis + 1 : -1])
    results = [x.update(shape=(*rows, n), weak_type=False) for n in sizes.ns]
    if call.request.gathered:
        results.append(x.update(shape=(*rows, x.shape[-1]), weak_type=False))
    for k in sizes.ks[: call.request.wgrads]:
        results.append(x.update(shape=(sizes.ns[0], k), weak_type=False))
    scratch = extension.module("gpu").MATMUL_SCRATCH_BYTES + sizes.scratch_bytes(call.plan)
    return [*results, x.update(shape=(scratch,), dtype=np.dtype(np.uint8), weak_type=False)]


def _lower(ctx: Any, *operands: Any, call: Overlapped) -> Any:
    itemsize = np.dtype(call.request.dtypes[0]).itemsize
    sizes = call.request.sizes
    columns = sizes.k if sizes.gathers else sizes.ns[0]
    rows = sizes.outer * sizes.rows * (1 if sizes.gathers else sizes.world_size)
    algorithm = "fused kernel" if call.plan.fused else "cuBLASLt pipeline"
    counts.lowered(sizes.operation, algorithm, rows * columns * itemsize)
    results = jax.ffi.ffi_lowering("jax_intranode_collective_matmul")(
        ctx,
        *operands,
        device_ids=np.array(call.groups.device_ids, np.int64),
        group_size=np.int64(call.groups.group_size),
        algorithm=np.int32(definitions.ALGORITHMS.index(sizes.operation)),
        axis=np.int64(call.request.axis),
        transposed=np.int32(call.request.transposed),
        gathered=np.int32(call.request.gathered),
        wgrads=np.int32(call.request.wgrads),
        plan=call.plan.attributes(),
        site=collective.site_of(ctx, sizes.operation),
    )
    return lowering_context.called_once(results)


mlir.register_lowering(_call, _lower)
