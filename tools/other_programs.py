"""Runs programs by others by `python -m jax_intranode run --compare`: plain and accelerated.

    python tools/other_programs.py SOURCES              # all programs
    python tools/other_programs.py SOURCES flax_wmt ...
    python tools/other_programs.py --list

SOURCES is a folder that has clones of their repositories; --list prints the commands that clone
them. The sources are not changed: the files in tools/programs call their training or decoding
steps, with random data and weights. A program can also be the path of such a file. The Python
packages that a program needs are installed into the folder WORK. They come on top of those of the
Python that runs this file, jax and this package among them.

Each program runs on all GPUs or else on 4 CPU devices, where the models are tiny. Printed is what
`run --compare` says of the jitted function that is called most: how long its calls take, how far
results are apart, which collectives were replaced. Exits with 1 if a program fails, if its results
differ by more than its tolerance, or if nothing was replaced.
"""

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
PROGRAMS = ("flax_imagenet", "flax_wmt", "gpt_oss", "qwen3")
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


def run_here(program: str, sources: Path, steps: int) -> None:
    """Takes steps of a program, in the process that compares them."""
    import jax

    module = module_of(program)
    sys.path.insert(0, str(sources / module.FOLDER))
    taken = module.steps(small=jax.devices()[0].platform == "cpu")
    for results in itertools.islice(taken, steps):
        jax.block_until_ready(results)


def run(program: str, sources: Path, steps: int, work: Path) -> bool:
    """Compares a program; prints what was found, and returns whether all is well."""
    module = module_of(program)
    print(f"{program}: {module.REPOSITORY}, {module.FOLDER}", flush=True)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    compare = ["-m", "jax_intranode", "run", "--compare", "--steps", str(steps)]
    own = [__file__, str(sources), program, "--steps", str(steps + 3), "--here"]
    done = subprocess.run(
        [scratch_python(module.PACKAGES, work), "-P", *compare, *own],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
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
    else:
        return True
    print(f"  FAILED: {problem}")
    return False


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
    arguments = parser.parse_args()
    if arguments.list:
        print_list()
        return 0
    if not arguments.sources:
        parser.error("SOURCES is missing")
    sources, work = arguments.sources.resolve(), arguments.work.resolve()
    if arguments.here:
        run_here(arguments.programs[0], sources, arguments.steps)
        return 0
    good = [run(program, sources, arguments.steps, work) for program in arguments.programs]
    print(f"{sum(good)} of {len(good)} programs give the same results")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
