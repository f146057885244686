"""Runs programs by others by `python -m jax_intranode run --compare`: plain and accelerated.

    python tools/other_programs.py SOURCES              # all programs
    python tools/other_programs.py SOURCES flax_wmt ...
    python tools/other_programs.py --list

SOURCES is a folder that has clones of their repositories; --list prints the commands that clone
them. The sources are not changed: the files in tools/programs call their training or decoding
steps, with random data and weights. A program can also be the path of such a file. The Python
packages that a program needs are installed into the folder WORK. They come on top of those of the
Python that runs this file, jax and this package among them.

Each program runs on all GPUs or else on 8 CPU devices, where the models are tiny and our kernels
are allowed at every size. Printed is what `run --compare` says of the jitted function that is
called most: how long its calls take, how far results are apart, which collectives were replaced.
Exits with 1 if a program fails, if its results differ by more than its tolerance, or if nothing was
replaced.

Auto-sharded programs (AUTO) run with `--auto`. They, and those over Explicit axes (EXPLICIT), also
take 20 steps twice, without and with the rewriting, each from the start. Printed are how far the
results of these steps are apart, and the arrays that XLA's collectives make in the function that
has most of them.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

TOOLS = Path(__file__).resolve().parent
PROGRAMS = ("flax_imagenet", "flax_wmt", "gpt_oss", "qwen3")
PROGRAMS += ("deepseek", "flax_gemma", "flax_lm1b", "flax_nnx_mlp", "maxtext_dense", "netket_ising")
PROGRAMS += ("equinox_mlp", "keras_distribution", "optax_muon", "tunix_qwen3")
DIFFERENCE = re.compile(r"^compare:   results: (?:they differ by at most (\S+) of|all have)", re.M)
REPLACED = re.compile(r"^compare:   replaced: \d", re.M)


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


def take_steps(module: Any, steps: int) -> list[Any]:
    """Takes steps of a program in this process; returns the results of each."""
    import auto_corpus
    import jax

    small = jax.devices()[0].platform == "cpu"
    with auto_corpus.all_sizes() if small else contextlib.nullcontext():
        taken = itertools.islice(module.steps(small), steps)
        return [jax.block_until_ready(results) for results in taken]


def take_twice(module: Any, dumped: Path) -> None:
    """Takes 20 steps without and with install(), and compares results and collectives."""
    import jax

    import jax_intranode

    found = []
    for installed in (False, True):
        before = set(dumped.iterdir())
        if installed:
            jax_intranode.install(auto=getattr(module, "AUTO", False))
        results = take_steps(module, 20)
        found.append((results, of_xla(set(dumped.iterdir()) - before, jax.device_count())))
    (plain, texts), (ours, texts_of_ours) = found
    name = max(texts, key=lambda function: texts[function].total())
    kinds = [
        ", ".join(f"{n} {kind}" for kind, n in sorted(t[name].items())) or "none"
        for t in (texts, texts_of_ours)
    ]
    print(f"XLA's collectives in {name}: {kinds[0]} -> {kinds[1]}")
    worst = 0.0
    for wanted, got in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        x, y = (np.asarray(v, np.float64) for v in (wanted, got))
        worst = max(worst, float(np.abs(x - y).max() / (np.abs(x).max() or 1)))
    print(f"results of 20 steps from the start: they differ by at most {worst:.1e}")
    if not worst <= module.TOLERANCE:
        sys.exit(f"they may differ by {module.TOLERANCE:g}")


def of_xla(files: set[Path], devices: int) -> dict[str, Counter[str]]:
    """The kinds of XLA's collectives in the programs that XLA wrote, by the function, by arrays."""
    from jax_intranode._src.jax_private import hlo

    found = {}
    for file in sorted(files):
        if match := re.fullmatch(r"module_\d+\.(jit_.*?)\..*after_optimizations\.txt", file.name):
            leaves = hlo.leaves_of(file.read_text(), devices)
            assert leaves is not None
            found[match[1]] = max(
                found.get(match[1], Counter()),
                Counter(leaf.kind for leaf in leaves),
                key=Counter.total,
            )
    return found


def run(program: str, sources: Path, steps: int, work: Path) -> bool:
    """Compares a program; prints what was found, and returns whether all is well."""
    module = module_of(program)
    auto = getattr(module, "AUTO", False)
    print(f"{program}: {module.REPOSITORY}, {module.FOLDER}", flush=True)
    python = scratch_python(module.PACKAGES, work)
    own = [__file__, str(sources), program, "--here"]
    compare = ["-m", "jax_intranode", "run", "--compare", "--steps", str(steps)]
    done = start([python, "-P", *compare, *["--auto"] * auto, *own, "--steps", str(steps + 3)])
    print(*(line for line in done.stderr.splitlines() if line.startswith("compare: ")), sep="\n")
    found = DIFFERENCE.search(done.stderr)
    if done.returncode != 0:
        problem = f"exit code {done.returncode}; the end of its output:\n{done.stderr[-2000:]}"
    elif found is None:
        problem = "there is no difference of its results; the line above says why"
    elif float(found[1] or 0) > module.TOLERANCE:
        problem = f"it may differ by {module.TOLERANCE:g} of the largest value"
    elif not REPLACED.search(done.stderr):
        problem = "nothing was replaced"
    elif not (auto or getattr(module, "EXPLICIT", False)):
        return True
    else:
        with tempfile.TemporaryDirectory() as folder:
            done = start([python, "-P", *own, "--dumped", folder], f"--xla_dump_to={folder}")
        print(*(f"  {line}" for line in done.stdout.splitlines()[-2:]), sep="\n")
        if done.returncode == 0:
            return True
        problem = done.stderr[-2000:]
    print(f"  FAILED: {problem}")
    return False


def start(command: list[str], flags: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with flags of XLA."""
    flags += " --xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    env = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


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


def print_list() -> None:
    """Prints how to get the sources of all programs."""
    for program in PROGRAMS:
        module = module_of(program)
        clone = f"SOURCES/{Path(module.FOLDER).parts[0]}"
        print(f"{program}: {module.__doc__.splitlines()[0]}")
        print(f"    git clone {module.REPOSITORY} {clone}")
        print(f"    git -C {clone} checkout {module.COMMIT}")


def main() -> int:
    """Runs programs, or lists them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="?", type=Path, metavar="SOURCES")
    parser.add_argument("programs", nargs="*", default=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--list", action="store_true", help="list the programs")
    parser.add_argument("--steps", type=int, default=40, help="steps to compare, at least 16")
    parser.add_argument(
        "--work", type=Path, default=TOOLS.parent / "build" / "other_programs", help="see above"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dumped", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print_list()
        return 0
    if not arguments.sources:
        parser.error("SOURCES is missing")
    sources, work = arguments.sources.resolve(), arguments.work.resolve()
    if arguments.here:
        module = module_of(arguments.programs[0])
        sys.path.insert(0, str(sources / module.FOLDER))
        if arguments.dumped:
            take_twice(module, arguments.dumped)
        else:
            take_steps(module, arguments.steps)
        return 0
    good = [run(program, sources, arguments.steps, work) for program in arguments.programs]
    print(f"{sum(good)} of {len(good)} programs give the same results")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
