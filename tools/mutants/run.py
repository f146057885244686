#!/usr/bin/env python3
"""Makes one small fault after another in a copy of the checkout, and sees whether tests find it.

    python tools/mutants/run.py [NAME...]

NAME: an area (a file beside this one), or a fault of it, as AREA.FAULT; by default all areas but
`gpu`. The files have one table for each fault:

    [wrong-order]                  its name
    what = "..."                   what is wrong then
    old = '''...'''                the text that is replaced
    new = '''...'''                by what
    file = "psum.py"               the end of the file's path, if the text is in several files
    tests = "tests/test_x.py -k y" pytest's arguments for the tests that should find it

The text must be in the product or in tests/stress exactly once, so a fault survives that its code
moves. Code that changes takes its faults along: change the text, and keep what is wrong. The tests
must pass without a fault. Exits with 1 if a fault is not found, or can't be tried.

The copies have native modules of their own, built by CMake and Ninja without scikit-build-core: the
environment needs cmake, ninja, nanobind, jax and what the tests need. A fault of C++ that only
tests/test_native.py should find needs no build, because that test compiles the sources itself.
"""

import argparse
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDERS = ("jax_intranode", "xla_ffi", "tests/stress")
NATIVE = (".h", ".cc", ".cu", ".cuh")
LEFT_OUT = shutil.ignore_patterns(".git", "build", "*.so", "*.pyi", "__pycache__", ".*_cache")
PYTEST = "-m pytest -q -x --tb=no --no-header -p no:cacheprovider -n 0"
# Editable installations find the package by hooks that come before PYTHONPATH.
NO_HOOKS = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""
# Whether a fault was found, or None; and by what.
Outcome = tuple[bool | None, str]


@dataclass(frozen=True)
class Fault:
    """A fault, as the head of this file describes it. `place` is the file that has its text."""

    name: str
    what: str
    old: str
    new: str
    tests: str
    place: Path

    @property
    def in_modules(self) -> bool:
        """Whether tests find it in the native modules."""
        files = re.findall(r"tests/\S+", self.tests)
        return self.place.suffix in NATIVE and not all("test_native" in file for file in files)


def read(names: list[str]) -> tuple[list[Fault], list[str]]:
    """The faults with these names, and what is wrong with the list."""
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
    product = {p.relative_to(ROOT): p.read_text() for p in files if p.suffix in (".py", *NATIVE)}
    faults, errors = [], []
    for path in sorted(HERE.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text()).items():
            full = f"{path.stem}.{name}"
            if not ({path.stem, full} & {*names} if names else path.stem != "gpu"):
                continue
            found = [
                place
                for place, text in product.items()
                if place.as_posix().endswith(entry.get("file", ""))
                for _ in range(text.count(entry["old"]))
            ]
            if len(found) == 1:
                texts = (entry[key] for key in ("what", "old", "new", "tests"))
                faults.append(Fault(full, *texts, found[0]))
            else:
                errors.append(f"{full}: its text is in the product {len(found)} times")
    return faults, errors


