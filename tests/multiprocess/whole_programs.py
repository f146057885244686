"""Whole programs of several processes: ordinary ones, which must not fail, and faulty ones.

    whole_programs.py PLATFORM NAME [ARGUMENT] [lax]

runs the function NAME as one rank. PLATFORM is "launch" under `launch`, which connects the ranks. A
line "RESULT: ..." is what a test checks, and the line "END: ..." has the failure that the process
ended with. With "lax" the program calls jax.lax, to see by hand that an ordinary program is right
there; programs that call the package itself need the package.
"""

import atexit
import sys


def _say_how_it_ended() -> None:
    """Runs after all that JAX and the package do at exit, because it was registered before."""
    failure = jax_intranode.last_failure()
    print("END:", failure and failure.message, flush=True)


if __name__ == "__main__":
    atexit.register(_say_how_it_ended)

import code  # noqa: E402
import concurrent.futures  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import logging  # noqa: E402
import math  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import pdb  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.extend.backend  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_intranode  # noqa: E402
from jax_intranode._src.command_line import launcher  # noqa: E402
from jax_intranode._src.native import extension  # noqa: E402
from jax_intranode._src.selection import config  # noqa: E402

CALLS_LAX = sys.argv[-1] == "lax"
OPERATIONS: Any = jax.lax if CALLS_LAX else jax_intranode
# How much longer one rank works than the other. A wait of 1 s tells nothing of a peer.
LATER_S = 3.0
ROWS = P("x")
# XLA:CPU runs a program of less than 1000 floating-point operations in the thread that calls it.
COLUMNS = 4096


# What the programs share.


def say(text: object, label: str = "RESULT") -> None:
    # Text and newline in one write, because threads that log write to the same file.
    print(f"{label}: {' '.join(str(text).split())}\n", end="", flush=True)


def rank() -> int:
    return jax.process_index()


def line() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def on(mesh: Mesh, body: Callable[[jax.Array], jax.Array], *, spec: P = ROWS) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def parts(mesh: Mesh, scale: float = 1.0, *, spec: P = ROWS) -> jax.Array:
    """The device with number r has a part of (r + 1) * scale."""
    column = np.arange(1, mesh.size + 1, dtype=np.float32)[:, None]
    values = column * np.full((1, COLUMNS), scale, np.float32)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])


@functools.cache
def summing(mesh: Mesh) -> Any:
    return on(mesh, lambda v: OPERATIONS.psum(v * 2, "x") / 2)


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
    assert CALLS_LAX or extension.handler_calls() > before, "ours did not run"


def pids() -> list[int]:
    return np.asarray(multihost_utils.process_allgather(np.int32(os.getpid()))).tolist()


def in_background(*commands: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "; ".join(commands)])


# The ordinary programs: how they end.


def last_step_unread() -> None:
    """Rank 1 ends with its last step; rank 0 writes a checkpoint before the same step."""
    begin()
    if rank() == 0:
        time.sleep(LATER_S)
    result = total(2)
    if rank() == 0:
        say(read(result))
    else:
        assert not result.is_ready()


def last_result_deleted() -> None:
    begin()
    if rank() == 0:
        time.sleep(LATER_S)
    result = total(2)
    if rank() == 0:
        say(read(result))
    else:
        result.delete()


def working(v: jax.Array, times: jax.Array) -> jax.Array:
    """XLA works, and the value stays."""
    return jax.lax.fori_loop(0, times, lambda _, a: jnp.maximum(a, 0.5), v)


def times_that_take(seconds: float) -> int:
    """How often `working` has to do its work; fewer where a busy machine becomes quiet."""
    program, value = jax.jit(working), jnp.ones((1, COLUMNS))
    program(value, 1).block_until_ready()
    times, took = 100, 0.0
    while took < 0.2:
        times *= 3
        started = time.monotonic()
        program(value, times).block_until_ready()
        took = time.monotonic() - started
    return int(seconds / took * times)


