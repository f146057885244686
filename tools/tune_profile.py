"""Measures the profile of the overlap model on the GPUs of this node.

    python tools/tune_profile.py [FILE] [--minutes 4] [--probe PROBE] [--compare]

It prints the profile as source for overlap/profiles.py. FILE is what `python -m jax_intranode tune`
has written on this node: it gets the profile.

The overlap model (overlap/) predicts what an overlapped matmul costs under each plan. Its constants
are a `Profile`. The measurement starts from the profile that these GPUs have today: their own, or
the H200's scaled by what they report. It times the fused kernel and cuBLASLt by
tools/fused_probe.cu, which it compiles with nvcc, and copies between two GPUs by JAX. From these
times it corrects the rates and the tile times of the profile. The other constants (thresholds,
margins, latencies) keep their values; each names the measurement that yields it in the comment on
its field.

Every calibration run has the time that an H200 took. What is fitted is how much faster or slower
these GPUs are than the model expects relative to that, so that the model's own errors cancel. A
constant changes only if the measurements differ by more than runs and boards of one kind do
(`TOLERANCE`). A measurement that fails leaves its constants as they are, and says so.

It takes 2 GPUs or more and uses two. About 4 minutes, of which nvcc takes one or two.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_intranode._src.command_line.bench import settings as of_bench
from jax_intranode._src.command_line.launcher.own_files import private_directory
from jax_intranode._src.group import topology
from jax_intranode._src.selection import tuning
from jax_intranode._src.selection.overlap import model, profiles
from jax_intranode._src.selection.overlap import plan as plans
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.profiles import H200, Profile
from jax_intranode._src.selection.overlap.sizes import Sizes

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
_ROOT = Path(__file__).resolve().parents[1]
_GPUS = 2
_RING_BYTES = 512 << 20  # as the probe has it, and the default of JAX_INTRANODE_RING_MIB
_SETTLE_MS = 150

# Relative changes that runs and boards of one kind show: a smaller one keeps the constant.
TOLERANCE = {
    "stage": 0.04,
    "fixed": 0.15,
    "sum": 0.15,
    "sender": 0.04,
    "matmul": 0.04,
    "copy": 0.04,
}
# Assumptions before measuring: relative standard deviations of the corrections, and of a
# time. The widths of tiles hardly change relative to each other.
_PRIOR = {"stage": 0.3, "fixed": 0.1, "sum": 0.1, "sender": 0.1}
_PRIOR_OF_WIDTH = 0.02
_NOISE = 0.02
_DISTURBED = 4  # standard deviations


# The measurements.


class Product(NamedTuple):
    """A collective matmul of a group, between two GPUs that stand for its ranks.

    Attributes:
        operation: GATHER or SCATTER.
        ranks: ranks of the group.
        m, k, n: the matmul on one GPU.
    """

    operation: str
    ranks: int
    m: int
    k: int
    n: int

    @property
    def sizes(self) -> Sizes:
        """The sizes, for the model."""
        return Sizes(self.operation, 1, self.m // self.ranks, (self.k,), (self.n,), self.ranks)


class Calibration(NamedTuple):
    """A run of the fused kernel after a rest: a plan, as the probe takes it, of a product.

    Attributes:
        h200_ms: what 2 H200s took.
    """

    product: Product
    plan: str
    h200_ms: float

    def predicted_s(self, profile: Profile) -> float:
        """What the model expects of the kernel, without the fixed time of a call."""
        costs = model.Costs(self.product.sizes, profile)
        return model.FusedCosts(costs, plans.parse(self.plan).tile_columns).seconds


# Of each product the columns of a tile, band_pairs or direct, and what 2 H200s took.
_RUNS = {
    Product(GATHER, 2, 8192, 4096, 1792): [(192, 6, 0.1885), (224, 8, 0.1799), (256, 9, 0.1939)],
    Product(GATHER, 4, 8192, 4096, 1792): [(192, 6, 0.1973), (224, 8, 0.1879), (256, 9, 0.1916)],
    Product(GATHER, 2, 4096, 8192, 3584): [(192, 3, 0.3476), (224, 4, 0.3375), (256, 4, 0.3593)],
    Product(GATHER, 4, 4096, 8192, 3584): [(192, 3, 0.3559), (224, 4, 0.3451), (256, 4, 0.3673)],
    Product(GATHER, 2, 2048, 8192, 5120): [
        *((128, 1, 0.2536), (192, 2, 0.2739), (224, 2, 0.2513), (256, 3, 0.2675))
    ],
    Product(GATHER, 4, 8192, 8192, 1024): [(192, 11, 0.3202), (224, 13, 0.3091), (256, 16, 0.3051)],
    Product(GATHER, 4, 8192, 8192, 2560): [(192, 4, 0.5078), (224, 5, 0.5142), (256, 6, 0.4811)],
    Product(GATHER, 2, 8192, 8192, 5120): [(192, 8, 0.9697), (224, 8, 0.9838), (256, 8, 0.9182)],
    Product(SCATTER, 2, 8192, 3584, 8192): [(192, 1, 0.638)],
    Product(SCATTER, 4, 8192, 3584, 8192): [(192, 1, 0.649)],
    Product(SCATTER, 2, 4096, 3584, 8192): [(192, 1, 0.336), (256, 0, 0.344)],
    Product(SCATTER, 2, 8192, 7168, 4096): [(192, 1, 0.661), (256, 0, 0.648)],
    Product(SCATTER, 2, 2048, 8192, 16384): [(192, 1, 0.753), (256, 0, 0.737)],
    Product(SCATTER, 4, 4096, 2048, 8192): [(192, 0, 0.225)],
    Product(SCATTER, 4, 8192, 2048, 8192): [(192, 0, 0.423)],
    Product(SCATTER, 4, 2048, 2048, 8192): [(256, 0, 0.122)],
}
CALIBRATIONS = [
    Calibration(product, f"tile_columns={columns},{field}={value}", ms)
    for product, runs in _RUNS.items()
    for field in ["band_pairs" if product.operation == GATHER else "direct"]
    for columns, value, ms in runs
]

# Settled matmuls by cuBLASLt: M, K, N and what an H200 took.
MATMULS = [
    ((32768, 2048, 8192), 1.59),
    ((8192, 3584, 8192), 0.71),
    ((4096, 8192, 3584), 0.366),
]


# The fit.


def corrected(profile: Profile, corrections: Mapping[str, float]) -> Profile:
    """Returns a profile with constants multiplied by corrections; the default is 1.

    Args:
        profile: the profile to start from.
        corrections: "stage": the stages of all tiles; "stage of 192" (or another width): those of
            one width; "fixed": the other time of a tile; "sum": the sums; "sender": the rate of the
            sender warps; "matmul": cuBLASLt's rate; "copy": the rate of the copy engines.
    """

    def of(name: str) -> float:
        return corrections.get(name, 1.0)

    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return dataclasses.replace(
        profile,
        matmul_flops=profile.matmul_flops * of("matmul"),
        copy_bytes_per_s=profile.copy_bytes_per_s * of("copy"),
        link_bound_bytes_per_s=profile.link_bound_bytes_per_s * of("copy"),
        sender_bytes_per_s=profile.sender_bytes_per_s * of("sender"),
        tiles={
            columns: dataclasses.replace(
                tile,
                stage_s=tile.stage_s * of("stage") * of(f"stage of {columns}"),
                gather_s=tile.gather_s * of("fixed"),
                scatter_s=times(tile.scatter_s, of("fixed")),
                sum_s=times(tile.sum_s, of("sum")),
            )
            for columns, tile in profile.tiles.items()
        },
    )


def fit(profile: Profile, measured: Sequence[tuple[Calibration, float]]) -> dict[str, float]:
    """Returns the corrections of a profile under which the model explains measured times best.

    Runs that it explains badly were probably disturbed. They are left out of a second fit.

    Args:
        profile: the profile to correct.
        measured: calibration runs and what they took, in milliseconds.
    """
    corrections = _fit_all(profile, measured)
    trial = corrected(profile, corrections)
    good = [(run, ms) for run, ms in measured if abs(_error(run, ms, trial)) < _DISTURBED * _NOISE]
    if len(measured) // 2 < len(good) < len(measured):
        for run, ms in measured:
            if (run, ms) not in good:
                _say(f"# left out, as if disturbed: {run.product} {run.plan}: {ms:.4f} ms")
        return _fit_all(profile, good)
    return corrections


def _error(run: Calibration, ms: float, profile: Profile) -> float:
    """Log of how much longer a run took than the model expects, relative to an H200's run."""
    expected = run.h200_ms * run.predicted_s(profile) / run.predicted_s(H200)
    return math.log(ms / expected)


