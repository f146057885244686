"""Ordinary programs of several processes, which must not fail: how they end, and how they go on."""

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from cases import line
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import say
from processes import is_running

import jax_intranode
from jax_intranode._src.health import peers
from jax_intranode._src.native import extension

# How much longer one rank works than the other. A wait of 1 s tells nothing of a peer.
LATER_S = 2.0
# XLA:CPU runs a program of less than 1000 floating-point operations in the thread that calls it.
COLUMNS = 4096


def rank() -> int:
    return jax.process_index()


def on(mesh: Mesh, body: Callable[..., jax.Array]) -> Any:
    return jax.jit(cases.sharded(body, mesh, P("x"), P("x")))


def parts(mesh: Mesh, scale: float = 1.0) -> jax.Array:
    """The device with number r has a part of (r + 1) * scale."""
    column = np.arange(1, mesh.size + 1, dtype=np.float32)[:, None]
    return cases.put(mesh, P("x"), column * np.full((1, COLUMNS), scale, np.float32))


@functools.cache
def summing(mesh: Mesh) -> Any:
    return on(mesh, lambda v: jax_intranode.psum(v * 2, "x") / 2)


def total(scale: float = 1.0) -> jax.Array:
    """Dispatches a sum over all ranks: with two ranks 3 * scale."""
    mesh = line()
    return summing(mesh)(parts(mesh, scale))


def read(result: jax.Array) -> float:
    return float(np.asarray(result.addressable_data(0)).flat[0])


def begin() -> None:
    """The first sum: from here on the processes watch each other."""
    before = extension.handler_calls()
    result = read(total())
    assert result == sum(range(1, jax.process_count() + 1)), result
    assert extension.handler_calls() > before, "ours did not run"


def pids() -> list[int]:
    return np.asarray(multihost_utils.process_allgather(np.int32(os.getpid()))).tolist()


def in_background(*commands: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "; ".join(commands)])


# How processes end.


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


def last_step() -> jax.Array:
    """A step in which rank 1 computes between its two collectives, for longer than peers wait.

    Rank 0 comes later to the first one: rank 1 waits in a thread of XLA's.
    """
    own = times_that_take(4.5) if rank() == 1 else 1

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


def ends_while_it_computes_in_a_thread() -> None:
    """For longer than a peer waits for a process that has finished. It drops the result.

    XLA:CPU orders what one thread dispatches.
    """
    results = []
    thread = threading.Thread(target=lambda: results.append(last_step()))
    thread.start()
    thread.join()
    if rank() == 0:
        say(read(results[0]))
    results.clear()


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
        while time.monotonic() < deadline and is_running(pid):
            time.sleep(0.1)
        say(is_running(pid))


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


def another_name_on_one_rank() -> None:
    """The jitted functions do the same and have different names."""
    begin()
    mesh = line()

    def other(v: jax.Array) -> jax.Array:
        return jax_intranode.psum(v * 2, "x")

    body = other if rank() == 1 else lambda v: jax_intranode.psum(v * 2, "x")
    say(read(on(mesh, body)(parts(mesh))))


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


def forked_workers() -> None:
    """A pool, a child that a signal kills, one that ends by os._exit, and one that
    lives longer than its parent and has all of its descriptors."""
    begin()
    with warnings.catch_warnings(action="ignore"):  # JAX and Python warn of each fork
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


def ends_before_its_peer() -> None:
    """Rank 1 ends. Rank 0 is there to see how, and sets up one more operation."""
    if rank() == 0:
        time.sleep(LATER_S)
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
        evaluates_on_rank_0,
        another_name_on_one_rank,
        interrupted_in_a_wait,
        catches_exceptions,
        forked_workers,
    ):
        program()
    ends_before_its_peer()


def run(name: str, *arguments: str) -> None:
    """Runs one of the programs above, which ends as if nobody had prepared it."""
    # Programs that a shell starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__
    globals()[name](*arguments)
