"""Flags of XLA that should hide the collectives of `jax.lax`: `--lax-flags tuned`."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import ProgressLine, RankError

# NCCL registers buffers of at most this size for its symmetric kernels.
_SYMMETRIC = ",".join(f"{name}:8388608" for name in ("AllReduce", "AllGather", "ReduceScatter"))
FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    f"--xla_enable_nccl_symmetric_buffers_for_collectives={_SYMMETRIC}",
    *(f"--xla_gpu_enable_pipelined_{name}=true" for name in ("all_reduce", "all_gather")),
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_all_gather_mode=symmetric",
    "--xla_gpu_collective_permute_mode=symmetric",
)
_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS:(.*)")


def known_flags() -> str:
    """Prints and returns the flags that this jaxlib knows; prints also those that it does not.

    XLA ends the process in which it finds a flag that it does not know.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(FLAGS)}
    command = [sys.executable, "-P", "-c", "import jax; jax.devices()"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    found = _UNKNOWN.search(run.stderr)
    if run.returncode and not found:
        raise RuntimeError(f"XLA refuses the flags {' '.join(FLAGS)}:\n{run.stderr[:2000]}")
    unknown = found[1].split() if found else []
    known = " ".join(flag for flag in FLAGS if flag not in unknown)
    print(f"# lax tuned: {known}", flush=True)
    if unknown:
        print(f"# lax tuned, not known to this jaxlib: {' '.join(unknown)}", flush=True)
    return known


def measured(
    settings: Settings,
    variables: Mapping[str, str],
    flags: str,
    timeout_s: float,
    line: ProgressLine,
    run_mode: Callable[..., dict[str, Any]],
) -> Settings:
    """Runs the ranks of a mode with these flags; returns the settings with lax's times and checks.

    If that fails, one line on stderr says so, and the settings stay.
    """
    before = variables.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    variables = {**variables, "XLA_FLAGS": f"{before} {flags}".strip()}
    of_lax = dataclasses.replace(settings, ways=["lax"])
    try:
        rows = run_mode(of_lax, variables, timeout_s, line, shows_table=False)["rows"]
    except RankError as error:
        sys.stderr.write(f"# lax tuned not measured: it failed.\n{error}\n")
        return settings
    names = ("lax_time_us", "lax_time_p99_us", "lax_wrong")
    return dataclasses.replace(settings, lax_tuned=[[row.get(n) for n in names] for row in rows])
