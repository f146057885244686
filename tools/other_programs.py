"""Runs programs by others without and with `python -m jax_intranode run`, and compares them.

    python tools/other_programs.py SOURCES              # all programs
    python tools/other_programs.py SOURCES flax_wmt ...
    python tools/other_programs.py --list

SOURCES is a folder that has clones of their repositories; --list prints the commands that clone
them. The sources are not changed: the files in tools/programs call their training or decoding
steps, with random data and weights. A program can also be the path of such a file. The Python
packages that a program needs are installed into the folder WORK. They come on top of those of the
Python that runs this file, jax and this package among them.

Each way runs in a process of its own, on all GPUs or else on 4 CPU devices, with the same seeds.
The two processes take their steps in turns. On CPU devices the models are tiny. Printed are the
results of both ways and their largest difference, how many collectives were replaced and how many
were left, how many operations ran in our kernels, and the median time of a step: what passed, and
what it took of the processor, which counts where others use it, too. Exits with 1 if a program
fails, if its results differ by more than its tolerance, or if nothing ran in our kernels.
Integers, such as sampled tokens, may differ: they are counted.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

TOOLS = Path(__file__).resolve().parent
PROGRAMS = ("flax_imagenet", "flax_wmt", "gpt_oss", "qwen3")
REPLACED = re.compile(r"(\d+) collectives of jax.lax replaced, (\d+) left")


@dataclasses.dataclass
class Run:
    """What a run of a program gave.

    Attributes:
        results: by name, the arrays of the steps that have the result.
        seconds: how long each step took. The first ones compile.
        cpu_seconds: the time of the processor that each step took, of all threads.
        operations: how many operations ran in our kernels, summed over devices.
        replaced: how many collectives were replaced in the programs that were lowered.
        left: how many were left.
    """

    results: dict[str, list[np.ndarray[Any, Any]]]
    seconds: list[float]
    cpu_seconds: list[float]
    operations: int
    replaced: int
    left: int

    def step(self) -> str:
        """The time of a step, without the two that may compile."""
        return _milliseconds(self.seconds)

    def cpu_of_step(self) -> str:
        """The time of the processor, likewise."""
        return _milliseconds(self.cpu_seconds)


def _milliseconds(seconds: list[float]) -> str:
    ms = [1e3 * s for s in seconds[2:]]
    return f"{statistics.median(ms):.2f} ms (at best {min(ms):.2f})"


def module_of(program: str) -> Any:
    """The module of a program: one of PROGRAMS, or the path of a file like those."""
    sys.path.insert(0, str(TOOLS))
    if not program.endswith(".py"):
        return importlib.import_module(f"programs.{program}")
    spec = importlib.util.spec_from_file_location(Path(program).stem, program)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# In a process that runs a program. It takes a step whenever the process that compares sends a line,
# and answers with a line.

STEP_TAKEN = "other_programs: step taken"


def run_here(program: str, sources: Path, steps: int, out: Path) -> None:
    """Runs a program and writes its results into a folder."""
    import jax

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("jax_intranode").setLevel(logging.INFO)
    module = module_of(program)
    sys.path.insert(0, str(sources / module.FOLDER))
    results = {}
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    taken = module.steps(small=jax.devices()[0].platform == "cpu")
    for step in range(steps):
        sys.stdin.readline()
        start, cpu_start = time.perf_counter(), time.process_time()
        arrays = jax.block_until_ready(next(taken))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        results |= {f"{name}-{step}": _as_written(array) for name, array in arrays.items()}
        print(STEP_TAKEN, flush=True)
    # `python -m jax_intranode run` has imported it, if it has started this process.
    package = sys.modules.get("jax_intranode")
    operations = 0 if package is None else package.usage_counter()
    np.savez(out / "results.npz", **results)
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "operations": operations}
    (out / "run.json").write_text(json.dumps(found))


def _as_written(array: Any) -> np.ndarray[Any, Any]:
    found = np.asarray(array)
    return found if np.issubdtype(found.dtype, np.integer) else found.astype(np.float64)


# In the process that compares.


class Process:
    """A process that runs a program."""

    def __init__(self, python: str, arguments: list[str], out: Path, with_ours: bool):
        """Starts the process, which writes its results into the folder `out`."""
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        self._out = out
        self._log = out / "log"
        runner = ["-m", "jax_intranode", "run"] if with_ours else []
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
        # Two processes share the memory of the GPUs.
        environment = {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with self._log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-P", *runner, __file__, *arguments, "--out", str(out)],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def step(self) -> None:
        """Takes a step.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.strip() == STEP_TAKEN:
                return
        self._fail()

    def finish(self) -> Run:
        """Waits for the end and reads the results.

        Raises:
            RuntimeError: the process failed.
        """
        if self._process.wait() != 0:
            self._fail()
        found = [tuple(map(int, totals)) for totals in REPLACED.findall(self._log.read_text())]
        results: dict[str, list[Any]] = {}
        with np.load(self._out / "results.npz") as arrays:
            for key in arrays:
                results.setdefault(key.rpartition("-")[0], []).append(arrays[key])
        return Run(
            results=results,
            replaced=sum(replaced for replaced, _ in found),
            left=sum(left for _, left in found),
            **json.loads((self._out / "run.json").read_text()),
        )

    def end(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._process.communicate()

    def _fail(self) -> NoReturn:
        code = self._process.wait()
        end = self._log.read_text()[-2000:]
        raise RuntimeError(f"exit code {code}; the end of {self._log}:\n{end}")


def compare(plain: Run, ours: Run, tolerance: float) -> bool:
    """Prints how two runs differ; returns whether they agree and the second ran our kernels."""
    good = True
    for name, arrays in plain.results.items():
        pairs = list(zip(arrays, ours.results[name], strict=True))
        if np.issubdtype(arrays[0].dtype, np.integer):
            differ = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
            print(f"  {name}: {differ} of {sum(a.size for a in arrays)} differ")
            continue
        difference = max(float(np.abs(a - b).max()) for a, b in pairs)
        largest = max(float(np.abs(a).max()) for a in arrays)
        print(f"  {name}: {_shown(arrays)} without, {_shown(ours.results[name])} with")
        print(f"    largest difference {difference:.2g}; largest value {largest:.3g}")
        if not difference <= tolerance * largest:  # also if one is NaN
            print(f"    FAILED: it may differ by {tolerance:g} of the largest value")
            good = False
    print(f"  collectives: {ours.replaced} replaced, {ours.left} left")
    print(f"  {ours.operations} operations in our kernels, all devices and steps together")
    print(f"  step: {plain.step()} without, {ours.step()} with")
    print(f"    of the processor: {plain.cpu_of_step()} without, {ours.cpu_of_step()} with")
    print(f"  first step: {plain.seconds[0]:.1f} s without, {ours.seconds[0]:.1f} s with")
    if not ours.operations:
        print("  FAILED: nothing ran in our kernels")
    return good and ours.operations > 0


def _shown(arrays: list[np.ndarray[Any, Any]]) -> str:
    """The first elements of the first and of the last array."""
    return " ... ".join(f"{array.flat[0]:.6g}" for array in (arrays[0], arrays[-1]))


def scratch_python(packages: tuple[str, ...], work: Path) -> str:
    """A Python that has packages, besides those of the one that runs this file."""
    if not packages:
        return sys.executable
    folder = work / f"venv-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "parent.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return str(python)


def run_both(program: str, sources: Path, steps: int, work: Path) -> bool:
    """Runs a program in both ways and prints how they differ; returns whether all is well."""
    module = module_of(program)
    print(f"{program}: {module.REPOSITORY}, {module.FOLDER}", flush=True)
    arguments = [str(sources), program, "--steps", str(steps)]
    name = Path(program).stem
    processes = []
    try:
        python = scratch_python(module.PACKAGES, work)
        for way, with_ours in (("without", False), ("with", True)):
            processes.append(Process(python, arguments, work / f"{name}-{way}", with_ours))
        # In turns, so that whatever else the machine does slows both of them.
        for _ in range(steps):
            for process in processes:
                process.step()
        plain, ours = (process.finish() for process in processes)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"  FAILED: {error}")
        return False
    finally:
        for process in processes:
            process.end()
    return compare(plain, ours, module.TOLERANCE)