def _fit_all(profile: Profile, measured: Sequence[tuple[Calibration, float]]) -> dict[str, float]:
    """The same of all runs."""
    names = [*_PRIOR, *(f"stage of {columns}" for columns in profile.tiles)]
    prior = np.array([_PRIOR.get(name, _PRIOR_OF_WIDTH) for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        trial = corrected(profile, dict(zip(names, np.exp(logs), strict=True)))
        of_times = [_error(run, ms, trial) for run, ms in measured]
        return np.concatenate([np.array(of_times) / _NOISE, logs / prior])

    # Gauss-Newton; the model is piecewise linear in its constants.
    logs = np.zeros(len(names))
    for _ in range(20):
        now, step = residuals(logs), 1e-4
        slopes = [(residuals(logs + step * unit) - now) / step for unit in np.eye(len(names))]
        change = np.linalg.lstsq(np.stack(slopes, 1), -now, rcond=None)[0]
        # A shorter step wherever the full one makes it worse, past a kink of the model.
        while np.abs(change).max() > 1e-6 and _square(residuals(logs + change)) > _square(now):
            change = change / 2
        logs = logs + change
        if np.abs(change).max() < 1e-6:
            break
    return dict(zip(names, np.exp(logs).tolist(), strict=True))


def _square(values: np.ndarray) -> float:
    return float(values @ values)


def significant(corrections: Mapping[str, float]) -> dict[str, float]:
    """Returns the corrections that are larger than what runs and boards of one kind show."""
    return {
        name: factor
        for name, factor in corrections.items()
        if abs(math.log(factor)) > TOLERANCE[name.split()[0]]
    }


# Measuring.


class Clock:
    """Knows how much of the time limit is left."""

    def __init__(self, limit_s: float):
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Returns the seconds left."""
        return self._end - time.monotonic()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compile_probe(directory: Path, timeout_s: float) -> Path | None:
    """Compiles tools/fused_probe.cu; returns None and says why if that fails."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    probe = directory / "fused_probe"
    cuda = _ROOT / "xla_ffi" / "cuda"
    sources = [
        cuda / name
        for name in (
            *("fused_matmul.cc", "fused_bf16.cu", "fused_f16.cu", "slab.cu"),
            *("tensor_map.cc", "cublas_lt.cc"),
        )
    ]
    command = [
        *(nvcc, "-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-I", str(cuda)),
        *("-o", str(probe), str(_ROOT / "tools" / "fused_probe.cu"), *map(str, sources), "-ldl"),
    ]
    try:
        subprocess.run(command, check=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"# the probe was not compiled: {error}")
        return None
    return probe


def parse_probe(text: str) -> list[tuple[float, float]]:
    """Returns what the probe printed: milliseconds of each plan, and of the matmul alone.

    Raises:
        ValueError: results were wrong.
    """
    found = re.findall(r"([\d.]+) ms, share [\d.]+, matmul alone ([\d.]+), #wrong (\d+)", text)
    if any(wrong != "0" for _, _, wrong in found):
        raise ValueError(f"wrong results:\n{text}")
    return [(float(ms), float(alone)) for ms, alone, _ in found]


def run_probe(
    probe: Path, product: Product, plan_texts: Sequence[str], settle_ms: int = 0
) -> list[tuple[float, float]]:
    """Times plans of an operation in alternation.

    Args:
        probe: the compiled probe.
        product: the operation and its sizes.
        plan_texts: the plans.
        settle_ms: how long each runs before it is timed; 0 for a rest.

    Raises:
        OSError, subprocess.SubprocessError, ValueError: it failed, or its results are wrong.
    """
    operation, ranks, m, k, n = product
    command = [str(probe), str(ranks), operation, f"{m},{k},{n},{settle_ms}", *plan_texts]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:_GPUS]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)},
        check=False,
    )
    times = parse_probe(result.stdout)
    if result.returncode or len(times) != len(plan_texts):
        raise ValueError(
            f"{' '.join(command)} failed: {result.stdout[-500:]}{result.stderr[-500:]}"
        )
    return times


