"""One rank of PyTorch's collectives, timed in CUDA graphs.

A script that imports neither JAX nor this package. It takes its instructions as JSON on the command
line; rank 0 writes the rows to a JSON file. It measures NCCL and, for all-reduce, the kernels of
symmetric memory; pytorch_matmuls.py has the collective matmuls.
"""

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

# The number of operations in one graph.
CALLS = 20


def libraries(instructions: dict[str, Any]) -> tuple[str, ...]:
    """Returns the libraries that have the operation."""
    shared = ("torch one_shot", "torch two_shot") if instructions["operation"] == "psum" else ()
    return ("torch nccl", *shared)


def label(count: int, dtype: Any) -> str:
    """Returns the text of the progress line."""
    return f"{count * dtype.itemsize} bytes"


def keys(count: int, dtype: Any) -> dict[str, int]:
    """Returns the fields of a row that give the size."""
    return {"size": count * dtype.itemsize}


def prepare(
    library: str, instructions: dict[str, Any], count: int, dtype: Any, device: Any
) -> tuple[Callable[[], Any], int]:
    """Returns a call after checking its result.

    Returns:
        The call, and the number of wrong elements on all ranks.
    """
    operand, call = _operand_and_call(library, instructions["operation"], count, dtype, device)
    return call, _count_wrong(instructions["operation"], operand, call)


def _operand_and_call(
    library: str, operation: str, count: int, dtype: Any, device: Any
) -> tuple[Any, Callable[[], Any]]:
    """Returns an operand, and a call that uses it and returns the result.

    As in nccl-tests, `count` is the number of elements of the operand or of the result, whichever
    is larger. The result may be the operand.
    """
    if library != "torch nccl":
        return _prepare_shared(library, count, dtype, device)
    whole = torch.empty(count, dtype=dtype, device=device)
    part = torch.empty(count // dist.get_world_size(), dtype=dtype, device=device)
    exchanged = torch.empty_like(whole)

    def reduce() -> Any:
        dist.all_reduce(whole, dist.ReduceOp.SUM if operation == "psum" else dist.ReduceOp.AVG)
        return whole

    def scatter() -> Any:
        dist.reduce_scatter_tensor(part, whole)
        return part

    def gather() -> Any:
        dist.all_gather_into_tensor(whole, part)
        return whole

    def exchange() -> Any:
        dist.all_to_all_single(exchanged, whole)
        return exchanged

    def both() -> Any:
        scatter()
        return gather()

    return {
        "psum": (whole, reduce),
        "pmean": (whole, reduce),
        "psum_scatter": (whole, scatter),
        "all_gather": (part, gather),
        "all_to_all": (whole, exchange),
        "psum_scatter+all_gather": (whole, both),
    }[operation]


def _prepare_shared(
    library: str, count: int, dtype: Any, device: Any
) -> tuple[Any, Callable[[], Any]]:
    """Returns an operand and a call for an all-reduce kernel of symmetric memory."""
    group = dist.group.WORLD.group_name
    shared = symmetric_memory.empty(count, dtype=dtype, device=device)
    symmetric_memory.rendezvous(shared, group)
    kernels = torch.ops.symm_mem
    if library == "torch one_shot":
        return shared, lambda: kernels.one_shot_all_reduce(shared, "sum", group)
    return shared, lambda: kernels.two_shot_all_reduce_(shared, "sum", group)


def _count_wrong(operation: str, operand: Any, call: Callable[[], Any]) -> int:
    """Counts the wrong elements on all ranks. The operand of rank r is filled with r + 1."""
    n = dist.get_world_size()
    operand.fill_(dist.get_rank() + 1)
    result = call()
    if operation in ("all_gather", "all_to_all"):
        numbers = torch.arange(1, n + 1, device=result.device).to(result.dtype)
        expected = numbers.repeat_interleave(result.numel() // n)
    else:
        total = n * (n + 1) / 2
        expected = torch.full_like(result, total / n if operation == "pmean" else total)
    wrong = (result != expected).sum()
    dist.all_reduce(wrong)
    return int(wrong.item())


def _times_us(
    call: Callable[[], Any], calls: int, replays: int, untimed: int, warmup: int, iterations: int
) -> tuple[float, float]:
    """Returns the median and the 99th percentile of the slowest rank's times, in us a call.

    Args:
        call: the call.
        calls: the number of calls in a CUDA graph.
        replays: the number of replays of the graph in a repetition.
        untimed: the number of untimed repetitions before each timed one.
        warmup: the number of repetitions to discard.
        iterations: the number of timed repetitions.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    times = []
    for repetition in range(-warmup, iterations):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(untimed * replays):
            graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repetition >= 0:
            times.append(start.elapsed_time(end) * 1e3 / (replays * calls))
    quantiles = torch.tensor([0.5, 0.99], dtype=torch.float64)
    slowest = torch.quantile(torch.tensor(times, dtype=torch.float64), quantiles).cuda()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    p50, p99 = slowest.tolist()
    return p50, p99


def main() -> None:
    """Makes the measurements that the command line describes."""
    instructions = json.loads(sys.argv[1])
    rank = instructions["rank"]
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{instructions['store']}",
        rank=rank,
        world_size=instructions["devices"],
        device_id=device,
    )
    with contextlib.suppress(Exception):
        # Older versions need this call; newer ones warn, or no longer have it.
        symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    kind: Any = sys.modules[__name__]
    if instructions["matmul"]:
        sys.path.append(str(Path(__file__).parent))  # last, so that other packages win
        kind = importlib.import_module("pytorch_matmuls")
    rows = []
    failed: dict[tuple[str, str], str] = {}
    for name, size, in_a_row, untimed in instructions["measurements"]:
        dtype = getattr(torch, name)
        what = f"{name}, {kind.label(size, dtype)}"
        if rank == 0:
            with Path(instructions["begun"]).open("a") as file:
                file.write(json.dumps({"begun": f"torch, {what}"}) + "\n")
        for library in kind.libraries(instructions):
            # A failed shape of a matmul says nothing about other shapes.
            tried = (library, what if instructions["matmul"] else name)
            if tried in failed:
                continue
            try:
                call, wrong = kind.prepare(library, instructions, size, dtype, device)
                p50, p99 = _times_us(
                    call,
                    kind.CALLS,
                    math.ceil(in_a_row / kind.CALLS),
                    untimed,
                    instructions["warmup_iterations"],
                    instructions["iterations"],
                )
            except RuntimeError as error:
                # For example an unsupported dtype, which fails on all ranks alike.
                failed[tried] = f"{library}, {what}: {str(error).splitlines()[0]}"
                continue
            rows.append(
                {
                    "library": library,
                    **kind.keys(size, dtype),
                    "dtype": name,
                    "time_us": p50,
                    "time_p99_us": p99,
                    "wrong": wrong,
                }
            )
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        version = f"torch {torch.__version__} (NCCL {nccl})"
        result = {"version": version, "rows": rows, "failed": list(failed.values())}
        Path(instructions["output"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
