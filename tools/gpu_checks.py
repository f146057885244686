"""Checks and measures on a machine with GPUs what can't be run without them, in small steps.

    python tools/gpu_checks.py OUT [STEP...] [--seconds 570] [--pack FILE.tar.gz]

Each step is a command with a limit of its own (SIGKILL). It writes NAME.log, and most write
NAME.json, to the folder OUT; its outcome is a line of OUT/steps.jsonl. A second run leaves out
steps that have a line, unless they are named. A group's name stands for its steps; --list shows
all. Without names all groups run but `more`. No step begins that could end after --seconds. --pack
puts OUT into one file in the end. --cpu tries the steps with tiny sizes on two CPU devices. The
package has to be installed. CUDA_VISIBLE_DEVICES chooses the GPUs; measurements use the first two.

The group `figures` measures what docs/performance.md shows, in files that end with the number and
kind of the GPUs: copy them to docs/measurements, and run tools/performance_page.py.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, "-P"]
PACKAGE = [*PYTHON, "-m", "jax_intranode"]
PYTEST = [*PYTHON, "-m", "pytest", "-q", "--full", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
# Group, name, limit in seconds, command, more variables of its environment.
Step = tuple[str, str, int, list[str], dict[str, str]]

TESTS = ("psum", "contract", "life_cycle", "explain", "collective_matmul", "overlap")
# What each tool of compute-sanitizer finds: accesses outside of buffers, threads of a block that
# race for shared memory, loads of memory that nothing has written, barriers that not all threads
# reach. None looks at races between GPUs: tests/native/model does.
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# XLA causes errors of API calls on purpose.
SANITIZER = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "1",
             "--kernel-name", "kns=jax_intranode", "--report-api-errors", "no"]  # fmt: skip
NVCC = ["nvcc", "-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a"]
CUDA = ROOT / "xla_ffi" / "cuda"

PROGRAMS = ("transformer", "mlp_block", "train_step", "train_step_sequence_parallel",
            "decode_8b_1", "decode_8b_16", "decode_scanned", "decode_unrolled")  # fmt: skip
AUTO_SHARDED = ("auto_decode", "auto_tensor_parallel", "auto_sequence_parallel",
                "auto_data_parallel", "auto_fsdp")  # fmt: skip
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter")
COLLECTIVES = ("psum", "psum_scatter", "all_gather", "all_to_all")


def steps(out: Path, cpu: bool) -> Iterator[Step]:
    """The steps, in the order in which they run. A name begins a JSON file's."""
    yield "tests", "machine", 60, [*PACKAGE, "info"], {}
    needed = {"JAX_INTRANODE_TIMEOUT_S": "20", "JAX_INTRANODE_REQUIRE_GPUS": "0" if cpu else "2"}
    for file in sorted((ROOT / "tests" / "multiprocess").glob("test_*.py")):
        name = file.stem.removeprefix("test_")
        yield "tests", f"tests_{name}", 300, [*PYTEST, str(file)], needed
    for name in TESTS:
        yield "tests", f"tests_{name}", 300, [*PYTEST, f"{ROOT}/tests/test_{name}.py"], needed
    on = ["--platform", "cpu" if cpu else "gpu", "--devices", "2"]
    soak = [*PACKAGE, "soak", *on]
    for name, limit_s, options in (
        ("soak", 200, f"--minutes {0.2 if cpu else 2}"),
        ("faults", 200, f"--faults --cases {1 if cpu else 10}"),
    ):
        yield "tests", name, limit_s, [*soak, *options.split(), "--json", f"{out}/{name}.json"], {}
    if not cpu:
        yield from _probes(out)
        yield from _sanitizers()
    yield from _measurements(out, cpu, on)


