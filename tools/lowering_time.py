"""How much longer tracing and lowering take when a program is rewritten.

    python tools/lowering_time.py [--layers 32] [--repetitions 9] [--only NAME...]

Traces and lowers a training step of a transformer, written with jax.lax, as it is and under
`jax_intranode.accelerate()` in turns. The layers are unrolled. No GPU is needed: programs for GPUs
are lowered for fake ones, whose rendezvous always succeeds.

The programs auto-* are plain jit programs over Auto axes, under `accelerate(auto=True)`. They are
also lowered after what XLA has answered for single operations is forgotten, as the first time.

Tracing does not know of the rewriting, so both ways count with the same time of it, that of all
runs. The time of the processor counts first: on a busy machine the time that passes says little.
Even so, other programs make it longer, in both ways; the least of all runs is the least disturbed.
"""

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import auto_corpus
import compare_lowered
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.rewrite.auto import partitioner

MATRICES = ("query", "key", "value", "output", "up", "gate", "down")

# Communication before and after a block of matmuls, as functions of an array.
Between = Callable[[Any], Any]


def norm(x: Any) -> Any:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def layer(x: Any, w: Any, before: Between, after: Between) -> Any:
    h = before(norm(x))
    scores = jax.nn.softmax((h @ w["query"]) @ (h @ w["key"]).swapaxes(-1, -2))
    x = x + after(scores @ (h @ w["value"]) @ w["output"])
    h = before(norm(x))
    return x + after((jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


def same(x: Any) -> Any:
    return x


def add(x: Any) -> Any:
    return lax.psum(x, "model")


def gather_rows(x: Any) -> Any:
    return lax.all_gather(x, "model", axis=1, tiled=True)


def scatter_rows(x: Any) -> Any:
    return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


@dataclass(frozen=True)
class Program:
    """A training step.

    Attributes:
        platform: "cpu" or "gpu".
        width: rows and columns of each matrix of a rank.
        rows: rows of the array that is multiplied.
        before: communication before a block of matmuls.
        after: communication after it.
    """

    platform: str
    width: int
    rows: int
    before: Between = same
    after: Between = same

    def built(self, mesh: jax.sharding.Mesh, layers: int) -> tuple[Any, Any]:
        """The step as a jitted function, and the types of its arguments."""
        return self._step(mesh), self._arguments(layers)

    def _step(self, mesh: jax.sharding.Mesh) -> Any:
        communicates = self.after is not same

        def loss(params: Any, x: Any) -> Any:
            for w in params:
                x = layer(x, w, self.before, self.after)
            return (x**2).mean()

        def step(params: Any, x: Any) -> Any:
            gradients = jax.grad(loss)(params, x)
            if communicates:
                gradients = jax.tree.map(lambda g: lax.pmean(g, "data"), gradients)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

        if not communicates:
            return jax.jit(step)
        of_x = P("data", "model") if self.before is gather_rows else P("data")
        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), of_x), out_specs=P(), check_vma=False
        )
        return jax.jit(sharded)

    def _arguments(self, layers: int) -> Any:
        dtype = jnp.bfloat16 if self.platform == "gpu" else jnp.float32
        matrix = jax.ShapeDtypeStruct((self.width, self.width), dtype)
        x = jax.ShapeDtypeStruct((2, self.rows, self.width), dtype)
        return [dict.fromkeys(MATRICES, matrix) for _ in range(layers)], x


@dataclass(frozen=True)
class AutoProgram:
    """A training step over Auto axes.

    Attributes:
        of_layers: makes a program of auto_corpus.py, with this many layers.
    """

    of_layers: Callable[[int], Any]
    platform = "cpu"

    def built(self, mesh: jax.sharding.Mesh, layers: int) -> tuple[Any, Any]:
        """As of `Program`."""
        auto = jax.sharding.AxisType.Auto
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(auto,) * 2)
        f, arguments, donated = self.of_layers(layers)(mesh)
        return auto_corpus.jitted(f, donated), auto_corpus.placed(arguments, mesh, False)


def transformer(specs: Any, of_x: Any, between: Any = None) -> AutoProgram:
    return AutoProgram(lambda layers: auto_corpus.transformer(specs, of_x, between, layers))


