"""JAX's own kernel: the all-gather matmul of `jax.experimental.pallas.ops.gpu`, for Hopper GPUs."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench_peers.peer import Peer, Unavailable
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS, ProgressLine, run_function

_DTYPES = ("bfloat16", "float16")


def _measure(
    settings: Settings, directory: Path, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Runs one process with all GPUs."""
    del directory
    if settings.name != "all_gather_matmul":
        raise Unavailable(f"it has no {settings.name}")
    if settings.backward:
        raise Unavailable("it has no gradients")
    dtypes = [name for name in settings.dtypes if jnp.dtype(name).name in _DTYPES]
    if not dtypes:
        raise Unavailable(f"it takes only {', '.join(_DTYPES)}")
    gpus = machine.visible_gpus()
    if settings.devices != gpus:
        raise Unavailable(
            f"it runs on all GPUs that JAX sees, {gpus}, and --devices is {settings.devices}; set "
            "CUDA_VISIBLE_DEVICES"
        )
    asked = dataclasses.replace(settings, dtypes=dtypes, mode=SINGLE_PROCESS)
    result: dict[str, Any] = run_function(
        "bench_peers.pallas_rank:measure",
        dataclasses.asdict(asked),
        asked.job,
        timeout_s=timeout_s,
        line=line,
    )
    if "refused" in result:
        raise Unavailable(result["refused"])
    for failed in result["failed"]:
        sys.stderr.write(f"# not measured: {failed}\n")
    return result


PALLAS = Peer("pallas", _measure, lambda settings: len(settings.matmuls()), {"pallas": "#CC79A7"})