def last_step() -> jax.Array:
    """A step in which rank 1 computes for some seconds between its two collectives.

    Rank 0 comes later to the first one: rank 1 waits in a thread of XLA's.
    """
    times = times_that_take(3.5)

    def step(v: jax.Array) -> jax.Array:
        v = OPERATIONS.psum(v, "x")
        mine = jnp.where(jax.lax.axis_index("x") == 1, times, 1)
        return OPERATIONS.psum(working(v, mine), "x")

    begin()
    program, x = on(line(), step), parts(line())
    program.lower(x).compile()
    if rank() == 0:
        time.sleep(1)
    result = program(x)
    assert rank() == 0 or not result.is_ready()
    return result


def computes_in_the_last_step() -> None:
    global last
    last = last_step()  # alive until Python has ended
    if rank() == 0:
        say(read(last))


def drops_the_last_step() -> None:
    """Nothing in Python knows of the step that still runs when rank 1 ends."""
    if rank() == 0:
        say(read(last_step()))
    else:
        last_step()


def ends_at_different_times() -> None:
    """Further apart than the time limit of operations."""
    begin()
    say(read(total(2)))
    time.sleep([2, 7, 0][rank()])
    say(read(jax.jit(jnp.sum)(jnp.ones(4))))  # work of its own


def ends_long_before_its_peer() -> None:
    """Longer than JAX's last barrier may take, which `launcher.connect` sets to 30 s."""
    begin()
    if rank() == 0:
        time.sleep(36)
        say(read(jax.jit(jnp.sum)(jnp.ones(4))))


def half_of_the_ranks_end() -> None:
    """Ranks 2 and 3 end, and the group of ranks 0 and 1 goes on."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices, ("data", "x"))
    spec = P(("data", "x"))
    program = on(mesh, lambda v: OPERATIONS.psum(v, "x"), spec=spec)
    say(read(program(parts(mesh, spec=spec))))
    if rank() > 1:
        return
    for scale in (2, 3):
        time.sleep(LATER_S / 2)
        pair = Mesh(devices[0], ("x",))
        say(read(summing(pair)(parts(pair, scale))))


def ends_before_its_peer_lowers() -> None:
    """Rank 0 compiles one more program over all devices, for its costs, and runs it nowhere."""
    begin()
    if rank() == 0:
        time.sleep(LATER_S)
        mesh = line()
        lowered = on(mesh, lambda v: OPERATIONS.psum(v * 2, "x")).lower(parts(mesh))
        say(lowered.compile() is not None)


def ends_in_a_function() -> None:
    def train() -> None:
        try:
            sys.exit(0)
        finally:
            result = total(2)
            if rank() == 0:
                say(read(result))

    begin()
    if rank() == 0:
        time.sleep(LATER_S)
    train()


def collective_in_exit_handlers() -> None:
    """One handler is registered before the first collective, and one after it."""

    def at_exit(scale: float, wait_s: float) -> None:
        if rank() == 1:
            time.sleep(wait_s)
        say(read(total(scale)))

    atexit.register(at_exit, 3, LATER_S)
    begin()
    atexit.register(at_exit, 2, 0)


def thread_after_the_end() -> None:
    """A thread that is no daemon calls collectives when the main thread has come to its end."""

    def work() -> None:
        threading.main_thread().join()
        for scale in (2, 3):
            if rank() == 1:
                time.sleep(LATER_S / 2)
            say(read(total(scale)))

    begin()
    threading.Thread(target=work).start()


def distributed_shutdown_at_the_end() -> None:
    begin()
    if rank() == 0:
        time.sleep(LATER_S)
    result = total(2)
    if rank() == 0:
        say(read(result))
    jax.distributed.shutdown()
    say(read(jax.jit(jnp.sum)(jnp.ones(4))))


def distributed_shutdown_in_the_middle() -> None:
    """Programs that are compiled go on without JAX's service."""
    begin()
    jax.distributed.shutdown()
    if rank() == 1:
        time.sleep(LATER_S)
    say(read(total(2)))


