"""Failures end with a clear error: ranks that differ, bad tables, segments of others."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_tables
from devices import need_overlap, need_ranks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import run_in_ranks
from processes import segments_of

import jax_intranode
from jax_intranode._src.jax_private.distributed import key_value_client
from jax_intranode._src.native import extension
from jax_intranode._src.selection.overlap import choice
from jax_intranode._src.selection.overlap.plan import Plan

pytestmark = pytest.mark.one_version

TIMEOUT_S = 3
ENV = {"JAX_INTRANODE_TIMEOUT_S": str(TIMEOUT_S)}


def need_cpu(why: str) -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip(why)


def lines(log: str, label: str) -> list[str]:
    """The texts that a rank printed with a label."""
    return re.findall(rf"^{label}: (.*)$", log, re.MULTILINE)


# In the ranks.


def say(label: str, text: object) -> None:
    # Text and newline in one write, because threads that log write to the same file.
    print(f"{label}: {str(text).splitlines()[0]}\n", end="", flush=True)


def come(stage: str, ranks: list[int]) -> None:
    """Waits until all the given ranks have reached this stage."""
    client = key_value_client()
    if jax.process_index() in ranks:
        client.key_value_set(f"test/{stage}/{jax.process_index()}", "here")
    for rank in ranks:
        client.blocking_key_value_get(f"test/{stage}/{rank}", 60_000)


def leave(present: list[int]) -> None:
    """Ends the process without JAX's shutdown, which waits for all; rank 0, the store, last."""
    client = key_value_client()
    if jax.process_index() == 0:
        for rank in set(present) - {0}:
            client.blocking_key_value_get(f"test/leave/{rank}", 60_000)
        time.sleep(1)  # until the others know that their key was set, and have ended
    else:
        client.key_value_set(f"test/leave/{jax.process_index()}", "gone")
    sys.stdout.flush()
    os._exit(0)


def check_sum(mesh: Mesh, seed: int) -> None:
    parts = cases.random("float32", (mesh.size, 100), seed)
    cases.check(
        cases.psum_of(parts, mesh), cases.everywhere(cases.oracle(parts), mesh.size), exact=False
    )


def check_matmul(mesh: Mesh, operation: str) -> None:
    """Checks an overlapped matmul of ones; "NAME in a kernel" means the fused kernel."""
    operation, _, fused = operation.partition(" in a ")
    gathers = operation == "all_gather_matmul"
    x, w = np.ones((16 * mesh.size, 16)), np.ones((16, 16))
    specs = (P("x") if gathers else P(), P())
    arrays = [
        cases.put(mesh, s, v.astype(jnp.bfloat16)) for s, v in zip(specs, (x, w), strict=True)
    ]
    f = cases.sharded(
        lambda x, w: getattr(jax_intranode, operation)(x, w, "x"),
        mesh, specs, P() if gathers else P("x"),
    )  # fmt: skip
    with choice.forced(Plan(tile_columns=128 if fused else 0)):
        result = jax.block_until_ready(jax.jit(f)(*arrays))
    value = 16 if gathers else 16 * mesh.size
    for shard in result.addressable_shards:
        assert (np.asarray(shard.data) == value).all()


def runs_another_operation() -> None:
    """Rank 0 sums, and rank 1 gathers."""
    logging.basicConfig()
    mesh = cases.line()
    x = cases.put(mesh, P("x"), np.ones((200,), np.float32))

    def total(v: jax.Array) -> jax.Array:
        return jax_intranode.psum(v, "x")

    def gathered(v: jax.Array) -> jax.Array:
        return jax_intranode.all_gather(v[:50], "x", tiled=True)

    jax_intranode.initialize(mesh)
    mine = gathered if jax.process_index() == 1 else total
    with pytest.raises(Exception) as error:  # XLA chooses the type
        np.asarray(jax.jit(cases.sharded(mine, mesh, P("x"), P()))(x).addressable_data(0))
    say("ERROR", error.value)
    failure = jax_intranode.last_failure()
    assert failure is not None and failure.message in str(error.value)
    for value in (
        failure.reason, failure.operation, failure.nbytes, failure.rank, failure.missing_rank,
        failure.missing_process, failure.calls, failure.platform,
    ):  # fmt: skip
        say("RECORD", value)
    say("SOURCE", failure.source)
    with pytest.raises(jax_intranode.CommunicationError) as later:
        check_sum(mesh, 1)
    assert later.value.failure == failure and str(later.value) == failure.message
    come("over", [0, 1])
    leave([0, 1])


