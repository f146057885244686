"""PyTorch's collective matmuls: NCCL next to a matmul, and the fused ones of symmetric memory.

Used by pytorch_rank.py. Imports neither JAX nor this package.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# The number of collective matmuls in one graph.
CALLS = 4

# The number of rows of each result that are checked.
_CHECKED_ROWS = 16


def libraries(instructions: dict[str, Any]) -> tuple[str, ...]:
    """Returns the libraries that have the operation. PyTorch has no fused matmul and all-reduce."""
    fused = instructions["operation"] != "matmul_all_reduce"
    return ("torch nccl", "torch fused") if fused else ("torch nccl",)


def label(shape: list[int], dtype: Any) -> str:
    """Returns the text of the progress line."""
    del dtype
    return " x ".join(map(str, shape))


def keys(shape: list[int], dtype: Any) -> dict[str, int]:
    """Returns the fields of a row that give the shape."""
    del dtype
    return dict(zip("mkn", shape, strict=True))


def prepare(
    library: str, instructions: dict[str, Any], shape: list[int], dtype: Any, device: Any
) -> tuple[Callable[[], Any], int]:
    """Returns a call on random operands, uniform between -1 and 1, after checking its results.

    Args:
        library: one of `libraries`.
        instructions: what to measure: "operation" and "backward".
        shape: m, k and n of the product that one device computes.
        dtype: the dtype.
        device: this rank's device.

    Returns:
        The call, and the number of wrong elements on all ranks.
    """
    m, k, n = shape
    gathers = instructions["operation"] == "all_gather_matmul"
    scatters = instructions["operation"] == "matmul_reduce_scatter"
    size, fused = dist.get_world_size(), library == "torch fused"
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def random(*sizes: int) -> Any:
        values = torch.empty(sizes, dtype=dtype, device=device)
        return values.uniform_(-1, 1, generator=generator)

    x, w = random(m // size if gathers else m, k), random(k, n)
    if not instructions["backward"]:
        if gathers:
            gather = _gather_matmul(x, w, fused)
            return _checked(lambda: [gather()[1]], [(_gathered(x), w, False)], scatters)
        if scatters:
            scatter = _matmul_scatter(x, w, fused)
            return _checked(lambda: [scatter()], [(x, w, True)], scatters)
        return _checked(lambda: [_summed(x @ w)], [(x, w, True)], scatters)

    ct = random(m // size if scatters else m, n)
    if gathers:
        # Kept from the forward pass.
        whole_x = _gathered(x)
        scatter = _matmul_scatter(ct, w.t(), fused)
        return _checked(
            lambda: [scatter(), whole_x.t() @ ct],
            [(ct, w.t(), True), (whole_x.t(), ct, False)],
            True,
        )
    if scatters:
        gather = _gather_matmul(ct, w.t(), fused)

        def both() -> list[Any]:
            whole_ct, dx = gather()
            return [dx, x.t() @ whole_ct]

        whole_ct = _gathered(ct)
    else:

        def both() -> list[Any]:
            whole_ct = _summed(ct.clone())
            return [whole_ct @ w.t(), x.t() @ whole_ct]

        whole_ct = _summed(ct.clone())
    return _checked(both, [(whole_ct, w.t(), False), (x.t(), whole_ct, False)], False)


# Parts of the calls.


def _gathered(x: Any) -> Any:
    """Returns the rows of all ranks."""
    rows = dist.get_world_size() * x.shape[0]
    whole = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, x)
    return whole


def _summed(x: Any) -> Any:
    """Sums over all ranks, in place."""
    dist.all_reduce(x)
    return x


def _gather_matmul(x: Any, w: Any, fused: bool) -> Callable[[], tuple[Any, Any]]:
    """Returns a call that returns the gathered x and its product with w."""
    group = dist.group.WORLD.group_name

    def by_nccl() -> tuple[Any, Any]:
        whole = _gathered(x)
        return whole, whole @ w

    def by_symmetric_memory() -> tuple[Any, Any]:
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)
        return whole, products[0]

    return by_symmetric_memory if fused else by_nccl


def _matmul_scatter(x: Any, w: Any, fused: bool) -> Callable[[], Any]:
    """Returns a call that returns this rank's rows of the sum of all ranks' products."""
    group = dist.group.WORLD.group_name

    def by_nccl() -> Any:
        rows = x.shape[0] // dist.get_world_size()
        part = torch.empty((rows, w.shape[1]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(part, x @ w)
        return part

    def by_symmetric_memory() -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

    return by_symmetric_memory if fused else by_nccl


def _checked(
    call: Callable[[], list[Any]], products: list[tuple[Any, Any, bool]], first_is_part: bool
) -> tuple[Callable[[], Any], int]:
    """Returns the call, and the number of wrong elements in some rows of its results.

    Args:
        call: returns the results.
        products: for each result its two factors, and whether all ranks' products are summed.
        first_is_part: whether a rank has only its part of the rows of the first result.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    device = products[0][0].device
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for position, (got, (left, right, summed)) in enumerate(zip(call(), products, strict=True)):
        # In full float32: torch.backends.cuda.matmul.allow_tf32 is off by default.
        parts = size if first_is_part and position == 0 else 1
        rows = torch.linspace(0, got.shape[0] - 1, _CHECKED_ROWS, device=device).long()
        rows_of_all = torch.cat([part * got.shape[0] + rows for part in range(parts)])
        expected = left[rows_of_all].float() @ right.float()
        if summed:
            dist.all_reduce(expected)
        if parts > 1:
            expected = expected.chunk(parts)[rank]
        eps = max(torch.finfo(got.dtype).eps, 2.0**-10)
        allowed = size * eps * (expected.abs() + 2 * expected.square().mean().sqrt())
        wrong += ((got[rows].float() - expected).abs() <= allowed).logical_not().sum()
    dist.all_reduce(wrong)
    return call, int(wrong.item())