def distributed_again() -> None:
    begin()
    # Another port: on the same one rank 1 could still reach the service that rank 0 will end.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = multihost_utils.broadcast_one_to_all(np.int32(free.getsockname()[1]))
    if not CALLS_LAX:
        jax_intranode.shutdown()
    jax.distributed.shutdown()
    summing.cache_clear()
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    os.environ[config.COORDINATOR] = f"127.0.0.1:{port}"
    launcher.connect(jax.config.jax_platforms)
    begin()
    if rank() == 0:
        time.sleep(LATER_S)
    result = total(2)
    if rank() == 0:
        say(read(result))


def shutdown_twice() -> None:
    begin()
    for _ in range(1 + rank()):
        jax_intranode.shutdown()
    jax.clear_caches()
    jax_intranode.initialize(line())
    begin()
    say(read(total(2)))


# The ordinary programs: ranks that are not equally fast.


def checkpoint_between_steps() -> None:
    """Rank 0 saves and reads each step, rank 1 is ahead and reads the last one."""
    begin()
    with tempfile.TemporaryDirectory() as directory:
        for scale in (2, 3, 4):
            result = total(scale)
            if rank() == 0:
                np.save(Path(directory) / f"{scale}.npy", result.addressable_data(0))
                time.sleep(LATER_S / 2)
    say(read(result))


def evaluates_on_rank_0() -> None:
    """With a program of its own, over a mesh of its own device."""
    begin()
    for scale in (2, 3):
        if rank() == 0:
            own = Mesh(np.array(jax.local_devices()), ("x",))
            evaluate = on(own, lambda v, s=scale: OPERATIONS.psum(v * s, "x"))
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
            return OPERATIONS.psum(v * (slow + 1), "x")

        say(read(on(mesh, step)(parts(mesh))))


def another_name_on_one_rank() -> None:
    """The jitted functions do the same and have different names."""
    begin()
    mesh = line()

    def other(v: jax.Array) -> jax.Array:
        return OPERATIONS.psum(v * 2, "x")

    body = other if rank() == 1 else lambda v: OPERATIONS.psum(v * 2, "x")
    say(read(on(mesh, body)(parts(mesh))))


def one_rank_is_stopped() -> None:
    """Each rank in turn, while the other one waits."""
    begin()
    others = pids()
    for stopped in range(2):
        if rank() == stopped:
            time.sleep(2)
            say(read(total(2 + stopped)))
        else:
            result = total(2 + stopped)
            pid = others[stopped]
            in_background(f"kill -STOP {pid}", "sleep 4", f"kill -CONT {pid}").wait()
            say(read(result))


def all_ranks_are_stopped() -> None:
    """For longer than the time limit of operations, while rank 0 waits. It is the first to go on,
    and rank 1 comes 0.3 s later."""
    begin()
    first, second = pids()
    read(total(2))  # so that rank 1 compiles nothing within the limit
    if rank() == 0:
        result = total(2)
        end = in_background(
            f"kill -STOP {first} {second}", "sleep 8", f"kill -CONT {first}", "sleep 0.3",
            f"kill -CONT {second}",
        )  # fmt: skip
        say(read(result))
        end.wait()
    else:
        time.sleep(LATER_S)
        say(read(total(2)))


# The ordinary programs: processes, threads, signals.


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


def forks_beside_a_thread() -> None:
    """As data loaders do. JAX warns of each fork: it prints, and another thread runs meanwhile."""
    begin()
    warnings.simplefilter("always")
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert jax_intranode.last_failure() is None
            time.sleep(0.001)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    for _ in range(500 if rank() == 0 else 0):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    over.set()
    thread.join()
    say(read(total(2)))


