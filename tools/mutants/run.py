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

The text must be in the product exactly once, so a fault survives that its code moves. Code that
changes takes its faults along: change the text here, and keep what is wrong.

Every selection of tests must pass without a fault. Exits with 1 if a fault is not found, or can't be
tried.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NATIVE = (".h", ".cc", ".cu", ".cuh")
LEFT_OUT = shutil.ignore_patterns(".git", "build*", "*.so", "*.pyi", "__pycache__", ".*_cache")
# Editable installations find the package by hooks that come before PYTHONPATH.
NO_HOOKS = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


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
        files = [word for word in shlex.split(self.tests) if word.startswith("tests/")]
        compiled_by_test = all("test_native" in file for file in files)
        return self.place.suffix in NATIVE and not compiled_by_test


def product() -> dict[Path, str]:
    """The sources of the product, by their path in the checkout."""
    files = [p for folder in ("jax_intranode", "xla_ffi") for p in (ROOT / folder).rglob("*")]
    return {
        p.relative_to(ROOT): p.read_text() for p in sorted(files) if p.suffix in (".py", *NATIVE)
    }


def read(names: list[str]) -> tuple[list[Fault], list[str]]:
    """The faults with these names, and what is wrong with the list."""
    sources, faults, errors, known = product(), [], [], set[str]()
    for path in sorted(HERE.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text()).items():
            full = f"{path.stem}.{name}"
            known |= {path.stem, full}
            if not {path.stem, full} & set(names or ["" if path.stem == "gpu" else path.stem]):
                continue
            found = [
                place
                for place, text in sources.items()
                for _ in range(text.count(entry["old"]))
                if place.as_posix().endswith(entry.get("file", ""))
            ]
            if len(found) != 1:
                errors.append(f"{full}: its text is in the product {len(found)} times")
                continue
            texts = entry["what"], entry["old"], entry["new"], entry["tests"]
            faults.append(Fault(full, *texts, found[0]))
    return faults, errors + [f"there is no {name}" for name in names if name not in known]


