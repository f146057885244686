"""Ordinary programs of several processes: how their processes end. None of them may fail."""

import atexit
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from program_parts import (
    COLUMNS,
    LATER_S,
    begin,
    in_background,
    line,
    on,
    parts,
    rank,
    read,
    say,
    summing,
    total,
)

import jax_intranode
from jax_intranode._src.health import peers


def working(v: jax.Array, times: jax.Array) -> jax.Array:
    """XLA works, and the value stays.

    On GPUs it waits in each turn of the outer loop, but not of the inner one, whose turns it knows.
    Where a kernel of a peer spins on the same GPU, each wait lasts for the peer's time slice.
    """

    def some(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 1000, lambda _, a: jnp.maximum(a, 0.5), a)

    return jax.lax.fori_loop(0, times, lambda _, a: some(a), v)


def times_that_take(seconds: float) -> int:
    """How often `working` has to do its work; fewer where a busy machine becomes quiet."""
    program, value = jax.jit(working), jnp.ones((1, COLUMNS))
    program(value, 1).block_until_ready()
    times, took = 1, 0.0
    while took < 0.2:
        times *= 3
        started = time.monotonic()
        program(value, times).block_until_ready()
        took = time.monotonic() - started
    return int(seconds / took * times)


def last_step(seconds: float = 2.0) -> jax.Array:
    """A step in which rank 1 computes for some seconds between its two collectives.

    Rank 0 comes later to the first one: rank 1 waits in a thread of XLA's.
    """
    own = times_that_take(seconds) if rank() == 1 else 1

    def step(v: jax.Array, times: jax.Array) -> jax.Array:
        return jax_intranode.psum(working(jax_intranode.psum(v, "x"), times[0, 0]), "x")

    begin()
    program, x = on(line(), step), parts(line())
    # No constant of the program: XLA:GPU's autotuner waits for the peers to compile the same one.
    times = jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.full((1, COLUMNS), own))
    program.lower(x, times).compile()
    if rank() == 0:
        time.sleep(1)
    result = program(x, times)
    on_gpu = jax.default_backend() == "gpu"  # there the call itself lasts as long as the loop
    assert rank() == 0 or on_gpu or not result.is_ready()
    return result


def computes_in_the_last_step() -> None:
    global last
    last = last_step()  # alive until Python has ended
    if rank() == 0:
        say(read(last))


def ends_while_it_computes_in_a_thread() -> None:
    """For longer than a peer waits for a process that has finished. It drops the result.

    XLA:CPU orders what one thread dispatches.
    """
    results = []
    thread = threading.Thread(target=lambda: results.append(last_step(4.5)))
    thread.start()
    thread.join()
    if rank() == 0:
        say(read(results[0]))
    results.clear()


def other_threads_never_rest() -> None:
    """As those of a library that spins for good: no process waits for another one's to rest."""
    begin()
    peers._cpu_s_of_other_threads = time.monotonic
    time.sleep(rank())


def ends_long_before_its_peer() -> None:
    """Longer than JAX's last barrier may take, which `connect` sets to 30 s.

    At its end rank 1 can open no file.
    """
    begin()
    if rank() == 0:
        time.sleep(36)
        say(read(jax.jit(jnp.sum)(jnp.ones(4))))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)


def shuts_down_in_an_exit_handler() -> None:
    """The handler that runs after it calls a collective, for which rank 0 comes late."""
    begin()
    program, x = summing(line()), parts(line(), 2)

    def at_exit() -> None:
        if rank() == 0:
            time.sleep(2 * LATER_S + 1)
        say(read(program(x)))

    atexit.register(at_exit)
    atexit.register(jax.distributed.shutdown)


def signals_at_its_end() -> None:
    """A handler leaves rank 1, while it waits for its last step, and while it waits for rank 0."""

    class Preempted(BaseException):
        pass

    def leave(*_: object) -> None:
        raise next(reasons)

    begin()
    if rank() == 1:
        reasons = iter([Preempted(), SystemExit(0)])
        signal.signal(signal.SIGTERM, leave)
        term = f"kill -TERM {os.getpid()}"
        in_background(f"sleep {LATER_S}", term, f"sleep {2 * LATER_S}", term)
        total(2)
        return
    time.sleep(2 * LATER_S)
    say(read(total(2)))
    time.sleep(2 * LATER_S)


def ends_jax_itself(how: str) -> None:
    """Rank 1 does a part of what JAX does at exit. Rank 0 just ends, before it or after it."""
    begin()
    say(read(total(2)))
    if rank() == 1:
        if how == "shuts_down":
            jax.distributed.shutdown()
        else:
            jax.extend.backend.clear_backends()
    elif how == "clears_backends":
        time.sleep(LATER_S)


def leaves_after_shutdown() -> None:
    """Rank 1 becomes another program; no call needs it any more."""
    begin()
    say(read(total(2)))
    jax.distributed.shutdown()
    if rank() == 1:
        os.execv(sys.executable, [sys.executable, "-c", "print('END: None')"])
    time.sleep(LATER_S)


def distributed_shutdown_in_the_middle() -> None:
    """Programs that are compiled go on without JAX's service. Rank 0 waits for rank 1's end.

    A thread of rank 1 never rests.
    """
    begin()
    if rank() == 1:
        peers._cpu_s_of_other_threads = time.monotonic
    pid = int(multihost_utils.process_allgather(np.int32(os.getpid()))[1])
    jax.distributed.shutdown()
    if rank() == 1:
        time.sleep(LATER_S)
    say(read(total(2)))
    if rank() == 0:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and _runs(pid):
            time.sleep(0.1)
        say(_runs(pid))


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def calls_after_its_end() -> None:
    """A daemon thread of rank 1 calls once more when the process has told that it has finished."""
    begin()
    mesh = line()
    program = summing(mesh).lower(parts(mesh, 2)).compile()
    x = parts(mesh, 2)
    if rank() == 0:
        time.sleep(2 * LATER_S)
        say(read(program(x)))
        return

    def call() -> None:
        threading.main_thread().join()
        time.sleep(2 * LATER_S + 1)
        say(read(program(x)))

    threading.Thread(target=call, daemon=True).start()
