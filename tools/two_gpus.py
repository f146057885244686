"""Measures and checks on a machine with two GPUs what docs/performance.md needs, in small steps.

    python tools/two_gpus.py OUT [STEP...] [--seconds 570] [--pack FILE.tar.gz]

Each step is a command with a limit of its own (SIGKILL). It writes NAME.json and NAME.log to the
folder OUT, and its outcome is a line of OUT/steps.jsonl. A second run leaves out steps that have a
line, unless they are named. A group's name stands for its steps; --list shows all. No step begins
that could end after --seconds. --pack puts OUT into one file in the end. --cpu tries all steps with
tiny sizes on two CPU devices. The package has to be installed.
"""

import argparse
import contextlib
import json
import os
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
# Group, name, limit in seconds, command, more variables of its environment.
Step = tuple[str, str, int, list[str], dict[str, str]]


def steps(out: Path, cpu: bool) -> Iterator[Step]:
    """The steps, in the order in which they run. A name begins a JSON file's."""
    on = ["--platform", "cpu" if cpu else "gpu", "--devices", "2"]

    def command(group: str, name: str, limit_s: int, words: list[str], **env: str) -> Step:
        return group, name, limit_s, [*words, "--json", f"{out / name}.json"], env

    def bench(group: str, name: str, limit_s: int, what: str, mode: str = "", **env: str) -> Step:
        few = ["-n", "2", "-w", "1"] if cpu else []
        words = [*what.split(), "--mode", mode or "process-per-device", *on, *few]
        return command(group, name, limit_s, [*PACKAGE, "bench", *words], **env)

    yield "values", "machine", 60, [*PACKAGE, "info"], {}
    test = [*PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    needed = {"JAX_INTRANODE_TIMEOUT_S": "20", "JAX_INTRANODE_REQUIRE_GPUS": "0" if cpu else "2"}
    processes = [f"multiprocess/test_{name}_processes" for name in ("psum", "overlap", "norm")]
    for name in (*processes, "multiprocess/test_own_kernels", "test_psum", "test_overlap"):
        step = f"tests_{Path(name).name.removeprefix('test_')}"
        yield "values", step, 100, [*test, f"{ROOT}/tests/{name}.py"], needed
    soak = [*PACKAGE, "soak", *on]
    yield command("values", "soak", 200, [*soak, "--minutes", "0.2" if cpu else "2"])
    yield command("values", "faults", 200, [*soak, "--faults", "--cases", "1" if cpu else "10"])

    sizes = "-b 1K -e 4K" if cpu else "-b 1K -e 256M -n 15 -w 3"
    large = "-b 16K -e 64K" if cpu else "-b 16M -e 256M -n 15 -w 3"
    for name in ("psum", "psum_scatter", "all_gather", "all_to_all"):
        yield bench("collectives", f"{name}_processes", 75, f"{name} {sizes}")
        yield bench("collectives", f"{name}_one", 75, f"{name} {sizes}", "single-process")
    yield bench("collectives", "psum_segments", 60, f"psum {large} --algorithm two_shot")

    tuning = f"{out}/tuning.json"
    minutes = "0.3" if cpu else "4"
    yield "tune", "tune", 330, [*PACKAGE, "tune", *on, "-o", tuning, "--minutes", minutes], {}
    for name in ("psum", "psum_scatter", "all_gather"):
        yield bench("tune", f"{name}_shipped", 45, f"{name} {large}")
        yield bench("tune", f"{name}_tuned", 45, f"{name} {large}", JAX_INTRANODE_TUNING=tuning)

    for name in (
        "train_step",
        "train_step_sequence_parallel",
        "mlp_block",
        "decode_scanned",
        "transformer",
    ):
        yield bench("programs", name, 60, name)
    if "--auto" in subprocess.run([*PACKAGE, "bench", "-h"], capture_output=True, text=True).stdout:
        for name in ("tensor_parallel", "sequence_parallel", "fsdp", "data_parallel", "decode"):
            yield bench("auto", f"auto_{name}", 60, f"auto_{name} --auto")

    for rows in (1, 16, 64, 1024):
        name = f"norms_{rows}"
        yield bench("decode", name, 45, name, JAX_INTRANODE_FUSE_NORMS="always")
    for batch in (1, 16):
        model = [*("--size tiny" if cpu else "--size 8B --layers 8").split(), "--batch", str(batch)]
        yield bench("decode", f"decode_{batch}", 90, f"decode_8b_{batch}")
        torch = [*PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        peer = [*torch, f"{ROOT}/tools/decode_in_torch.py", *model]
        yield command("decode", f"decode_{batch}_torch", 90, peer)

    preset = "--preset tiny" if cpu else "--preset reference -n 3 -w 1"
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        yield bench("matmuls", f"{name}_forward", 100, f"{name} {preset}")
        yield bench("matmuls", f"{name}_backward", 100, f"{name} {preset} --backward")


def run(step: Step, out: Path, cpu: bool) -> dict[str, Any]:
    """Runs a step; returns its line."""
    group, name, limit_s, command, more = step
    # Where `bench` and `soak` find what an installed package lacks.
    tools = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tools")]))
    env = {**os.environ, "PYTHONPATH": tools, **more, **({"JAX_PLATFORMS": "cpu"} if cpu else {})}
    begun, log = time.monotonic(), out / f"{name}.log"
    code: int | None = None
    with log.open("w") as to:
        own = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, cwd=out, env=env, stdout=to, stderr=to, **own)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):  # also ends what the step has left behind
            os.killpg(process.pid, signal.SIGKILL)
    exit_code = f"not done within {limit_s} s" if code is None else code
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
    seconds = round(time.monotonic() - begun, 1)
    return {"group": group, "step": name, "exit": exit_code, "seconds": seconds, "last": last}


def main() -> int:
    """Runs the steps; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("out", type=Path, help="folder for JSON files and logs")
    add("steps", nargs="*", metavar="STEP", help="steps or groups (default: all)")
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
        print(*(f"{step[0]:12} {step[1]:30} {step[2]:4} s" for step in found), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    lines.touch()
    done, failed = {json.loads(line)["step"] for line in lines.read_text().splitlines()}, False
    for group, name, limit_s, *rest in found:
        if name not in asked and (name in done or (asked and group not in asked)):
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