def takes_no_other_data(operations: list[str]) -> None:
    """Each rank runs another operation, so that their data could look the same."""
    logging.basicConfig()
    mesh = cases.line()
    x = cases.put(mesh, P("x"), np.ones((200,), np.float32))

    def total(v: jax.Array) -> jax.Array:
        return jax_intranode.psum(v, "x")

    def gathered(v: jax.Array) -> jax.Array:
        return jax_intranode.all_gather(v, "x", tiled=True)

    def run_one(operation: str) -> None:
        if "matmul" in operation:
            check_matmul(mesh, operation)
        else:
            mine = gathered if operation == "all_gather" else total
            np.asarray(jax.jit(cases.sharded(mine, mesh, P("x"), P()))(x).addressable_data(0))

    check_sum(mesh, 1)

    def run() -> None:
        with pytest.raises(Exception, match="met another operation"):  # XLA chooses the type
            run_one(operations[jax.process_index()])

    # When kernels of two processes give up on the same GPU, the driver tells only one of them.
    threading.Thread(target=run, daemon=True).start()
    while (failure := jax_intranode.last_failure()) is None:
        time.sleep(0.05)
    say("ERROR", failure.message)
    say("RECORD", (failure.reason, failure.rank, failure.missing_rank, failure.platform))
    come("over", [0, 1])
    leave([0, 1])


def sends_a_bad_table(table: int, value: int) -> None:
    """Rank 1 has this value in this table, for its update for rank 0."""
    logging.basicConfig()
    mesh, rng = cases.line(), np.random.default_rng(0)
    sizes = np.full((2, 2), 2, np.int32)
    places = np.array([[0, 0], [8, 8]], np.int32)
    arrays = [*ragged_tables.operands(rng, 2, (8, 16), (4,), "float32")]
    tables = [2 * sizes, sizes, places, sizes]
    f = jax.jit(ragged_tables.program(2, mesh=mesh))
    for bad in (False, True):
        tables[table] = tables[table].copy()
        tables[table][1, 0] = value if bad else tables[table][1, 0]
        args = [cases.put(mesh, P("x"), x) for x in (*arrays, *tables)]
        try:
            jax.block_until_ready(f(*args))
            say("RAN", bad)
        except Exception as error:
            say("ERROR", error)
    come("over", [0, 1])
    leave([0, 1])


# The tests.

# Jobs of two ranks that mostly wait: a function, its arguments and more variables.
AFTER_4_S = {"JAX_INTRANODE_TIMEOUT_S": "4", "JAX_INTRANODE_REPORT_AFTER_S": "1"}
JOBS: dict[str, tuple[Callable[..., None], list[Any], dict[str, str]]] = {
    "mismatch": (runs_another_operation, [], AFTER_4_S),
    "place": (sends_a_bad_table, [2, 15], ENV),
}


@pytest.fixture(scope="module")
def logs_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[str]]]:
    """Starts the jobs that this session tests, some at once. The result has what ranks printed."""
    need_ranks(2)
    on_cpu = jax.devices()[0].platform == "cpu"
    items = [item for item in request.session.items if item.path == request.path]
    names = [
        item.callspec.params["job"]
        for item in items
        if isinstance(item, pytest.Function) and "logs_of" in item.fixturenames
    ]
    with ThreadPoolExecutor(3 if on_cpu else 1) as pool:
        started = {}
        for name in names:
            function, arguments, env = JOBS[name]
            logs = tmp_path_factory.mktemp("logs")
            if on_cpu or function is not runs_another_operation:
                started[name] = pool.submit(
                    run_in_ranks, function, 2, logs, env=env, arguments=arguments
                )
        yield lambda name: started[name].result()


