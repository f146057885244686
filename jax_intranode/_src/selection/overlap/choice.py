"""The selection of overlapped matmuls: whether an operation is overlapped, and by which plan.

It checks what the kernels take, then asks the model. A plan can be forced here; the model itself is
a pure function.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator

from jax_intranode._src import reasons
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import select
from jax_intranode._src.selection.overlap import model
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.profiles import MEASURED, Profile
from jax_intranode._src.selection.overlap.sizes import Sizes

_forced: Plan | None = None


@contextlib.contextmanager
def forced(plan: Plan | None) -> Iterator[None]:
    """Uses a plan for everything that is lowered within, whatever is faster.

    For tuning and tests. All ranks have to force the same plan. None ends the forcing.
    """
    global _forced
    before, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = before


def digest() -> str:
    """Returns a digest of all that a choice depends on; processes compare it at rendezvous.

    It covers the constants of the profiles, the kernels' limits, and a forced plan. The facts from
    which a profile is scaled are exchanged themselves, and so is the version of the package.
    """
    limits = {name: value for name, value in vars(definitions).items() if name.isupper()}
    return hashlib.sha256(repr((_forced, limits, MEASURED)).encode()).hexdigest()[:16]


def choose(
    sizes: Sizes,
    *,
    dtype: str,
    profile: Profile | str | None,
    ring_bytes: int,
    wgrads: int = 0,
) -> Plan | str:
    """Chooses the plan of an operation, or says why it is not overlapped.

    `profile` has the constants of the GPUs, or says why there are none. `wgrads` is the number of
    weight gradients, [N, K] each, that the same call should compute: products of one more operand,
    of N columns, with the gathered rows or with the first terms' rows.
    """
    reason = static_reason(sizes, dtype=dtype, profile=profile)
    if reason is not None:
        return reason
    if _forced is not None:
        return _choose_forced(sizes, _forced, ring_bytes, wgrads)
    assert isinstance(profile, Profile)  # it is only unknown before rendezvous
    fits_pipeline = _fits_pipeline(sizes, ring_bytes)
    if fits_pipeline is not None:
        return fits_pipeline
    chosen = model.choose(sizes, profile, ring_bytes, wgrads)
    if isinstance(chosen, str) and profile.note:
        return f"{chosen}; {profile.note}"
    return chosen


def static_reason(sizes: Sizes, *, dtype: str, profile: Profile | str | None) -> str | None:
    """Returns why an operation is not overlapped whatever memory there is; None if it may be.

    What can't be overlapped needs no rendezvous. `profile` is what device kinds alone decide; None
    if that takes the facts that processes exchange at rendezvous.
    """
    is_empty = 0 in (sizes.outer, sizes.rows, *sizes.ks, *sizes.ns)
    static = select.static_reason(sizes.operation, dtype, sizes.world_size, is_empty=is_empty)
    if static is not None:
        return static.reason
    if any(length % 8 for length in (*sizes.ks, *sizes.ns)):
        ks, ns = (", ".join(map(str, lengths)) for lengths in (sizes.ks, sizes.ns))
        return reasons.NOT_MULTIPLES_OF_8.of(ks=ks, ns=ns)
    return profile if isinstance(profile, str) and _forced is None else None


def _fits_pipeline(sizes: Sizes, ring_bytes: int) -> str | None:
    """Returns why the ring is too small for the pipeline, which takes the least of it."""
    if sizes.row_bytes * definitions.MIN_SLOTS * sizes.world_size > ring_bytes:
        return reasons.RING_TOO_SMALL.of(nbytes=sizes.row_bytes, has=ring_bytes)
    return None


def _choose_forced(sizes: Sizes, plan: Plan, ring_bytes: int, wgrads: int) -> Plan | str:
    """Returns the forced plan as far as it applies to an operation, or why it doesn't."""
    if wgrads and not (plan.wgrad and plan.tile_columns == definitions.WGRAD_COLUMNS):
        return f"not forced with weight gradients and tiles of {definitions.WGRAD_COLUMNS} columns"
    if not plan.fused:
        return _fits_pipeline(sizes, ring_bytes) or dataclasses.replace(plan, wgrad=False)
    if not definitions.has_fused_kernel(sizes.operation, plan.tile_columns, wgrad=False):
        return f"no fused kernel of {sizes.operation} has tiles of {plan.tile_columns} columns"
    if not sizes.fit_fused(plan, ring_bytes):
        return f"more from peers, or more matrices, than a kernel and {ring_bytes} bytes take"
    if wgrads and sizes.gathers:
        return plan
    return dataclasses.replace(plan, wgrad=wgrads > 0, row_pairs_before_wgrad=0, wgrad_tiles_last=0)