class Copy:
    """A copy of the checkout, whose package the tests import."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
        (folder / "build/hooks").mkdir(parents=True)
        (folder / "build/hooks/sitecustomize.py").write_text(NO_HOOKS)
        self._folder, self._arguments = folder, arguments
        self._env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}/build/hooks:{folder}:{os.environ.get('PYTHONPATH', '')}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CCACHE_BASEDIR": str(folder),
        }

    def _run(self, command: str, limit_s: float) -> tuple[int | None, str]:
        """Runs a command; returns its exit status (None: it was too slow), and its output."""
        with subprocess.Popen(
            shlex.split(command), cwd=self._folder, env=self._env, start_new_session=True,
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit_s)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, process.communicate()[0]

    def build(self) -> dict[str, bytes]:
        """Builds the native modules; returns them by their names."""
        launcher = "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache" if shutil.which("ccache") else ""
        built = self._folder / "build/native"
        gpu = self._arguments.names and all(n.startswith("gpu") for n in self._arguments.names)
        for command in (
            f"cmake -G Ninja -S . -B {built} {launcher} -DPython_EXECUTABLE={sys.executable} "
            "-DSKBUILD_PROJECT_NAME=jax_intranode -DSKBUILD_PROJECT_VERSION=0 "
            f"-DCMAKE_CXX_FLAGS=-O1 -DJAX_INTRANODE_CUDA={'ON' if gpu else 'OFF'}",
            f"cmake --build {built} --target _host {'_cuda' if gpu else ''}",
        ):
            status, output = self._run(command, 1200)
            if status != 0:
                raise RuntimeError(f"{command}: {output[-3000:]}")
        modules = {path.name: path.read_bytes() for path in (built / "xla_ffi").glob("*.so")}
        self.take(modules)
        return modules

    def take(self, modules: dict[str, bytes]) -> None:
        """Makes the package of this copy have these native modules."""
        for name, content in modules.items():
            (self._folder / "jax_intranode" / name).unlink(missing_ok=True)
            (self._folder / "jax_intranode" / name).write_bytes(content)

    def test(self, tests: str) -> Outcome:
        """Whether tests find something wrong, and which; None if they can't run, and why."""
        status, output = self._run(f"{sys.executable} {PYTEST} {tests}", self._arguments.limit)
        if status is None:
            return True, f"no end after {self._arguments.limit} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", output, re.MULTILINE)
        if status < 0:
            return True, f"signal {-status}"
        last = output.strip().rpartition("\n")[2]
        return status == 1 if status < 2 else None, failed[1] if failed else last[:300]

    def attempt(self, fault: Fault, clean: dict[str, bytes]) -> Outcome:
        """Whether tests find a fault, and which do."""
        place = self._folder / fault.place
        text = place.read_text()
        place.write_text(text.replace(fault.old, fault.new))
        try:
            if fault.in_modules:
                self.build()
            found = self.test(fault.tests)
            if found[0] is False and self._arguments.all_tests:
                found = self.test("tests -n auto")
            return found
        except RuntimeError as error:
            return None, str(error)
        finally:
            place.write_text(text)
            self.take(clean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="areas or faults; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--limit", type=int, default=200, metavar="S", help="seconds for tests")
    parser.add_argument("--all-tests", action="store_true", help="if need be, the quick tier, too")
    parser.add_argument("--trust", action="store_true", help="don't run the tests without faults")
    parser.add_argument("--check", action="store_true", help="only look whether texts are there")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants", help="for the copies")
    arguments = parser.parse_args()
    faults, errors = read(arguments.names)
    print(*errors, f"{len(faults)} faults", sep="\n", flush=True)
    if arguments.check or not faults:
        return bool(errors)
    copies: queue.Queue[Copy] = queue.Queue()
    clean: dict[str, bytes] = {}
    for k in range(arguments.jobs):
        copy = Copy(arguments.work.resolve() / str(k), arguments)
        clean = clean or copy.build()
        copy.take(clean)
        copies.put(copy)
    broken, missed = set[str](), []

    def without_fault(tests: str) -> None:
        copy = copies.get()
        found, by = copy.test(tests)
        copies.put(copy)
        if found is not False:
            broken.add(tests)
            print(f"fails without a fault: {tests}: {by}", flush=True)

    def with_fault(fault: Fault) -> None:
        copy, start = copies.get(), time.monotonic()
        found, by = copy.attempt(fault, clean)
        copies.put(copy)
        found = None if fault.tests in broken else found
        state = {True: "found", False: "NOT FOUND", None: "NOT TRIED"}[found]
        if not found:
            missed.append(fault.name)
        print(f"{state:9} {time.monotonic() - start:4.0f} s  {fault.name}  {by}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        if not arguments.trust:
            list(pool.map(without_fault, sorted({fault.tests for fault in faults})))
        list(pool.map(with_fault, sorted(faults, key=lambda f: (not f.in_modules, f.name))))
    print(f"{len(faults) - len(missed)} of {len(faults)} faults were found", *sorted(missed))
    return bool(missed or errors)


if __name__ == "__main__":
    sys.exit(main())