class Copy:
    """A copy of the checkout, whose package the tests import."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self.folder = folder
        self.arguments = arguments
        self._modules: dict[str, bytes] = {}
        self._sync()
        hooks = folder / "build/hooks"
        hooks.mkdir(parents=True, exist_ok=True)
        (hooks / "sitecustomize.py").write_text(NO_HOOKS)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._env = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(hooks), str(folder)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CCACHE_BASEDIR": str(folder),
            "CCACHE_NOHASHDIR": "1",
        }

    def _sync(self) -> None:
        """Makes it like the checkout; files that are alike keep their time."""
        fresh = self.folder.with_suffix(".fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(ROOT, fresh, ignore=LEFT_OUT, symlinks=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.rglob("*"):
            inside = entry.relative_to(self.folder)
            if inside.parts[0] != "build" and entry.is_file() and not (fresh / inside).exists():
                entry.unlink()
        for entry in (e for e in fresh.rglob("*") if e.is_file()):
            to = self.folder / entry.relative_to(fresh)
            if not to.exists() or to.read_bytes() != entry.read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(entry, to)
        shutil.rmtree(fresh)

    def run(self, command: list[str], limit_s: float) -> tuple[int | None, str]:
        """Runs a command; returns its exit status, or None after so many seconds, and its output."""
        with subprocess.Popen(
            command, cwd=self.folder, env=self._env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit_s)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, process.communicate()[0]

    def build(self, modules: dict[str, bytes] | None = None) -> dict[str, bytes]:
        """Builds the native modules, or takes those that are given; returns them."""
        gpu, folder = self.arguments.gpu, self.folder / "build/native"
        if modules is None:
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            configure = [
                *("cmake", "-G", "Ninja", "-S", ".", "-B", str(folder), *launcher),
                *("-DSKBUILD_PROJECT_NAME=jax_intranode", "-DSKBUILD_PROJECT_VERSION=0"),
                *("-DCMAKE_CXX_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"),
                f"-DJAX_INTRANODE_CUDA={'ON' if gpu else 'OFF'}",
            ]
            targets = ["_host", *["_cuda"] * gpu]
            for command in (configure, ["cmake", "--build", str(folder), "--target", *targets]):
                status, output = self.run(command, 1200)
                if status != 0:
                    raise RuntimeError(f"{shlex.join(command)}: {output[-3000:]}")
            modules = {p.name: p.read_bytes() for p in (folder / "xla_ffi").glob("*.so")}
        for name, content in modules.items():
            (self.folder / "jax_intranode" / name).unlink(missing_ok=True)
            (self.folder / "jax_intranode" / name).write_bytes(content)
        return modules

    def test(self, tests: str) -> tuple[bool | None, str]:
        """Whether tests find something wrong, and which, or what; None if they can't run."""
        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-n", "0", "--tb=no"]
        command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
        status, output = self.run(command, self.arguments.limit)
        if status is None:
            return True, f"no end after {self.arguments.limit} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", output, re.MULTILINE)
        if status in (0, 1):
            return status == 1, failed[1] if failed else ""
        return None, output.strip()[-1500:]

    def tests_of(self, fault: Fault) -> Iterator[str]:
        """The tests to run, one selection after another."""
        yield fault.tests
        if self.arguments.all_tests:
            yield "tests -n auto"

    def attempt(self, fault: Fault, clean: dict[str, bytes]) -> tuple[bool | None, str]:
        """Whether the fault is found, and by what."""
        place = self.folder / fault.place
        text = place.read_text()
        place.write_text(text.replace(fault.old, fault.new))
        try:
            if fault.in_modules:
                self.build()
            found: tuple[bool | None, str] = False, ""
            for tests in self.tests_of(fault):
                found = self.test(tests)
                if found[0] is not False:
                    break
            return found
        except RuntimeError as error:
            return None, str(error)
        finally:
            place.write_text(text)
            if fault.in_modules:
                self.build(clean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="areas or faults; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--limit", type=int, default=200, metavar="S", help="seconds for tests")
    parser.add_argument("--all-tests", action="store_true", help="if need be, the quick tier, too")
    parser.add_argument("--trust", action="store_true", help="don't run the tests without faults")
    parser.add_argument(
        "--check", action="store_true", help="only look whether the texts are there"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a table in Markdown")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants", help="for the copies")
    arguments = parser.parse_args()
    arguments.gpu = arguments.names == ["gpu"]
    faults, errors = read(arguments.names)
    print(*errors, f"{len(faults)} faults", sep="\n", flush=True)
    if arguments.check or not faults:
        return bool(errors)
    start = time.monotonic()
    copies: queue.Queue[Copy] = queue.Queue()
    clean: dict[str, bytes] = {}
    for k in range(arguments.jobs):
        copy = Copy(arguments.work.resolve() / str(k), arguments)
        clean = copy.build(clean or None)
        copies.put(copy)
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    rows, broken = [], {}

    def outcome(fault: Fault | str) -> None:
        copy, begun = copies.get(), time.monotonic()
        try:
            if isinstance(fault, str):
                found, by = copy.test(fault)
                if found is not False:
                    broken[fault] = by
                    print(f"WITHOUT A FAULT {fault} fails: {by}", flush=True)
                return
            found, by = copy.attempt(fault, clean)
        finally:
            copies.put(copy)
        if fault.tests in broken:
            found, by = None, "its tests fail without it"
        state = {True: "found", False: "NOT FOUND", None: "NOT TRIED"}[found]
        seconds = time.monotonic() - begun
        rows.append((fault, state, by, seconds))
        print(f"{state:9} {seconds:4.0f} s  {fault.name}  {by}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        if not arguments.trust:
            list(pool.map(outcome, sorted({fault.tests for fault in faults})))
        list(pool.map(outcome, sorted(faults, key=lambda f: (not f.in_modules, f.name))))
    if arguments.table:
        lines = ["| fault | what is wrong | found by | s |", "|---|---|---|---|"]
        for fault, state, by, seconds in sorted(rows, key=lambda row: row[0].name):
            by = by if state == "found" else f"**{state}** {by[:200]}"
            lines.append(f"| {fault.name} | {fault.what} | {by} | {seconds:.0f} |")
        arguments.table.write_text("\n".join(lines) + "\n")
    missed = [fault.name for fault, state, _, _ in rows if state != "found"]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} faults found in {time.monotonic() - start:.0f} s"
    )
    print(*[f"not found: {name}" for name in sorted(missed)], sep="\n")
    return bool(missed or errors)


if __name__ == "__main__":
    sys.exit(main())
