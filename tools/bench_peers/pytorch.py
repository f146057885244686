"""PyTorch: NCCL through `torch.distributed`, and the kernels of its symmetric memory."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from bench_peers.peer import Peer, Unavailable
from jax_intranode._src.command_line.bench import matmuls
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import MESSAGES, ProgressLine, run_ranks

_DTYPES = ("bfloat16", "float16", "float32")


def _measure(
    settings: Settings, directory: Path, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs one process of PyTorch for each GPU."""
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    # Each measurement: dtype, size, the least number of calls in a repetition, and how many untimed
    # repetitions precede it. For matmuls both are as for ours, so that the GPU's clock has settled
    # for both.
    asked: list[tuple[str, Any, int, int]] = [
        (
            name,
            shape,
            matmuls.calls_in_a_row(settings, name, shape),
            matmuls.repetitions_to_settle(settings, name, shape),
        )
        for name, shape in settings.matmuls()
    ] or [(name, count, 1, 0) for name, count in settings.measurements()]
    measurements = [m for m in asked if m[0] in _DTYPES]
    if not measurements:
        raise Unavailable(f"it takes only {', '.join(_DTYPES)}")
    instructions = {
        "operation": settings.name,
        "matmul": bool(settings.shapes),
        "backward": settings.backward,
        "measurements": measurements,
        "iterations": settings.iterations,
        "warmup_iterations": settings.warmup_iterations,
        "devices": settings.devices,
        "store": str(directory / "store"),
        "output": str(directory / "rows.json"),
        "begun": str(directory / MESSAGES),
    }
    script = Path(__file__).with_name("pytorch_rank.py")
    # -P, because the script's folder has modules with the names of other packages' modules.
    commands = [
        [sys.executable, "-P", str(script), json.dumps({**instructions, "rank": rank})]
        for rank in range(settings.devices)
    ]
    run_ranks(commands, timeout_s=timeout_s, log_dir=directory, line=line)
    result: dict[str, Any] = json.loads((directory / "rows.json").read_text())
    for failed in result["failed"]:
        sys.stderr.write(f"# not measured: {failed}\n")
    return result


def _count(settings: Settings) -> int:
    return len(settings.matmuls() or settings.measurements())


PYTORCH = Peer(
    "torch",
    _measure,
    _count,
    {
        "torch nccl": "#E69F00",
        "torch one_shot": "#009E73",
        "torch two_shot": "#CC79A7",
        "torch fused": "#009E73",
    },
)
