"""Checks and measures what needs GPUs, in steps with limits of their own.

Runs the steps that have no line in OUT/steps.jsonl yet. The package has to be installed, and flax
and optax for one of the `examples`. The groups `collectives` to `matmuls` make the files that
`performance_page.py --add` takes over. CUDA_VISIBLE_DEVICES chooses the GPUs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from jax_intranode._src.operations import COLLECTIVE, of_kind

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "xla_ffi" / "cuda"
PYTHON = f"{sys.executable} -P -m"
TEST = f"{PYTHON} pytest -q --full -p no:cacheprovider --rootdir={ROOT}"
NVCC = f"nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -ldl -I {CUDA}"
# XLA causes errors of API calls on purpose. None of its tools looks at races between GPUs.
SANITIZER = "compute-sanitizer --target-processes all --error-exitcode 1 --report-api-errors no"
SANITIZER += " --kernel-name kns=jax_intranode"
# How each example begins, and when it has to have said it.
EXAMPLE_SAYS, EXAMPLE_SAYS_IN_S = re.compile(r"\d+ devices \(.+\): "), 10
PROBES = {
    "fused_probe": "fused_matmul.cc fused_bf16.cu fused_f16.cu slab.cu tensor_map.cc cublas_lt.cc",
    "collectives_probe": "kernels_bare.cu collectives.cc slab.cu",
    "few_rows_probe": "few_rows.cu tensor_map.cc slab.cu",
}


def steps(out: Path, devices: int, cpu: bool) -> list[tuple[str, str, int, str, str]]:
    """Group, name, limit in seconds, command and variables of each step, in their order."""
    found = []
    on = f"--platform {'cpu' if cpu else 'gpu'} --devices {devices}"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    kinds = "CPU" if cpu else subprocess.run(query, capture_output=True, text=True).stdout
    kind = re.findall(r"[A-Z]+[0-9]+|CPU", kinds)[0].lower()  # "h100" of "NVIDIA H100"
    suffix = f"_{devices}_{kind}"
    sizes, large = ("-b 1K -e 4K",) * 2 if cpu else ("-b 1K -e 64M", "-b 16M -e 256M")
    preset = f"--preset {'tiny' if cpu else 'reference -n 3 -w 1'}"
    few, one = ("-n 2 -w 1", preset) if cpu else ("-n 9 -w 2", "--shapes 8192,8192,8192 -n 3")

    def add(group: str, name: str, limit_s: int, command: str, variables: str = "") -> None:
        found.append((group, name, limit_s, command, variables))

    def bench(group: str, name: str, limit_s: int, what: str, env: str = "") -> None:
        mode = "single-process" if name.endswith("_one_process") else "process-per-device"
        command = f"{sys.executable} {ROOT}/tools/bench.py {on} --mode {mode} {few} {what}"
        add(group, name + suffix, limit_s, f"{command} --json {out}/{name}{suffix}.json", env)

    required = f"JAX_INTRANODE_TIMEOUT_S=20 JAX_INTRANODE_REQUIRE_GPUS={0 if cpu else devices}"
    add("tests", "machine", 60, f"{PYTHON} jax_intranode info")
    of_ranks = sorted((ROOT / "tests" / "multiprocess").glob("test_*.py"))
    names = ("psum", "contract", "life_cycle", "explain", "collective_matmul", "overlap")
    for file in [*of_ranks, *(ROOT / "tests" / f"test_{name}.py" for name in names)]:
        add("tests", file.stem, 300, f"{TEST} {file}", required)
    stress = f"{sys.executable} {ROOT}/tests/stress/run.py {on}"
    add("tests", "stress", 200, f"{stress} --minutes {0.2 if cpu else 2}")
    faults = f"{TEST} {ROOT}/tests/multiprocess/test_faults.py::test_fault"
    add("tests", "faults", 200, faults, f"{required} FAULTS={2 if cpu else 12}")
    # With their defaults, in one process and, where they say so, in a process per GPU.
    launch = f"{PYTHON} jax_intranode launch {f'-n {devices} ' if cpu else ''}"
    for file in sorted((ROOT / "examples").rglob("*.py")):
        add("examples", f"example_{file.stem}", 60, f"{sys.executable} -P {file}")
        if "jax_intranode launch" in file.read_text():
            add("examples", f"example_{file.stem}_launched", 60, f"{launch}{file}")
    # The kernels alone; a GPU stands for several ranks if there are fewer.
    for probe, sources in PROBES.items():
        files = [f"{ROOT}/tools/{probe}.cu", *(f"{CUDA}/{name}" for name in sources.split())]
        add("probe", probe, 300, f"{NVCC} -o {out}/{probe} {' '.join(files)}")
        for ranks in (2, 3, 4, 8):
            add("probe", f"{probe}_{ranks}", 120, f"{out}/{probe} {ranks} check")
    add("probe", "collectives_probe_mesh", 120, f"{out}/collectives_probe 8 check-mesh")
    # Kernels get slower, so peers wait longer. JAX's memory pool would hide overruns.
    slow = f"{required} JAX_INTRANODE_TIMEOUT_S=900 XLA_PYTHON_CLIENT_ALLOCATOR=platform"
    test = f"{TEST} -o timeout=1800 {ROOT}/tests/test_psum.py -k every_world_size"
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        add("sanitizers", tool, 300, f"{SANITIZER} --tool {tool} {test}", slow)
    tuned = f"JAX_INTRANODE_TUNING={out}/tuning.json"
    tune = f"{PYTHON} jax_intranode tune {on} -o {out}/tuning.json"
    add("tune", "tune", 330, f"{tune} --minutes {0.3 if cpu else 4}")
    if not cpu:
        of_matmuls = f"{sys.executable} {ROOT}/tools/tune_profile.py {out}/tuning.json"
        add("tune", "tune_profile", 330, of_matmuls)
    for name in ("psum", "psum_scatter", "all_gather"):
        bench("tune", f"{name}_large", 45, f"{name} {large}")
        bench("tune", f"{name}_tuned", 45, f"{name} {large}", tuned)
    for name in (record.name for record in of_kind(COLLECTIVE)):
        bench("collectives", name, 75, f"{name} {sizes}")
        bench("collectives", f"{name}_one_process", 75, f"{name} {sizes}")
    bench("collectives", "halo", 80, "halo")
    # With the step `ppermute`: what two GPUs have to show of permutes, in 10 minutes.
    by_8 = sizes if cpu else "-b 2K -e 64M -f 8"
    for name in ("psum", "pmax", "pmin", "ppermute"):
        bench("permutes", f"{name}_int32", 75, f"{name} {by_8} -d int32")
    ways = "--ways ours,lax,none --lax-flags tuned"
    swaps = ",".join(f"swaps_{n}_of_{kib}k" for kib in (1, 64) for n in (1, 2))
    bench("permutes", "swaps", 80, f"halo,{swaps}")
    bench("experts", "mixture_of_experts", 110, f"mixture_of_experts {ways}")
    for name in ("dispatch", "dispatch_and_combine"):
        bench("experts", name, 110, f"{name}_128,{name}_4096 --ways ours,lax,none")
    chains = f"{stress} --minutes {0.2 if cpu else 1.5} --operations"
    add("permutes", "random_permutes", 150, f"{chains} ppermute,pmax,pmin")
    for name in ("decode", "tensor_parallel", "sequence_parallel", "fsdp", "data_parallel"):
        bench("auto", f"auto_{name}", 150, f"auto_{name}")
    for rows in (1, 16, 64, 1024):
        bench("decode", f"norms_{rows}", 60, f"norms_{rows}", "JAX_INTRANODE_FUSE_NORMS=never")
    for program in ("", "_sums", "_matmuls"):
        for batch in (1, 16):
            bench("decode", f"decode_8b_{batch}{program}", 120, f"decode_8b_{batch}{program}")
    for name in ("decode_scanned", "decode_unrolled", "transformer", "mlp_block", "train_step"):
        bench("matmuls", name, 110, name)
    # In two commands, because starting processes and JAX takes as long as a program.
    for name, programs in {
        "decoding": "decode_8b_1,decode_8b_16,decode_unrolled",
        "training": "transformer,train_step,train_step_sequence_parallel,mlp_block",
    }.items():
        bench("programs", f"programs_{name}", 280, f"{programs} {ways}")
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        bench("matmuls", name, 120, f"{name} {preset}")
        bench("matmuls", f"{name}_backward", 140, f"{name} {preset} --backward")
        bench("peers", f"{name}_peers", 300, f"{name} {one} --peers all")
    bench("peers", "psum_peers", 150, f"psum {sizes} -f 32 --peers all")
    return [step for step in found if not cpu or step[0] not in ("probe", "sanitizers")]


def run(step: tuple[str, str, int, str, str], out: Path, cpu: bool) -> dict:
    """Runs a step; returns its line."""
    group, name, limit_s, command, variables = step
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if cpu else {})
    env |= dict(variable.split("=", 1) for variable in variables.split())
    words, log = f"timeout -s KILL {limit_s} {command}".split(), out / f"{name}.log"
    begun = time.monotonic()
    with log.open("w") as to, open(os.devnull) as empty:  # not in ROOT, which would be imported
        done = subprocess.Popen(words, cwd=out, env=env, stdin=empty, stdout=to, stderr=to)
        said = None  # after how many seconds
        while said is None and group == "examples" and done.poll() is None:
            time.sleep(0.1)
            if EXAMPLE_SAYS.search(log.read_text(errors="replace")):
                said = time.monotonic() - begun
        done.wait()
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
    outcome = done.returncode if done.returncode not in (-9, 137) else f"not done in {limit_s} s"
    if group == "examples" and outcome == 0 and (said is None or said > EXAMPLE_SAYS_IN_S):
        outcome = f"said nothing for {EXAMPLE_SAYS_IN_S} s"
    line = {"group": group, "step": name, "exit": outcome, "last": last}
    line |= {"said_after_s": round(said, 1)} if said else {}
    return line | {"seconds": round(time.monotonic() - begun, 1)}


def main() -> int:
    """Runs the steps; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for JSON files and logs")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="or group; default: all but peers")
    parser.add_argument(
        "--seconds", type=float, default=570, help="no step begins that could end later"
    )
    parser.add_argument("--devices", type=int, default=2, help="ranks; default: 2")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on CPU devices")
    options = parser.parse_intermixed_args()
    end, out, failed = time.monotonic() + options.seconds, options.out.resolve(), False
    found, lines = steps(out, options.devices, options.cpu), out / "steps.jsonl"
    asked = set(options.steps)
    names = dict.fromkeys(name for step in found for name in step[:2])
    if unknown := asked - names.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    lines.touch()
    done = {json.loads(line)["step"] for line in lines.read_text().splitlines()}
    for step in found:
        group, name, limit_s, *_ = step
        chosen = asked & {group, name} or (not asked and group != "peers")
        if not chosen or (name in done and name not in asked):
            continue
        if limit_s > end - time.monotonic():
            print(f"{name}: put off, it may take {limit_s} s", flush=True)
            continue
        line = run(step, out, options.cpu)
        with lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        failed = failed or line["exit"] != 0
        print(f"{name}: {line['exit']}, {line['seconds']} s", *line["last"], sep="\n  ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
