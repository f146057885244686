"""The command `demo`: what this package gains on this machine, in half a minute.

It measures as `bench` does. Without GPUs, two processes with a CPU device each show the gain:
through shared memory a small sum takes a fraction of the time that gloo takes, which runs the
collectives of jax.lax there.
"""

import argparse
import json
import sys
from typing import Any

from jax_intranode._src import timeouts
from jax_intranode._src.command_line import benefits, machine, options
from jax_intranode._src.command_line.bench import command as bench
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.runs import PROCESS_PER_DEVICE, ProgressLine
from jax_intranode._src.command_line.options import WrongInput

DESCRIPTION = (
    "Shows what this package gains on this machine, in about half a minute. On two or more GPUs it "
    "times psum and a collective matmul, with a process per GPU, next to jax.lax. Elsewhere it "
    "times psum between two processes with a CPU device each."
)
EXAMPLES = """\
python -m jax_intranode demo
python -m jax_intranode demo --platform cpu --json"""

_NEXT = """
Next:
  python -m jax_intranode doctor           checks this node, and lists what runs on it
  python -m jax_intranode run train.py     accelerates a script that nobody edits
  python -m jax_intranode bench psum       measures in detail"""

# What is measured, as options of `bench`.
_MEASURED = {
    "cpu": ["psum -d float32 -n 10 -w 2"],
    "gpu": [
        "psum -b 1K -e 4M -f 16 -w 4",
        "all_gather_matmul --shapes 8192,8192,1024 -n 5 -w 1",
    ],
}
_BAR = 40  # characters of the longest bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_platform(parser, gpus="two or more")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table for each operation; returns the exit code."""
    gpus = machine.visible_gpus()
    if arguments.platform == "gpu" and gpus < 2:
        raise WrongInput(
            f"--platform gpu: a group has 2 or more GPUs, and {gpus} are visible: check "
            "CUDA_VISIBLE_DEVICES, and the driver's state in `python -m jax_intranode info`"
        )
    platform = machine.chosen_platform(arguments.platform)
    of_gpus = platform == "gpu" and gpus >= 2
    # A power of 2 divides all that is measured.
    devices = min(8, 1 << (gpus.bit_length() - 1)) if of_gpus else 2
    all_settings = _settings("gpu" if of_gpus else "cpu", devices)
    measurements = sum(len(s.matmuls() or s.measurements()) for s in all_settings)
    line = ProgressLine(sys.stderr, measurements)
    load, cores = machine.load()
    if load > cores and not arguments.json:
        print(
            f"This machine is busy (load {load:.0f} on {cores} cores), so the times below vary: "
            "run it again when it is idle.\n"
        )
    results = []
    for settings in all_settings:
        if not arguments.json:
            device = "GPU" if of_gpus else "CPU device"
            print(
                f"{settings.name} of {settings.dtypes[0]} between {devices} processes with a "
                f"{device} each, in microseconds a call:\n",
                flush=True,
            )
        measured = bench.run_mode(settings, {}, timeouts.DEMO_S, line, shows_table=False)
        results.append({**bench.empty_result(), **measured})
        if not arguments.json:
            print(_table(measured["rows"]), flush=True)
    wrong = sum(row["wrong"] + row["lax_wrong"] for result in results for row in result["rows"])
    if arguments.json:
        print(json.dumps({"results": results, "wrong": wrong}, indent=2))
    else:
        print(_summary(results, of_gpus, wrong))
        print(_NEXT)
    return 1 if wrong else 0


def _settings(platform: str, devices: int) -> list[Settings]:
    parser = options.Parser()
    bench.add_arguments(parser)
    found = []
    for line in _MEASURED[platform]:
        arguments = parser.parse_args([*line.split(), "--mode", PROCESS_PER_DEVICE])
        found += bench.settings_of(arguments, platform, devices)
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    largest = max(row["ratio"] or 0 for row in rows)
    lines = [f"{'':>20}  {'ours':>9}  {'jax.lax':>9}  {'ratio':>6}"]
    for row in rows:
        if "k" in row:
            what = f"{row['m']} x {row['k']} x {row['n']}"
        else:
            what = benefits.size_text(row["size"])
        ratio = row["ratio"] or 0
        bar = "#" * max(1, round(_BAR * ratio / max(largest, 1)))
        note = "  (fell back to jax.lax)" if row["algorithm"] == "lax" else ""
        times = f"{row['time_us']:9.1f}  {row['lax_time_us']:9.1f}"
        lines.append(f"{what:>20}  {times}  {ratio:5.1f}x  {bar}{note}")
    return "\n".join(lines) + "\n"


def _summary(results: list[dict[str, Any]], of_gpus: bool, wrong: int) -> str:
    rows = [row for result in results for row in result["rows"]]
    best = max(row["ratio"] or 0 for row in rows)
    right = "All results are right." if wrong == 0 else f"{wrong} elements are WRONG."
    text = f"jax.lax takes up to {best:.1f} times as long. {right}"
    if not of_gpus:
        return (
            f"{text}\n"
            "Between processes of CPU devices jax.lax sends through gloo, and this package through "
            "shared memory.\nCPU devices are for development and tests: their ratios are not those "
            "of GPUs."
        )
    if all(row["algorithm"] == "lax" for row in rows):
        text += "\nAll calls fell back to jax.lax: `python -m jax_intranode doctor` says why."
    return text
