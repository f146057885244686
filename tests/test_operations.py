"""One record and one body make an operation, and everything that lists operations then knows it."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import jax_intranode
from jax_intranode._src import operations
from jax_intranode._src.command_line import benefits
from jax_intranode._src.command_line.tune import command
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.ops.primitive import BY_OPERATION
from jax_intranode._src.selection import generations, select, table, tuning
from jax_intranode._src.selection.generations import GENERATIONS, Generation
from jax_intranode._src.selection.overlap.profiles import GpuFacts

# A toy: psum's kernels and target under another name. It claims to be a maximum and to replace
# lax.pbroadcast, so that a rewriter that took it for a sum would be found.
RECORD = """
RECORDS["toy"] = Record(
    name="toy",
    kind=COLLECTIVE,
    dtypes=SUMMED,
    reduction="max",
    algorithms=("one_shot", "two_shot"),
    lax_primitives=("pbroadcast",),
    target="jax_intranode_psum",
    like="psum",
    call=lambda library, xs: (library.toy if hasattr(library, "toy") else library.psum)(xs, "x"),
    expected=RECORDS["psum"].expected,
)
"""
BODY = '''
"""The toy."""

from dataclasses import dataclass

import jax
from jax import lax

from jax_intranode._src.ops import collective
from jax_intranode._src.ops.primitive import OpPrimitive


@dataclass(frozen=True)
class Params(collective.Params):
    def by_lax(self, xs):
        return [lax.pbroadcast(x, self.axes, 0) for x in xs]

    @classmethod
    def of_lax(cls, of, world_size):
        return cls(of.axes)


toy_p = OpPrimitive("toy", Params)


def toy(x, axis):
    by_lax = lambda v: lax.pbroadcast(v, axis, 0)
    return collective.of_each_array(
        toy_p, x, (axis,), None, by_lax, lambda leaf, size: Params((axis,))
    )


collective.register(
    toy_p,
    shape=lambda shape, params: tuple(shape),
    transposed=lambda params: (toy_p, params),
    batched=lambda params, d: (params, d),
    hidden_dim=0,
)
'''
PROGRAM = """
import json, logging, sys
from unittest import mock

sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
logged = []
handler = mock.Mock(level=0, handle=lambda record: logged.append(record.getMessage()))
logging.getLogger("jax_intranode").addHandler(handler)
logging.getLogger("jax_intranode").setLevel(logging.INFO)
import jax_intranode
from jax_intranode._src.command_line import benefits
from jax_intranode._src.command_line.bench import oracle
from jax_intranode._src.command_line.bench.operations import OPERATIONS
from jax_intranode._src.command_line.tune import command
from jax_intranode._src.rewrite.collectives import Body
from jax_intranode._src.selection import table

assert jax_intranode.__file__.startswith(sys.argv[1]), jax_intranode.__file__
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.arange(16.0).reshape(4, 4)


def of(body, *specs):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs or P("x"), out_specs=P("x")))


def calls(f, *xs):
    return [(c.operation, c.algorithm) for c in jax_intranode.explain(f)(*xs)]


found = {}
called = of(lambda v: jax_intranode.toy(v, "x"))
found["called"] = calls(called, x)
found["value"] = np.asarray(called(x)).tolist()
found["log"] = any("toy one_shot up to" in text for text in logged)
found["stats"] = [(row.operation, row.algorithm) for row in jax_intranode.stats().lowered]
found["doctor"] = {b.operation for b in benefits.of_node("cpu", "cpu", 2, [])} >= {"psum", "toy"}
found["tune"] = "toy" in command.OPERATIONS
right = oracle.Collective(OPERATIONS["toy"], 2, 16, np.dtype(np.int32))
found["bench"] = bool((right.expected[0] == right.shard(0) + right.shard(1)).all())

replaced = of(lambda v: lax.pbroadcast(v, "x", 0))
matmul = of(lambda a, b: lax.pbroadcast(a @ b, "x", 0), P("x"), P())
with jax_intranode.accelerate():
    found["not measured"] = calls(replaced, x)
    rows = {key: value for key, value in table.TABLE.items() if key[2] == "psum"}
    with mock.patch.dict(table.TABLE, {(*k[:2], "toy", *k[3:]): v for k, v in rows.items()}):
        jax.clear_caches()
        found["replaced"] = calls(replaced, x)
        with mock.patch.object(Body, "is_overlapped", lambda *_, **__: True):
            jax.clear_caches()
            found["matmul"] = calls(matmul, x, jnp.eye(4))
print(json.dumps(found))
"""


@pytest.fixture
def with_toy(tmp_path: Path) -> Path:
    """A copy of the installed package with the toy's record and body."""
    package = tmp_path / "jax_intranode"
    shutil.copytree(Path(jax_intranode.__file__).parent, package)
    for platform in ("cpu", "gpu"):  # an editable install has its modules elsewhere
        if (module := extension.module(platform)) is not None:
            shutil.copy(module.__file__, package)
    for name, text in (
        ("_src/operations.py", RECORD),
        ("_src/ops/toy.py", BODY),
        ("__init__.py", "from jax_intranode._src.ops.toy import toy\n"),
    ):
        with open(package / name, "a") as file:
            file.write(text)
    ops = package / "_src/ops/__init__.py"
    ops.write_text("from jax_intranode._src.ops import toy\n" + ops.read_text())
    return tmp_path


def test_one_record_and_one_body_make_a_collective(with_toy: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(with_toy), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(with_toy)],
        env=environment, cwd=with_toy, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    total = [[8.0, 10.0, 12.0, 14.0], [16.0, 18.0, 20.0, 22.0]]
    assert found == {
        "called": [["toy", "one_shot"]],
        "value": total * 2,
        "log": True,
        "stats": [["toy", "one_shot"]],
        "doctor": True,
        "tune": True,
        "bench": True,
        "not measured": [["toy", "lax"]],
        "replaced": [["toy", "one_shot"]],
        "matmul": [["toy", "one_shot"]],  # and no matmul_all_reduce, which would be a sum
    }


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
