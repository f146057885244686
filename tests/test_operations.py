"""What lists operations and generations of GPUs agrees."""

import functools
import itertools
from dataclasses import replace

import pytest

from jax_intranode._src import operations
from jax_intranode._src.command_line import benefits
from jax_intranode._src.command_line.tune import command
from jax_intranode._src.native import definitions
from jax_intranode._src.ops.primitive import BY_OPERATION
from jax_intranode._src.selection import generations, select, table, tuning
from jax_intranode._src.selection.generations import GENERATIONS, Generation
from jax_intranode._src.selection.overlap.profiles import GpuFacts


def test_records_bodies_and_kernels_are_compared() -> None:
    bodies, kernels, dtypes = set(BY_OPERATION), definitions.OPERATIONS, definitions.DTYPES
    operations.check(bodies, kernels, dtypes)
    for wrong, named in (
        ((bodies - {"all_gather"}, kernels, dtypes), "all_gather"),
        ((bodies | {"other"}, kernels, dtypes), "other"),
        ((bodies, kernels | {"third_shot": "psum"}, dtypes), "third_shot"),
        ((bodies, {k: v for k, v in kernels.items() if k != "two_shot"}, dtypes), "two_shot"),
        ((bodies, kernels | {"one_shot": "pmax"}, dtypes), "pmax"),
        ((bodies, kernels | {"one_shot": "all_gather"}, dtypes), "all_gather"),
        ((bodies, kernels, dtypes[1:]), "float32"),
    ):
        with pytest.raises(ImportError, match=named):
            operations.check(*wrong)


def test_a_generation_of_gpus_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through selection, its digest, doctor and tune; without rows, by Hopper's."""
    kind, select_psum = "NVIDIA M700", functools.partial(
        select.select, "psum", nbytes=8 << 20, dtype="bfloat16", world_size=8,
        mode="multi", epoch_buffer_bytes=1 << 30, hardware="made_up",
    )  # fmt: skip
    made_up = Generation("made_up", ("M700",), sms=40)
    before = select.digest()
    monkeypatch.setitem(GENERATIONS, "made_up", made_up)
    assert select.digest() not in (before, "")
    assert generations.hardware_of("gpu", kind) == "made_up"
    chosen = select_psum()
    assert "measured on Hopper GPUs" in chosen.reason
    assert chosen.blocks == 40 - 1 and chosen.threads == 512  # with the block that checks: one wave

    monkeypatch.setitem(GENERATIONS, "made_up", replace(made_up, measured_on="one M700"))
    rows = (table.Row(64 << 20, "one_shot", 128, 32),)
    for mode, packets in itertools.product(("single", "multi"), ("bare", "flagged")):
        monkeypatch.setitem(table.TABLE, ("made_up", mode, "psum", packets, 8), rows)
    chosen = select_psum()
    assert (chosen.algorithm, chosen.blocks) == ("one_shot", 32)
    assert "measured on one M700" in chosen.reason
    facts = [GpuFacts(kind, (9, 9), 40, 1e9, 1e11, 1e12)] * 8
    found = benefits.of_node("gpu", kind, 8, facts)
    small = [b for b in found if b.operation == "psum" and (b.nbytes or 0) <= 1 << 20]
    assert {b.path for b in small} == {"one-shot"}
    assert {b.reason for b in found if b.shape} == {"not measured on made_up GPUs"}
    of_one = {"mode": "multi", "operation": "psum", "packets": "bare", "ranks": 8}
    fields = {"platform": "gpu", "device": kind, "devices": 8, "versions": {}, "date": ""}
    of_node = {tuple(of_one.values()): rows}
    tuned = tuning.Tuning("node.json", "", rows=of_node, profile=None, **fields)
    assert f"{64 << 20} one_shot up to {64 << 20}" in command.summary(tuned, [])