@pytest.mark.parametrize("job", ["mismatch"])
def test_ranks_that_run_different_operations_are_told(
    logs_of: Callable[[str], list[str]], job: str
) -> None:
    need_cpu("on GPUs a rank does not know what the others wait in")
    logs = logs_of(job)
    calls = [
        r"psum of 400 bytes \(float32\[100\], .*test_failures\.py:\d+ \(total\)\)",
        r"all_gather of 200 bytes \(float32\[50\], .*test_failures\.py:\d+ \(gathered\)\)",
    ]
    for rank, log in enumerate(logs):
        other = 1 - rank
        waits = rf"rank {other} \(device \d+\), which waits in another operation: {calls[other]}"
        for pattern in (
            rf"^WARNING:jax_intranode:{calls[rank]}, call 1 .* has waited 1 s: .*{waits}",
            rf"^ERROR: .*{calls[rank]} timed out after 4 s: rank {rank} .* waited for {waits}"
            r".* same operations",
        ):
            assert re.search(pattern, log, re.MULTILINE), (pattern, log)
        operation, nbytes = ("psum", "400") if rank == 0 else ("all_gather", "200")
        assert lines(log, "RECORD") == [
            "mismatch", operation, nbytes, str(rank), str(other), str(other), "0", "cpu"
        ]  # fmt: skip
        (source,) = lines(log, "SOURCE")
        assert re.search(r"test_failures\.py:\d+ \((total|gathered)\)$", source), source


@pytest.mark.parametrize(
    ("operations", "runs"),
    [
        (["psum", "all_gather"], ["psum of 400 bytes", "all_gather of 400 bytes"]),
        (
            ["all_gather_matmul", "matmul_reduce_scatter"],
            ["all_gather_matmul of other shapes", "matmul_reduce_scatter of other shapes"],
        ),
        (
            ["all_gather_matmul", "all_gather_matmul in a kernel"],
            ["all_gather_matmul of other shapes"] * 2,
        ),
    ],
    ids=["collectives", "matmuls", "plans"],
)
def test_gpus_take_no_data_of_another_operation(
    ranks: Any, operations: list[str], runs: list[str]
) -> None:
    """Seconds before the time limit. Matmuls wait for other things than packets."""
    if jax.devices()[0].platform == "cpu":
        pytest.skip("on CPU devices ranks match their calls first")
    need_ranks(2)
    if "psum" not in operations:
        need_overlap()
    logs = ranks(
        takes_no_other_data, 2, env={"JAX_INTRANODE_TIMEOUT_S": "60"}, arguments=[operations]
    )
    for rank, log in enumerate(logs):
        other = 1 - rank
        assert re.search(
            rf"^ERROR: .*met another operation: rank {rank} .* waited for rank {other} .*, which "
            rf"runs {runs[other]}\. All ranks",
            log,
            re.MULTILINE,
        ), log
        assert lines(log, "RECORD") == [str(("mismatch", rank, other, "gpu"))], log


@pytest.mark.parametrize("job", ["place"])
def test_bad_table_of_a_ragged_all_to_all(logs_of: Callable[[str], list[str]], job: str) -> None:
    """Both ranks of the update say the same."""
    text = "2 rows from row 4 of an operand with 8 rows to row 15 of an output with 16 "
    for log in logs_of(job):
        assert lines(log, "RAN") == ["False"], log
        (error,) = lines(log, "ERROR")
        assert re.search(
            f"ragged_all_to_all .*failed: update 0 from rank 1 to rank 0 has {text}", error
        )


def test_segments_of_crashed_processes_are_removed() -> None:
    need_cpu("only CPU slabs are in /dev/shm")
    module = extension.module("cpu")
    code = (
        "import os, signal, sys\n"
        "from jax_intranode._src.native import extension\n"
        "slab = extension.module('cpu').allocate(0, 1 << 20, True)\n"
        "print(slab.handle().decode(), flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    name = Path("/dev/shm" + process.stdout.readline().strip())
    first = module.allocate(0, 1 << 20, True)
    assert name.exists()  # its process still runs
    process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert name.exists()
    second = module.allocate(0, 1 << 20, True)
    assert not name.exists()
    mine = sorted(slab.handle().decode().lstrip("/") for slab in (first, second))
    assert sorted(segments_of(os.getpid())) == mine
    for slab in (first, second):
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