def spawned_workers() -> None:
    """A worker imports this file, and with it the package; another child is an own program."""
    begin()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        result = total(2)
        say(pool.submit(math.sqrt, 16).result())
    subprocess.run([sys.executable, "-c", "import jax_intranode"], check=True)
    say(read(result))


def checkpoints_at_sigterm() -> None:
    """Rank 0 gets the signal, and all ranks agree to end."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    begin()
    if rank() == 0:
        in_background("sleep 1", f"kill -TERM {os.getpid()}")
    while read(total(len(told) if rank() == 0 else 0)) == 0:
        time.sleep(0.05)
    time.sleep(LATER_S * rank())
    say(read(total(2)))


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


# The ordinary programs: exceptions that do not end them.


def ends_before_its_peer(wait_s: float = LATER_S) -> None:
    """Rank 1 ends. Rank 0 is there to see how, and sets up one more operation."""
    if rank() == 0:
        time.sleep(wait_s)
        mesh = line()
        on(mesh, lambda v: OPERATIONS.psum(v * 2, "x")).lower(parts(mesh))
        say(jax_intranode.last_failure())


def console_that_showed_an_exception() -> None:
    begin()
    if rank() == 1:
        console = code.InteractiveConsole()
        console.push("1 / 0")
        console.push("done = 7")
        say(console.locals["done"])
    ends_before_its_peer()


def debugger_that_showed_an_exception() -> None:
    """The console's exception once more, in the debugger, which reads the end of its input."""
    begin()
    if rank() == 1:
        code.InteractiveConsole().push("1 / 0")
        pdb.pm()
        say("went on")
    ends_before_its_peer()


TESTS = """
import jax, jax.numpy, numpy, pytest
from jax.sharding import PartitionSpec as P
import jax_intranode

@pytest.fixture(scope="session")
def mesh():
    return jax.sharding.Mesh(numpy.array(jax.devices()), ("x",))

@pytest.fixture(params=[1.0, 2.0])
def total(mesh, request):
    x = jax.make_array_from_callback(
        (mesh.size,), jax.NamedSharding(mesh, P("x")),
        lambda index: numpy.full(1, request.param, numpy.float32))
    add = jax.shard_map(
        lambda v: jax_intranode.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return jax.jit(add)(x).addressable_data(0)[0] / request.param

def test_total(mesh, total):
    assert total == mesh.size

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_that_is_known_to_fail(mesh):
    1 / 0
"""


def pytest_in_a_rank() -> None:
    import pytest

    begin()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "test_in_a_rank.py"
        file.write_text(TESTS)
        say(int(pytest.main(["-q", "-p", "no:cacheprovider", str(file)])))
    ends_before_its_peer()


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
            lambda: on(line(), lambda v: OPERATIONS.psum(v, "nothing")).lower(parts(line())),
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
    ends_before_its_peer()


def exit_handler_of_jax_fails() -> None:
    """As on a GPU after a callback's error: JAX's exit handler raises it and does no more."""

    def fail() -> None:
        raise ValueError("the callback's own error")

    begin()
    if rank() == 1:
        vars(sys.modules["jax._src.api"])["effects_barrier"] = fail
    ends_before_its_peer()


def plain() -> None:
    begin()
    say(read(total(2)))
    jax_intranode.shutdown()


def resumes(checkpoint: str) -> None:
    """Under `launch --restarts`: the first time rank 1 fails after a step, next time both end."""
    begin()
    file = Path(checkpoint)
    step = float(file.read_text()) if file.exists() else 0
    say(f"from {step}")
    result = total(step + 1)
    if step == 0:
        assert read(result) == 3
        if rank() == 1:
            file.write_text("1")
            raise ValueError("the first time")
        time.sleep(60)  # until `launch` ends it
    if rank() == 0:
        say(read(result))