def print_list() -> None:
    """Prints how to get the sources of all programs."""
    for program in PROGRAMS:
        module = module_of(program)
        clone = f"SOURCES/{Path(module.FOLDER).parts[0]}"
        print(f"{program}: {module.__doc__.splitlines()[0]}")
        print(f"    git clone {module.REPOSITORY} {clone}")
        print(f"    git -C {clone} checkout {module.COMMIT}")


def main() -> int:
    """Runs programs in both ways, or lists them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="?", type=Path, metavar="SOURCES")
    parser.add_argument("programs", nargs="*", default=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--list", action="store_true", help="list the programs")
    parser.add_argument("--steps", type=int, default=24, help="steps per run, at least 3")
    parser.add_argument(
        "--work", type=Path, default=TOOLS.parent / "build" / "other_programs", help="see above"
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # in the process that runs it
    arguments = parser.parse_args()
    if arguments.list:
        print_list()
        return 0
    if not arguments.sources or arguments.steps < 3:
        parser.error("SOURCES is missing" if not arguments.sources else "--steps is less than 3")
    if arguments.out:
        run_here(arguments.programs[0], arguments.sources, arguments.steps, arguments.out)
        return 0
    good = [
        run_both(program, arguments.sources.resolve(), arguments.steps, arguments.work.resolve())
        for program in arguments.programs
    ]
    print(f"{sum(good)} of {len(good)} programs give the same results")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
