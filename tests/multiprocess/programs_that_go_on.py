"""Ordinary programs of several processes: speed, signals, forks, exceptions. None may fail."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from program_parts import (
    LATER_S,
    begin,
    in_background,
    line,
    on,
    parts,
    pids,
    rank,
    read,
    say,
    total,
)

import jax_intranode

# Ranks that are not equally fast.


def evaluates_on_rank_0() -> None:
    """With a program of its own, over a mesh of its own device."""
    begin()
    for scale in (2, 3):
        if rank() == 0:
            own = Mesh(np.array(jax.local_devices()), ("x",))
            evaluate = on(own, lambda v, s=scale: jax_intranode.psum(v * s, "x"))
            say(read(evaluate(parts(own))))
            time.sleep(LATER_S / 2)
        say(read(total(scale)))


def compiles_for_long() -> None:
    """One rank traces for seconds, before the rendezvous and after it."""
    mesh = line()
    for slow in range(2):

        def step(v: jax.Array, slow: int = slow) -> jax.Array:
            if rank() == slow:
                time.sleep(LATER_S)
            return jax_intranode.psum(v * (slow + 1), "x")

        say(read(on(mesh, step)(parts(mesh))))


def another_name_on_one_rank() -> None:
    """The jitted functions do the same and have different names."""
    begin()
    mesh = line()

    def other(v: jax.Array) -> jax.Array:
        return jax_intranode.psum(v * 2, "x")

    body = other if rank() == 1 else lambda v: jax_intranode.psum(v * 2, "x")
    say(read(on(mesh, body)(parts(mesh))))


def shutdown_twice() -> None:
    begin()
    for _ in range(1 + rank()):
        jax_intranode.shutdown()
    jax.clear_caches()
    jax_intranode.initialize(line())
    begin()
    say(read(total(2)))


def all_ranks_are_stopped(seconds: str = "8", later: str = "0.3") -> None:
    """For longer than the time limit of operations, or than a process may be silent, while rank 0
    waits. It is the first to go on, and rank 1 comes later."""
    begin()
    first, second = pids()
    read(total(2))  # so that rank 1 compiles nothing within the limit
    if rank() == 0:
        result = total(2)
        end = in_background(
            f"kill -STOP {first} {second}", f"sleep {seconds}", f"kill -CONT {first}",
            f"sleep {later}", f"kill -CONT {second}",
        )  # fmt: skip
        say(read(result))
        end.wait()
    else:
        time.sleep(LATER_S)
        say(read(total(2)))


# Processes, threads, signals.


@contextlib.contextmanager
def quiet_forks() -> Iterator[None]:
    """JAX and Python warn of each fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def forked_workers() -> None:
    """A pool, a child that a signal kills, one that ends by os._exit, and one that
    lives longer than its parent and has all of its descriptors."""
    begin()
    with quiet_forks():
        # Closed, not terminated: JAX's handler of SIGTERM keeps forked processes alive.
        with contextlib.closing(multiprocessing.get_context("fork").Pool(2)) as pool:
            say(sum(pool.map(abs, range(-8, 0))))
        pool.join()
        for end in ("killed", "_exit", "outlives"):
            child = os.fork()
            if child == 0:
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if end == "outlives":
                    time.sleep(4)
                os._exit(0)
            if end != "outlives":
                os.waitpid(child, 0)
    if rank() == 0:
        time.sleep(LATER_S)
    result = total(2)
    if rank() == 0:
        say(read(result))


def interrupted_in_a_wait() -> None:
    """Ctrl-C, as the terminal sends it to all: caught, and the program goes on."""
    begin()
    try:
        if rank() == 0:
            result = total(2)
        in_background("sleep 1", f"kill -INT {os.getpid()}")
        if rank() == 0:
            result.block_until_ready()
        time.sleep(LATER_S)
        say("not interrupted")
    except KeyboardInterrupt:
        say("interrupted")
    if rank() == 1:
        time.sleep(LATER_S)
        result = total(2)
    say(read(result))
    say(read(total(3)))


# Exceptions that do not end them.


def ends_before_its_peer(wait_s: float = LATER_S) -> None:
    """Rank 1 ends. Rank 0 is there to see how, and sets up one more operation."""
    if rank() == 0:
        time.sleep(wait_s)
        mesh = line()
        on(mesh, lambda v: jax_intranode.psum(v * 2, "x")).lower(parts(mesh))
        say(jax_intranode.last_failure())


def catches_exceptions() -> None:
    """Of a callback, of a wrong program, of threads; then rank 1 works without collectives."""

    def fail(value: object) -> np.ndarray:
        raise ValueError("the callback's own error")

    def fail_in_thread() -> None:
        raise ValueError("the thread's own error")

    begin()
    if rank() == 1:
        shape = jax.ShapeDtypeStruct((), np.float32)
        for attempt in (
            lambda: jax.pure_callback(fail, shape, 1.0).block_until_ready(),
            lambda: on(line(), lambda v: jax_intranode.psum(v, "nothing")).lower(parts(line())),
        ):
            try:
                attempt()
            except Exception as error:
                say(type(error).__name__)
        for target in (fail_in_thread, sys.exit):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        say(read(jax.jit(jnp.sum)(jnp.ones(4))))


def plain() -> None:
    begin()
    say(read(total(2)))
    jax_intranode.shutdown()


def all_that_go_on() -> None:
    """Those that need no start of their own. The first one sets up, and none has failed."""
    for program in (
        compiles_for_long,
        evaluates_on_rank_0,
        another_name_on_one_rank,
        interrupted_in_a_wait,
        shutdown_twice,
        catches_exceptions,
        forked_workers,
    ):
        program()
    ends_before_its_peer()
