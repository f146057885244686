"""Failures end with a clear error: ranks that differ, bad tables, segments of others."""

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_tables
from devices import need_overlap, need_ranks
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import leave, said, say
from processes import segments_of
from stress.faults.operations import OPERATIONS, data

import jax_intranode
from jax_intranode._src.native import extension
from jax_intranode._src.selection.overlap import choice
from jax_intranode._src.selection.overlap.plan import Plan

pytestmark = pytest.mark.one_version

ON_CPU = jax.devices()[0].platform == "cpu"


def runs_its_own(names: list[str]) -> None:
    """In a rank: each rank runs another operation, with operands of the same size."""
    mesh = cases.line()
    name, _, pipelined = names[jax.process_index()].partition(" in ")
    operation = OPERATIONS[name]
    dtype = jnp.bfloat16 if operation.plan else np.float32
    x = cases.put(mesh, P("x"), np.concatenate([data(r, 2, 0) for r in range(2)]).astype(dtype))
    plan = Plan(tile_columns=0) if pipelined else operation.plan
    jax_intranode.initialize(mesh)

    def run() -> None:
        f = cases.sharded(lambda v: operation.run(v, "x"), mesh, P("x"), P("x"))
        with contextlib.suppress(Exception), choice.forced(plan):
            jax.block_until_ready(jax.jit(f)(x))

    # When kernels of two processes give up on the same GPU, the driver tells only one of them.
    threading.Thread(target=run, daemon=True).start()
    while (failure := jax_intranode.last_failure()) is None:
        time.sleep(0.05)
    say(failure.message, "ERROR")
    say((failure.reason, failure.operation, failure.rank, failure.missing_process), "RECORD")
    say(failure.source, "SOURCE")
    with pytest.raises(jax_intranode.CommunicationError) as later:
        jax_intranode.initialize(mesh)
    assert later.value.failure == failure and str(later.value) == failure.message
    leave()


@pytest.mark.parametrize(
    "names",
    [
        ["psum", "psum_scatter"],
        ["all_gather_matmul", "matmul_reduce_scatter"],
        ["all_gather_matmul", "all_gather_matmul in the pipeline"],
    ],
    ids=["collectives", "matmuls", "plans"],
)
def test_ranks_that_run_different_operations_are_told(ranks: Any, names: list[str]) -> None:
    """On GPUs seconds before the time limit. Matmuls wait for other things than packets."""
    need_ranks(2)
    if "psum" not in names:
        need_overlap()
    limits = {"JAX_INTRANODE_TIMEOUT_S": "4" if ON_CPU else "60"}
    logs = ranks(
        runs_its_own, 2, env=limits | {"JAX_INTRANODE_REPORT_AFTER_S": "1"}, arguments=[names]
    )
    ran = [name.partition(" in ")[0] for name in names]
    for rank, log in enumerate(logs):
        other = 1 - rank
        if ON_CPU:
            place = r" of \d+ bytes \(float32.*, .*(cases|operations)\.py:\d+ \(\S+\)\)"
            waits = rf"rank {other} \(.*, which waits in another operation: {ran[other]}{place}"
            patterns = [
                rf"^WARNING:jax_intranode:{ran[rank]}{place}, call 1 .* has waited 1 s: .*{waits}",
                rf"^ERROR: .*{ran[rank]}{place} timed out after 4 s: rank {rank} .*{waits}",
            ]
        else:
            met = f"met another operation: rank {rank} .* waited for rank {other} .*, which runs"
            patterns = [rf"^ERROR: .*{met} {ran[other]} of .*(bytes|shapes)\. All ranks"]
        for pattern in patterns:
            assert re.search(pattern, log, re.MULTILINE), (pattern, log)
        assert said(log, "RECORD") == [str(("mismatch", ran[rank], rank, other))], log
        (source,) = said(log, "SOURCE")
        assert ".py:" in source, source


def sends_a_bad_table() -> None:
    """In a rank: rank 1 has a bad place for its update for rank 0, in the second call."""
    mesh, rng = cases.line(), np.random.default_rng(0)
    sizes = np.full((2, 2), 2, np.int32)
    places = np.array([[0, 0], [8, 8]], np.int32)
    arrays = ragged_tables.operands(rng, 2, (8, 16), (4,), "float32")
    f = jax.jit(ragged_tables.program(2, mesh=mesh))
    for place in (8, 15):
        places[1, 0] = place
        args = [cases.put(mesh, P("x"), x) for x in (*arrays, 2 * sizes, sizes, places, sizes)]
        try:
            jax.block_until_ready(f(*args))
            say(place, "RAN")
        except Exception as error:
            say(error, "ERROR")
    leave()


def test_bad_table_of_a_ragged_all_to_all(ranks: Any) -> None:
    """Both ranks of the update say the same."""
    need_ranks(2)
    text = "2 rows from row 4 of an operand with 8 rows to row 15 of an output with 16 "
    for log in ranks(sends_a_bad_table, 2):
        assert said(log, "RAN") == ["8"], log
        (error,) = said(log, "ERROR")
        assert re.search(
            f"ragged_all_to_all .*failed: update 0 from rank 1 to rank 0 has {text}", error
        ), log


def test_segments_of_crashed_processes_are_removed() -> None:
    """The creator of a segment has it locked until all have opened it."""
    if not ON_CPU:
        pytest.skip("only CPU slabs are in /dev/shm")
    left = Path(f"/dev/shm/jax_intranode.{os.getpid()}.left")
    left.touch(mode=0o600)
    slabs = [extension.module("cpu").allocate(0, 1 << 20, True) for _ in range(2)]
    assert not left.exists()
    mine = {slab.handle().decode().lstrip("/") for slab in slabs}
    assert mine <= {*segments_of(os.getpid())}
    for slab in slabs:
        slab.unlink()


def test_segments_from_peers_are_checked() -> None:
    module = extension.module("cpu")
    slab = module.allocate(0, 1 << 20, True)
    name = slab.handle()
    assert Path("/dev/shm" + name.decode()).stat().st_mode & 0o777 == 0o600
    module.open(0, name, 1 << 20)
    with pytest.raises(RuntimeError, match="has fewer than 1048577 bytes"):
        module.open(0, name, (1 << 20) + 1)
    for bad in (b"", b"/", b"/other", b"/jax_intranode.1\0x"):
        with pytest.raises(RuntimeError, match="name of a shared-memory segment that is not ours"):
            module.open(0, bad, 1 << 20)
    if os.geteuid() == 0:
        os.chown("/dev/shm" + name.decode(), 65534, 65534)
        with pytest.raises(RuntimeError, match="must be this user's: Operation not"):
            module.open(0, name, 1 << 20)
    slab.unlink()