# Faulty programs. Rank 0 says what it is told.


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
    attempt(call_back, "CALLBACK")
    attempt(lambda: jnp.zeros((1 << 44,), np.int8).block_until_ready(), "MEMORY")
    end_of_rank_0()


def raises() -> None:
    begin()
    if rank() == 1:
        time.sleep(1)
        raise ValueError("loss is NaN")
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def raises_after_another_was_shown() -> None:
    begin()
    if rank() == 1:
        code.InteractiveConsole().push("1 / 0")
        time.sleep(1)
        raise ValueError("loss is NaN")
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def raises_with_a_hook() -> None:
    """The program prints its exceptions itself."""
    sys.excepthook = lambda kind, error, trace: print("own hook:", error, flush=True)
    raises()


def raises_in_a_signal_handler() -> None:
    def handle(number: int, frame: object) -> None:
        raise TimeoutError("the job's time is over")

    begin()
    if rank() == 1:
        signal.signal(signal.SIGALRM, handle)
        signal.alarm(1)
        time.sleep(60)
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def is_interrupted() -> None:
    begin()
    if rank() == 1:
        in_background("sleep 1", f"kill -INT {os.getpid()}")
        time.sleep(60)
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def is_needed_after_its_end() -> None:
    begin()
    if rank() == 1:
        return
    time.sleep(LATER_S)
    attempt(lambda: read(total(2)))
    end_of_rank_0()


def ends_while_it_is_waited_for() -> None:
    begin()
    if rank() == 1:
        time.sleep(1)
        return
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


def waits_in_another_operation() -> None:
    begin()
    mesh = line()
    gathering = on(mesh, lambda v: OPERATIONS.all_gather(v, "x", tiled=True)[:1])
    listen(f"rank {1 - rank()}", "psum", "all_gather")
    wait_in(total(2) if rank() == 0 else gathering(parts(mesh)))


def waits_in_another_group() -> None:
    """Rank 0 waits for rank 1 in one group, and rank 1 for rank 0 in another one."""
    begin()
    mesh = line()
    pair = Mesh(mesh.devices.reshape(2, 1), ("x", "y"))
    swapped = Mesh(mesh.devices[::-1], ("x",))
    summing_there = on(swapped, lambda v: OPERATIONS.psum(v * 2, "x"))
    jax_intranode.initialize(pair)
    jax_intranode.initialize(swapped)
    listen(f"rank {rank()} (device", "waits in another operation", "They wait in a circle")
    wait_in(total(2) if rank() == 0 else summing_there(parts(swapped)))


def three_wait_in_a_circle() -> None:
    """Rank r waits for rank r + 1, in a group of these two."""
    begin()
    meshes = [Mesh(np.array(jax.devices())[[r, (r + 1) % 3]], ("x",)) for r in range(3)]
    for number, mesh in enumerate(meshes):
        if rank() in (number, (number + 1) % 3):
            result = on(mesh, lambda v: OPERATIONS.psum(v * 2, "x"))(parts(mesh))
            assert read(result) == 6
    listen(f"(device {jax.local_devices()[0].id}) waits", "They wait in a circle")
    mesh = meshes[rank()]
    wait_in(on(mesh, lambda v: OPERATIONS.psum(v * 2, "x"))(parts(mesh)))


def is_needed_in_the_last_barrier() -> None:
    """Rank 1 ends jax.distributed by hand, which waits for rank 0, which waits for a sum."""
    begin()
    if rank() == 1:
        jax.distributed.shutdown()
        return
    listen("waits for rank 1", "jax.distributed.shutdown()")
    wait_in(total(2))


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


def main() -> None:
    platform, name, *arguments = sys.argv[1:]
    logging.basicConfig()
    # Programs that a shell starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if platform != "launch":
        launcher.connect(platform)
    sys.excepthook = sys.__excepthook__  # end as programs do that nobody prepared
    globals()[name](*(a for a in arguments if a != "lax"))


if __name__ == "__main__":
    main()