def measure_calibrations(
    run: Callable[..., list[tuple[float, float]]], clock: Clock
) -> list[tuple[Calibration, float]]:
    """Times the calibration runs, those of one shape together, until the time is up."""
    measured = []
    for product, of_product in itertools.groupby(CALIBRATIONS, lambda of_one: of_one.product):
        runs = list(of_product)
        if clock.left_s() < 10:
            _say(f"# not measured for want of time: {product}")
            continue
        try:
            times = run(product, [of_one.plan for of_one in runs])
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            _say(f"# not measured: {product}: {error}")
            continue
        for of_one, (ms, _) in zip(runs, times, strict=True):
            measured.append((of_one, ms))
            _say(f"# {product} {of_one.plan}: {ms:.4f} ms, an H200 {of_one.h200_ms:.4f}")
    return measured


def measure_matmul(run: Callable[..., list[tuple[float, float]]], clock: Clock) -> float | None:
    """Returns how many times faster than an H200's settled matmuls are; None if none was timed."""
    ratios = []
    for (m, k, n), h200_ms in MATMULS:
        if clock.left_s() < 10:
            break
        try:
            ((_, ms),) = run(Product(GATHER, _GPUS, m, k, n), ["tile_columns=256"], _SETTLE_MS)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            _say(f"# not measured: matmul {m} x {k} x {n}: {error}")
            continue
        _say(f"# matmul {m} x {k} x {n}, settled: {ms:.4f} ms, an H200 {h200_ms:.4f}")
        ratios.append(h200_ms / ms)
    return statistics.median(ratios) if ratios else None