# Tensor parallelism sums after each block; with sequence parallelism it gathers before, and
# scatters after. "small" is too small for overlapped matmuls.
PROGRAMS: dict[str, Program | AutoProgram] = {
    "tensor-cpu": Program("cpu", 64, 8, after=add),
    "sequence-cpu": Program("cpu", 64, 8, gather_rows, scatter_rows),
    "tensor-gpu": Program("gpu", 4096, 2048, after=add),
    "tensor-gpu-small": Program("gpu", 512, 16, after=add),
    "sequence-gpu": Program("gpu", 4096, 4096, gather_rows, scatter_rows),
    "without-collectives": Program("cpu", 64, 8),
    "auto-tensor": transformer(auto_corpus.TENSOR, ("data",)),
    "auto-fsdp-tensor": transformer(auto_corpus.BOTH, ("data",)),
    "auto-sequence": transformer(auto_corpus.TENSOR, auto_corpus.SEQUENCE, auto_corpus.SEQUENCE),
    "auto-scan": AutoProgram(lambda layers: auto_corpus.scanned),
}


@dataclass(frozen=True)
class Run:
    """Seconds of one run, (of the processor, that passed), and how many operations are ours."""

    trace: tuple[float, float]
    lower: tuple[float, float]
    operations: int


@contextlib.contextmanager
def devices_of(platform: str) -> Iterator[None]:
    with compare_lowered.without_rendezvous() if platform == "gpu" else contextlib.nullcontext():
        yield


def run(program: Program | AutoProgram, layers: int, accelerated: bool) -> Run:
    mesh = compare_lowered.mesh_of(program.platform, {"data": 2, "model": 2})
    platforms = ("cuda" if program.platform == "gpu" else "cpu",)
    is_auto = isinstance(program, AutoProgram)
    with contextlib.ExitStack() as stack:
        stack.enter_context(devices_of(program.platform))
        if is_auto:
            stack.enter_context(auto_corpus.all_sizes())
        if accelerated:
            stack.enter_context(jax_intranode.accelerate(auto=is_auto))
        step, arguments = program.built(mesh, layers)
        gc.collect()
        times = [(time.process_time(), time.perf_counter())]
        traced = step.trace(*arguments)
        times.append((time.process_time(), time.perf_counter()))
        lowered = traced.lower(lowering_platforms=platforms)
        times.append((time.process_time(), time.perf_counter()))
    trace, lower = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(times)
    )
    return Run(trace, lower, lowered.as_text().count("@jax_intranode"))


def measure(name: str, layers: int, repetitions: int) -> None:
    program = PROGRAMS[name]
    plain: list[Run] = []
    accelerated: list[Run] = []
    first: list[Run] = []
    for repetition in range(-1, repetitions):
        ways = [(plain, False), (accelerated, True)]
        for runs, is_accelerated in ways if repetition % 2 else ways[::-1]:
            found = run(program, layers, is_accelerated)
            if repetition >= 0:
                runs.append(found)
        if isinstance(program, AutoProgram):
            partitioner._known.clear()
            first.append(run(program, layers, True))
    ratios = []
    for clock in (0, 1):
        trace = min(r.trace[clock] for r in (*plain, *accelerated))
        of_plain, of_accelerated = (min(r.lower[clock] for r in rs) for rs in (plain, accelerated))
        ratios.append((trace + of_accelerated) / (trace + of_plain))
        if clock == 0:
            median = statistics.median(r.lower[0] for r in accelerated) - statistics.median(
                r.lower[0] for r in plain
            )
            print(
                f"{name:>20}: trace {trace:.3f} s, lower {of_plain:.3f} s -> {of_accelerated:.3f} "
                f"s (median {median:+.3f} s), {accelerated[0].operations} operations of ours",
                flush=True,
            )
    if first:
        print(f"{'the first time':>20}: lower {min(r.lower[0] for r in first):.3f} s", flush=True)
    print(f"{'ratio':>20}: {ratios[0]:.3f} (of the time that passed {ratios[1]:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    for name in options.only:
        measure(name, options.layers, options.repetitions)


if __name__ == "__main__":
    main()
