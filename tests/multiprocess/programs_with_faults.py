"""Faulty programs of several processes. Rank 0 says what it is told."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from program_parts import (
    begin,
    line,
    on,
    parts,
    rank,
    read,
    say,
    total,
)

import jax_intranode
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.native import extension


def attempt(operation: Callable[[], object]) -> None:
    """Runs an operation that is to fail, and says how, and how long it took."""
    started = time.monotonic()
    try:
        operation()
        say("went through")
    except Exception as error:  # XLA chooses the type
        say(round(time.monotonic() - started, 1), "TOOK")
        say(error)


def end_of_rank_0() -> None:
    """Ends it with 0, whatever was told."""
    failure = jax_intranode.last_failure()
    assert failure is not None
    say(f"{failure.reason} {failure.missing_process}", "RECORD")
    sys.exit(0)


def raises_and_ends_slowly() -> None:
    """On GPUs the end of JAX's backends may wait for kernels. Rank 0 is told before."""
    told = Path(tempfile.gettempdir(), f"jax_intranode_told_{os.getppid()}")

    def end() -> None:
        deadline = time.monotonic() + 25
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # until what rank 0 tells in turn has come
        told.unlink(missing_ok=True)

    begin()
    if rank() == 1:
        distributed.at_end_of_backends(end)
        time.sleep(1)  # rank 0 waits by then
        raise ValueError("loss is NaN")
    attempt(lambda: read(total(2)))
    told.touch()
    end_of_rank_0()


def is_lost() -> None:
    begin()
    if rank() == 1:
        time.sleep(1)  # rank 0 waits by then
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def is_lost_among_three() -> None:
    """The other processes set up anew, with their devices."""
    begin()
    if rank() == 1:
        time.sleep(1)  # the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(lambda: read(total(2)))
    assert np.all(np.asarray(jnp.ones(4)) == 1)  # other work goes on
    jax_intranode.shutdown()
    jax.clear_caches()
    assert jax_intranode.last_failure() is not None
    mesh = Mesh(np.array([d for d in jax.devices() if d.process_index != 1]), ("x",))
    jax_intranode.initialize(mesh)
    before = extension.handler_calls()
    say(read(on(mesh, lambda v: jax_intranode.psum(v, "x"))(parts(mesh))), "REST")
    assert extension.handler_calls() > before, "ours did not run"


def uses_lax() -> None:
    """All say why."""
    mesh = line()
    program = on(mesh, lambda v: jax_intranode.psum(v, "x"))
    say(read(program(parts(mesh))), "SUM")
    (call,) = jax_intranode.explain(program)(parts(mesh))
    assert call.algorithm == "lax"
    say(call.reason)