# Both directions at the same time, as collectives use the links. Prints bytes per second.
_COPIES = """
import time, jax, jax.numpy as jnp
there, back = jax.devices()[:2]
nbytes = NBYTES
x, y = (jax.device_put(jnp.ones(nbytes // 4, jnp.float32), d) for d in (there, back))
seconds = []
for _ in range(8):
    jax.block_until_ready((x, y))
    start = time.perf_counter()
    jax.block_until_ready((jax.device_put(x, back), jax.device_put(y, there)))
    seconds.append(time.perf_counter() - start)
print(nbytes / sorted(seconds[1:])[3])
"""


def measure_copies(timeout_s: float, nbytes: int = 4 << 30) -> float | None:
    """Returns the bytes per second that JAX copies from GPU to GPU, or None if that fails."""
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _COPIES.replace("NBYTES", str(nbytes))],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            check=True,
        )
        return float(result.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        _say(f"# copies were not measured: {error}")
        return None


def tune(
    start: Profile,
    run: Callable[..., list[tuple[float, float]]] | None,
    copies: Callable[[], float | None],
    clock: Clock,
) -> tuple[Profile, dict[str, float]]:
    """Measures, and returns the corrected profile and all corrections before the tolerance."""
    corrections: dict[str, float] = {}
    rate = copies()
    if rate is not None and rate > start.link_bound_bytes_per_s / 3:
        _say(f"# copies: {rate / 1e9:.1f} GB/s, expected {start.link_bound_bytes_per_s / 1e9:.1f}")
        corrections["copy"] = rate / start.link_bound_bytes_per_s
    elif rate is not None:
        _say(f"# copies: {rate / 1e9:.1f} GB/s: not from GPU to GPU; the profile keeps its rate")
    if run is not None:
        speed = measure_matmul(run, clock)
        if speed is not None:
            corrections["matmul"] = speed * H200.matmul_flops / start.matmul_flops
        measured = measure_calibrations(run, clock)
        if len(measured) >= len(CALIBRATIONS) // 2:
            corrections |= fit(start, measured)
        else:
            _say("# too few runs of the fused kernel: the profile keeps its tile times")
    return corrected(start, significant(corrections)), corrections


# Output.


def to_source(profile: Profile) -> str:
    """Returns a profile as Python source for overlap/profiles.py."""
    lines = [f"{re.sub('[^A-Z0-9]+', '_', profile.name.upper())} = Profile("]
    for field in dataclasses.fields(profile):
        value = getattr(profile, field.name)
        if field.name == "tiles":
            lines.append("    tiles={")
            for columns, tile in value.items():
                costs = ", ".join(
                    f"{name}={_number(cost)}" for name, cost in dataclasses.asdict(tile).items()
                )
                lines.append(f"        {columns}: TileCosts({costs}),")
            lines.append("    },")
        elif field.name not in ("scaled_from", "tuned_by"):
            lines.append(f"    {field.name}={_number(value)},")
    return "\n".join([*lines, ")"])


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


# Comparing plans.


class Case(NamedTuple):
    """A reference shape: the forward pass, or the collective matmul of the backward pass.

    Attributes:
        wgrads: 1 if its weight gradient is wanted, too, as in a backward pass.
    """

    product: Product
    wgrads: int

    def __str__(self) -> str:
        operation, ranks, m, k, n = self.product
        wgrad = " and weight gradient" if self.wgrads else ""
        return f"{operation} {m} x {k} x {n}{wgrad}, {ranks} ranks"

    def choose(self, profile: Profile) -> tuple[Plan | None, str]:
        """Returns the plan (None: not overlapped) and how it is described."""
        sizes = self.product.sizes
        chosen = model.choose(sizes, profile, _RING_BYTES, self.wgrads)
        suffix = ""
        if isinstance(chosen, str) and self.wgrads:
            chosen, suffix = model.choose(sizes, profile, _RING_BYTES), ", then a matmul"
        if isinstance(chosen, str):
            return None, "not overlapped"
        return chosen, f"{chosen}{suffix}"


def reference_cases() -> list[Case]:
    """Returns the reference shapes of `bench` for 2, 4 and 8 ranks, forward and backward."""
    cases = []
    for ranks in (2, 4, 8):
        for operation, transpose in ((GATHER, SCATTER), (SCATTER, GATHER)):
            for m, k, n in of_bench.of_presets(["reference"], operation, ranks):
                cases.append(Case(Product(operation, ranks, m, k, n), 0))
                cases.append(Case(Product(transpose, ranks, m, n, k), 1))
    return cases


def _probe_text(case: Case, plan: Plan) -> str:
    fields = {name: int(value) for name, value in dataclasses.asdict(plan).items()}
    after = ",wgrad_after=1" if case.wgrads and not plan.wgrad else ""
    return ",".join(f"{name}={value}" for name, value in fields.items()) + after


def _time_by_bench(case: Case, plan: Plan | None, timeout_s: float) -> float:
    """Times a plan (None: not overlapped) of a forward pass by `bench`, in milliseconds."""
    forced = plan if plan is not None else Plan()
    values = ",".join(f"{name}={int(v)}" for name, v in dataclasses.asdict(forced).items())
    operation, _, *shape = case.product
    with private_directory() as directory:
        path = directory / "rows.json"
        command = [
            *(sys.executable, "-P", "-m", "jax_intranode", "bench", operation, "--devices", "2"),
            *("--platform", "gpu", "--mode", "single-process", "-n", "5", "-w", "1"),
            *("--shapes", ",".join(map(str, shape)), "--plan", values, "--json", str(path)),
        ]
        subprocess.run(
            command, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL, cwd=directory
        )
        (row,) = json.loads(path.read_text())["rows"]
    return float(row["time_us" if plan is not None else "lax_time_us"]) / 1e3


def _time_both(
    case: Case,
    both: Sequence[Plan | None],
    run: Callable[..., list[tuple[float, float]]] | None,
    clock: Clock,
) -> str:
    """Times two plans of a case; returns the text for the table."""
    fused = [plan for plan in both if plan is not None and plan.fused]
    try:
        if len(fused) == 2 and run is not None:
            times = run(case.product, [_probe_text(case, plan) for plan in fused], _SETTLE_MS)
            today, new = (ms for ms, _ in times)
        elif case.wgrads or case.product.ranks != _GPUS:
            return "not measured: it takes a benchmark of another kind"
        elif clock.left_s() < 60:
            return "not measured for want of time"
        else:
            today, new = (_time_by_bench(case, plan, clock.left_s()) for plan in both)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"not measured: {error}"
    verdict = "within 2 %" if new <= 1.02 * today else "SLOWER"
    return f"{today:.4f} ms today, {new:.4f} ms by the new plan: {new / today - 1:+.1%}, {verdict}"


def compare(
    today: Profile,
    measured: Profile,
    run: Callable[..., list[tuple[float, float]]] | None,
    clock: Clock,
) -> None:
    """Prints the plans of both profiles for each reference shape, and times those that differ."""
    cases = reference_cases()
    same = 0
    for case in cases:
        (old, old_text), (new, new_text) = case.choose(today), case.choose(measured)
        print(f"{case}\n    today: {old_text}")
        if old_text == new_text:
            same += 1
            print("    measured profile: the same")
            continue
        print(f"    measured profile: {new_text}\n    {_time_both(case, (old, new), run, clock)}")
    print(f"{same} of {len(cases)} plans are the same")


def start_profile() -> Profile | str:
    """Returns the profile that the GPUs of this node have today, or why there is none."""
    reports = topology.read_links()[:_GPUS]
    if len(reports) < _GPUS:
        return f"NVML shows {len(reports)} GPUs, and this takes {_GPUS}"
    facts = [topology.read_facts(report.bus_id, report.name) for report in reports]
    for of_one in facts:
        _say(f"# {of_one}")
    return profiles.from_facts(facts)


def measure(limit_s: float, probe: Path | None = None, compares: bool = False) -> Profile | str:
    """Measures the GPUs of this node.

    Args:
        limit_s: time limit in seconds.
        probe: a compiled tools/fused_probe.cu; None to compile it.
        compares: whether to print the plans of both profiles for the reference shapes of `bench`,
            and to time those that differ.

    Returns:
        The profile, or why nothing was measured.
    """
    clock = Clock(limit_s)
    start = start_profile()
    if isinstance(start, str):
        return start
    with private_directory() as directory:
        probe = probe or compile_probe(directory, clock.left_s() - 20)

        def run(*run_arguments: object) -> list[tuple[float, float]]:
            assert probe is not None
            return run_probe(probe, *run_arguments)  # type: ignore[arg-type]

        profile, corrections = tune(
            start, run if probe else None, lambda: measure_copies(40), clock
        )
        print(f"# {profile.name}: corrections of {start.scaled_from or start.name}'s constants")
        kept = significant(corrections)
        for name, factor in corrections.items():
            note = "" if name in kept else f", within the tolerance of {TOLERANCE[name.split()[0]]}"
            print(f"#   {name}: {factor:.3f}{note}")
        if not corrections:
            return "neither the kernels nor the copies could be measured"
        if compares:
            compare(start, profile, run if probe else None, clock)
    return dataclasses.replace(profile, scaled_from="")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints and writes the profile; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="FILE", help="a file of `tune` to add the profile to")
    add("--minutes", type=float, default=4, help="how long to measure (default 4)")
    add("--probe", type=Path, metavar="PROBE", help="a compiled tools/fused_probe.cu")
    text = (
        "print the plans of bench's reference shapes by today's and by the measured constants, "
        "and time those that differ"
    )
    add("--compare", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.file is not None:
        tuning.read(str(options.file))  # or it raises an error, before anything takes time
    profile = measure(60 * options.minutes, options.probe, options.compare)
    if isinstance(profile, str):
        print(f"# not measured: {profile}")
        return 1
    print(to_source(profile))
    if options.file is not None:
        fields = json.loads(options.file.read_text())
        tuning.write(options.file, {**fields, "profile": dataclasses.asdict(profile)})
        print(f"# {options.file} has it now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
