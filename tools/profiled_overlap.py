"""Shows how much of the collectives' time other kernels run beside, without and with auto=True.

    PYTHONPATH=tools python tools/profiled_overlap.py auto_fsdp auto_data_parallel

Profiles five steps of programs of `bench` in one process on all GPUs, twice each way. Prints a line
of JSON per run and GPU, with microseconds per step.
"""

import argparse
import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_programs.definitions import PROGRAMS
from jax.sharding import Mesh

import jax_intranode

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


def rows(folder: Path) -> Iterable[dict[str, Any]]:
    """What the GPUs did, by the profile in this folder."""
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not re.fullmatch(r"/device:GPU:\d+", plane.name):
            continue
        kinds: dict[bool, Spans] = {True: [], False: []}
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    collective = bool(re.search("nccl|jax_intranode", event.name))
                    span = (event.start_ns, event.start_ns + event.duration_ns)
                    kinds[collective].append(span)
        collectives, others = microseconds(kinds[True]), microseconds(kinds[False])
        together = collectives + others - microseconds(kinds[True] + kinds[False])
        yield {
            "gpu": plane.name,
            "collectives": collectives,
            "of these beside others": round(together, 1),
            "others": others,
        }


def main() -> None:
    """Profiles the programs and prints the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="+", choices=sorted(PROGRAMS), metavar="PROGRAM")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    for name, auto in itertools.product(parser.parse_args().programs, (False, True) * 2):
        accelerated = jax_intranode.accelerate(auto=True) if auto else contextlib.nullcontext()
        with accelerated, tempfile.TemporaryDirectory() as folder:
            step, arguments = PROGRAMS[name](jax, mesh)
            for _ in range(3):  # compiles, and warms up
                arguments = jax.block_until_ready(step(*arguments))
            with jax.profiler.trace(folder):
                for _ in range(STEPS):
                    arguments = step(*arguments)
                jax.block_until_ready(arguments)
            for row in rows(Path(folder)):
                print(json.dumps({"program": name, "auto": auto} | row), flush=True)


if __name__ == "__main__":
    main()