def _probes(out: Path) -> Iterator[Step]:
    """The kernels alone, among any number of ranks: a GPU stands for several if there are fewer."""
    for probe, sources, more, checks in (
        (
            "fused_probe",
            ("fused_matmul.cc", "fused_bf16.cu", "fused_f16.cu", "slab.cu", "cublas_lt.cc"),
            ["-I", str(CUDA)],
            [f"{ranks} check" for ranks in range(2, 9)],
        ),
        (
            "collectives_probe",
            ("kernels_bare.cu", "collectives.cc", "slab.cu"),
            [],
            ["2 check", "3 check", "4 check", "8 check", "8 check-mesh", "3 check-other"],
        ),
    ):
        files = [f"{ROOT}/tools/{probe}.cu", *(str(CUDA / name) for name in sources)]
        yield "probe", probe, 300, [*NVCC, *more, "-o", f"{out}/{probe}", *files, "-ldl"], {}
        for check in checks:
            name = f"{probe}_{check.replace(' ', '_')}"
            yield "probe", name, 120, [f"{out}/{probe}", *check.split()], {}


def _sanitizers() -> Iterator[Step]:
    # It slows kernels down, so peers wait longer. JAX's memory pool would hide overruns.
    env = {
        "JAX_INTRANODE_REQUIRE_GPUS": "2",
        "JAX_INTRANODE_TIMEOUT_S": "900",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    chosen = "every_world_size or special_values or amid or random_program-0"
    test = [*PYTEST, "-o", "timeout=1800", f"{ROOT}/tests/test_psum.py", "-k", chosen]
    for tool in SANITIZERS:
        yield "sanitizers", tool, 300, [*SANITIZER, "--tool", tool, *test], env


def _measurements(out: Path, cpu: bool, on: list[str]) -> Iterator[Step]:
    def bench(group: str, name: str, limit_s: int, what: str, mode: str = "", **env: str) -> Step:
        words = [*what.split(), *on, *(["-n", "2", "-w", "1"] if cpu else [])]
        if mode != "both":
            words += ["--mode", mode or "process-per-device"]
        return (
            group,
            name,
            limit_s,
            [*PACKAGE, "bench", *words, "--json", f"{out}/{name}.json"],
            env,
        )

    suffix = "2_cpu" if cpu else f"2_{_kind_of_gpus()}"
    sizes = "-b 1K -e 4K" if cpu else "-b 1K -e 16M -n 25 -w 4"
    preset = "--preset tiny" if cpu else "--preset reference -n 3 -w 1"
    yield bench("figures", f"psum_{suffix}", 100, f"psum {sizes}", "both")
    name = f"psum_scatter_all_gather_{suffix}"
    yield bench("figures", name, 60, f"psum_scatter+all_gather {sizes}")
    for name in MATMULS:
        yield bench("figures", f"{name}_{suffix}", 100, f"{name} {preset}")
        yield bench("figures", f"{name}_backward_{suffix}", 100, f"{name} {preset} --backward")
    for name in PROGRAMS:
        yield bench("figures", f"{name}_{suffix}", 80, f"{name} -n 9 -w 2")

    for name in AUTO_SHARDED:
        yield bench("auto", f"{name}_{suffix}", 80, f"{name} -n 9 -w 2")

    sizes = "-b 1K -e 4K" if cpu else "-b 1K -e 256M -n 15 -w 3"
    large = "-b 16K -e 64K" if cpu else "-b 16M -e 256M -n 15 -w 3"
    for name in COLLECTIVES:
        yield bench("collectives", f"{name}_processes", 75, f"{name} {sizes}")
        yield bench("collectives", f"{name}_one", 75, f"{name} {sizes}", "single-process")
    yield bench("collectives", "psum_segments", 60, f"psum {large} --algorithm two_shot")

    tuning = f"{out}/tuning.json"
    tune = ["-o", tuning, "--minutes", "0.3" if cpu else "4"]
    yield "tune", "tune", 330, [*PACKAGE, "tune", *on, *tune], {}
    for name in COLLECTIVES[:3]:
        yield bench("tune", f"{name}_shipped", 45, f"{name} {large}")
        yield bench("tune", f"{name}_tuned", 45, f"{name} {large}", JAX_INTRANODE_TUNING=tuning)

    for rows in (1, 16, 64, 1024):
        name = f"norms_{rows}"
        yield bench("decode", name, 45, name, JAX_INTRANODE_FUSE_NORMS="always")
    for batch in (1, 16):
        yield bench("decode", f"decode_{batch}", 90, f"decode_8b_{batch}")
        model = "--size tiny" if cpu else "--size 8B --layers 8"
        peer = [*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        peer += [f"{ROOT}/tools/decode_in_torch.py", *model.split(), "--batch", str(batch)]
        name = f"decode_{batch}_torch"
        yield "decode", name, 90, [*peer, "--json", f"{out}/{name}.json"], {}

    types = "psum -d float32,int32,float64,float16"
    yield bench("more", "types", 200, f"{types} {'' if cpu else '-b 4K -e 4M -f 8 -n 9 -w 2'}")
    yield bench("more", "psum_peers", 150, "psum -b 1K -e 1M -f 32 -n 9 -w 2 --peers all")
    for name in MATMULS:
        yield bench("more", f"{name}_peers", 200, f"{name} {preset} --peers torch")


def _kind_of_gpus() -> str:
    """The model in the GPUs' name, as "h100" of "NVIDIA H100 80GB HBM3"."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\b[A-Z]+\d+\b", names)
    return found[0].lower() if found else "none"


def run(step: Step, out: Path, cpu: bool) -> dict[str, Any]:
    """Runs a step; returns its line."""
    group, name, limit_s, command, more = step
    # Where `bench` and `soak` find what an installed package lacks.
    tools = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tools")]))
    env = {**os.environ, "PYTHONPATH": tools, **more, **({"JAX_PLATFORMS": "cpu"} if cpu else {})}
    begun, log = time.monotonic(), out / f"{name}.log"
    exit_code: int | str = f"not done within {limit_s} s"
    with log.open("w") as to:
        try:
            process = subprocess.Popen(
                command,
                cwd=out,  # not where the source tree would be imported
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=to,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            exit_code = f"not run: {error.filename} is not on PATH"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(limit_s)
            with contextlib.suppress(ProcessLookupError):  # also ends what the step has left behind
                os.killpg(process.pid, signal.SIGKILL)
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
    seconds = round(time.monotonic() - begun, 1)
    return {"group": group, "step": name, "exit": exit_code, "seconds": seconds, "last": last}


def main() -> int:
    """Runs the steps; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="folder for JSON files and logs")
    add("steps", nargs="*", metavar="STEP", help="steps or groups (default: all groups but more)")
    add("--seconds", type=float, default=570, help="of this run (default 570)")
    add("--cpu", action="store_true", help="try all with tiny sizes on CPU devices")
    add("--pack", type=Path, metavar="FILE", help="a .tar.gz of the folder")
    add("--list", action="store_true", help="print the steps, and run none")
    options = parser.parse_intermixed_args()
    end, out, cpu = time.monotonic() + options.seconds, options.out.resolve(), options.cpu
    found, lines, asked = list(steps(out, cpu)), out / "steps.jsonl", set(options.steps)
    if unknown := asked - {name for step in found for name in step[:2]}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; --list shows all")
    if options.list:
        print(*(f"{step[0]:12} {step[1]:40} {step[2]:4} s" for step in found), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    lines.touch()
    done, failed = {json.loads(line)["step"] for line in lines.read_text().splitlines()}, False
    for group, name, limit_s, *rest in found:
        wanted = group in asked or (not asked and group != "more")
        if name not in asked and (name in done or not wanted):
            continue
        if limit_s > end - time.monotonic():
            print(f"{name}: put off, it may take {limit_s} s", flush=True)
            continue
        line = run((group, name, limit_s, *rest), out, cpu)
        with lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        failed = failed or line["exit"] != 0
        print(f"{name}: {line['exit']}, {line['seconds']} s", *line["last"], sep="\n  ", flush=True)
    if options.pack is not None:
        with tarfile.open(options.pack, "w:gz") as tar:
            tar.add(out, arcname=out.name)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
