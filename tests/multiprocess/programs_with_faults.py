"""Faulty programs of several processes. Rank 0 says what it is told."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from program_parts import (
    LATER_S,
    OPERATIONS,
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


def goes_on() -> bool:
    """Whether other work runs after a failure. On GPUs the CUDA context is lost."""
    return jax.default_backend() == "cpu"


def attempt(operation: Callable[[], object], label: str = "RESULT") -> Exception | None:
    """Runs an operation that is to fail, and says how, and how long it took."""
    started = time.monotonic()
    try:
        operation()
    except Exception as error:  # XLA chooses the type
        say(round(time.monotonic() - started, 1), "TOOK")
        say(error, label)
        return error
    say("went through", label)
    return None


def end_of_rank_0() -> None:
    """Ends it with 0, whatever was told."""
    failure = jax_intranode.last_failure()
    assert failure is not None
    say(f"{failure.reason} {failure.missing_process}", "RECORD")
    sys.exit(0)


def unrelated_errors() -> None:
    """Errors before and after the loss of rank 1 have nothing to do with it."""

    def fail(value: object) -> np.ndarray:
        raise ValueError("the callback's own error")

    def call_back() -> None:
        shape = jax.ShapeDtypeStruct((), np.float32)
        jax.pure_callback(fail, shape, 1.0).block_until_ready()

    begin()
    if rank() == 1:
        time.sleep(LATER_S)
        os._exit(3)
    before = attempt(call_back, "BEFORE")
    attempt(lambda: read(total(2)))
    assert jax_intranode.last_failure() is not None
    say(before, "BEFORE AGAIN")
    if goes_on():
        attempt(call_back, "CALLBACK")
        attempt(lambda: jnp.zeros((1 << 44,), np.int8).block_until_ready(), "MEMORY")
    end_of_rank_0()


def raises() -> None:
    """Rank 0 catches the failure as docs/failures.md shows it."""

    def guarded() -> None:
        with jax_intranode.communication_errors():
            read(total(2))

    begin()
    if rank() == 1:
        time.sleep(2)  # rank 0 waits by then
        raise ValueError("loss is NaN")
    error = attempt(guarded)
    assert isinstance(error, jax_intranode.CommunicationError), type(error)
    assert error.failure == jax_intranode.last_failure()
    assert error.failure is not None and error.failure.operation == "psum"
    end_of_rank_0()


def raises_and_ends_slowly() -> None:
    """On GPUs the end of JAX's backends may wait for kernels. Rank 0 is told before: in 20 s."""
    begin()
    if rank() == 1:
        distributed.at_end_of_backends(lambda: time.sleep(25))
        time.sleep(1)
        raise ValueError("loss is NaN")
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def listen(*names: str) -> None:
    """Ends the process when it is told of all names in one message: a warning or a failure."""
    started = time.monotonic()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if all(name in text for name in names):
                say(round(time.monotonic() - started, 1), "TOOK")
                say(text)
                told.set()

    told = threading.Event()
    logging.getLogger("jax_intranode").addHandler(Handler())

    def end() -> None:
        if told.wait(60):
            time.sleep(2 if rank() else 10)  # the peers are told, too; JAX's service ends last
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()


def wait_in(result: jax.Array) -> None:
    with contextlib.suppress(Exception):
        result.block_until_ready()
    time.sleep(60)  # `listen` ends the process


def waits_in_another_group() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 for rank 0 in another one."""
    begin()
    mesh = line()
    pair = Mesh(mesh.devices.reshape(2, 1), ("x", "y"))
    swapped = Mesh(mesh.devices[::-1], ("x",))
    summing_there = on(swapped, lambda v: OPERATIONS.psum(v * 2, "x"))
    jax_intranode.initialize(pair)
    # On GPUs XLA compiles a program in all processes together.
    assert read(summing_there(parts(swapped))) == 6
    listen(f"rank {rank()} (device", "waits in another operation", "They wait in a circle")
    wait_in(total(2) if rank() == 0 else summing_there(parts(swapped)))


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
    say(read(on(mesh, lambda v: OPERATIONS.psum(v, "x"))(parts(mesh))), "REST")
    assert extension.handler_calls() > before, "ours did not run"


def uses_lax() -> None:
    """All say why."""
    mesh = line()
    program = on(mesh, lambda v: OPERATIONS.psum(v, "x"))
    say(read(program(parts(mesh))), "SUM")
    (call,) = jax_intranode.explain(program)(parts(mesh))
    assert call.algorithm == "lax"
    say(call.reason)
