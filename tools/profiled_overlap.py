"""Shows what the GPUs do in a step: how much of the collectives' time other kernels run beside.

    python tools/profiled_overlap.py auto_fsdp transformer --ways ours,lax,none

Profiles five steps of programs of `bench` in one process on all GPUs, twice each way. Prints a line
of JSON per run and GPU, with microseconds per step; and after the second run of a way the kernels
of the first GPU by call site, with their number and microseconds per step.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_programs import definitions
from bench_programs.measure import libraries
from jax.sharding import Mesh

from jax_intranode._src.command_line.bench.settings import WAYS
from jax_intranode._src.command_line.options import names_from
from jax_intranode._src.health import call_sites

STEPS = 5
Spans = list[tuple[float, float]]  # begins and ends in nanoseconds


def union(spans: Spans) -> Spans:
    """The same times, as spans that do not meet, in their order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def microseconds(spans: Spans) -> float:
    """The length of the union of these spans, per step."""
    return round(sum(end - begin for begin, end in union(spans)) / STEPS / 1000, 1)


def planes_of(folder: Path) -> list[Any]:
    """The planes of the GPUs in the profile in this folder."""
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    return [plane for plane in planes if re.fullmatch(r"/device:GPU:\d+", plane.name)]


def kernels_of(plane: Any) -> Iterable[Any]:
    """The events of a GPU's streams."""
    for line in plane.lines:
        if line.name.startswith("Stream"):
            yield from line.events


def row(plane: Any) -> dict[str, Any]:
    """What a GPU did."""
    kinds: dict[bool, Spans] = {True: [], False: []}
    for event in kernels_of(plane):
        collective = bool(re.search("nccl|jax_intranode", event.name))
        kinds[collective].append((event.start_ns, event.start_ns + event.duration_ns))
    collectives, others = microseconds(kinds[True]), microseconds(kinds[False])
    together = collectives + others - microseconds(kinds[True] + kinds[False])
    return {
        "gpu": plane.name,
        "collectives": collectives,
        "of these beside others": round(together, 1),
        "others": others,
    }


# Kernels by call site.


def call_sites_in(module: str) -> dict[str, str]:
    """The call site of each instruction in the text of a compiled module, as explain shows it."""

    def table(name: str, entry: str) -> dict[int, tuple[str, ...]]:
        part = re.search(rf"^{name}\n((?:\d+ .*\n)+)", module, re.MULTILINE)
        found = re.findall(rf"^(\d+) {entry}", part[1] if part else "", re.MULTILINE)
        return {int(number): tuple(values) for number, *values in found}

    names, functions = table("FileNames", '"(.*)"'), table("FunctionNames", '"(.*)"')
    locations = table("FileLocations", r"{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
    frames = table("StackFrames", r"{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    # XLA writes the number of a frame's parent plus 1; the first frame has no parent.
    base = int(frames[1][1] or 0) if 1 in frames else 0

    def site(frame: int) -> str:
        stack = []
        while frame in frames and len(stack) < len(frames):
            location, parent = frames[frame]
            file, function, line = locations[int(location)]
            stack.append((names[int(file)][0], int(line), functions[int(function)][0]))
            frame = int(parent or base) - base
        return call_sites.call_site(stack)

    # A kernel may have the name that its instruction had when XLA scheduled it.
    metadata = r'metadata={(?:op_name="([^"]*)")?(?: scheduling_name="([^"]*)")?[^}]*'
    instruction = rf"^ *(?:ROOT )?%?([\w.-]+) = .*{metadata}stack_frame_id=(\d+)"
    sites = {}
    for name, scopes, scheduled, frame in re.findall(instruction, module, re.MULTILINE):
        backward = ", backward" if "transpose(" in scopes else ""
        sites[name] = sites[scheduled or name] = site(int(frame)) + backward
    return sites


def by_call_site(events: Iterable[Any], sites: Mapping[str, str]) -> list[str]:
    """Lines with the number and the microseconds of each kernel of each call site, per step."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        instruction = str(dict(event.stats).get("hlo_op", ""))
        kernel = re.split(r"[<(]", event.name.removeprefix("void "))[0][:48]
        key = sites.get(instruction, instruction or "no instruction"), kernel
        found.setdefault(key, []).append(event.duration_ns / 1000)
    rows = sorted(found.items(), key=lambda item: -sum(item[1]))
    return [
        f"  {len(us) / STEPS:8.1f} {sum(us) / STEPS:10.1f} us  {kernel:48}  {site}"
        for (site, kernel), us in rows
    ]


# Runs.


def profiled(step: Any, arguments: Any) -> list[Any]:
    """Profiles some steps of a compiled program; returns the planes of the GPUs."""
    for _ in range(3):  # warms up
        arguments = jax.block_until_ready(step(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                arguments = step(*arguments)
            jax.block_until_ready(arguments)
        return planes_of(Path(folder))


def program(name: str, way: str, mesh: Mesh) -> tuple[Any, Any, dict[str, str]] | None:
    """A compiled step of a way of a program, its arguments, and its instructions' call sites."""
    if way == "none":
        bound = definitions.without_communication(name, mesh)
        if bound is None:
            return None
        (step, arguments), setting = bound[0], contextlib.nullcontext
    elif way in (ways := libraries(name)):
        library, setting = ways[way]
        step, arguments = definitions.PROGRAMS[name](library, mesh)
    else:
        return None
    with setting():
        compiled = step.lower(*arguments).compile()
    returning = isinstance(step, definitions.ReturningWeights)
    step = dataclasses.replace(step, jitted=compiled) if returning else compiled
    return step, arguments, call_sites_in(compiled.as_text())


def main() -> None:
    """Profiles the programs and prints what the GPUs did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    programs = sorted(definitions.PROGRAMS)
    parser.add_argument("programs", nargs="+", choices=programs, metavar="PROGRAM")
    text = f"{', '.join(WAYS)} (default: lax and ours)"
    parser.add_argument("--ways", type=names_from(WAYS), default=["lax", "ours"], help=text)
    options = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for name in options.programs:
        ways = {way: program(name, way, mesh) for way in options.ways}
        for run, (way, made) in itertools.product(range(2), ways.items()):
            if made is None:
                continue
            step, arguments, sites = made
            planes = profiled(step, arguments)
            for plane in planes:
                print(json.dumps({"program": name, "way": way} | row(plane)), flush=True)
            if run == 1 and planes:
                print(*by_call_site(kernels_of(planes[0]), sites), sep="\n", flush=True)


if __name__ == "__main__":
    main()
