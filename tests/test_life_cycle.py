"""Communicators over the life of a program: exit, fork, replay after shutdown."""

from pathlib import Path

import pytest
from devices import need_devices, need_gpus
from processes import free_port, python
from tiers import full, quick


def run_program(tmp_path: Path, code: str, *arguments: str) -> tuple[int, str]:
    """Runs a program on devices like the test's own; returns its status and what it printed."""
    code = PRELUDE + code
    outcome = python("-P", "-c", code, *arguments, cwd=tmp_path, JAX_NUM_CPU_DEVICES="2")
    return outcome.returncode, outcome.stdout


PRELUDE = """
import logging, os, sys
logging.basicConfig()
import jax, jax.numpy as jnp, jax_intranode
from jax.sharding import PartitionSpec as P
devices = jax.devices()[:2]
mesh = jax.make_mesh((2,), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
def body(v):
    for _ in range(8):
        v = jax_intranode.psum(v, "x") / 2
    return v
program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
x = jax.device_put(jnp.ones((2, 100)), jax.NamedSharding(mesh, P("x")))
def run(times):
    for _ in range(times):
        jax.block_until_ready(program(x))  # the result is freed: the next one lies at its address
"""

EXITS = {
    "after_shutdown": "run(6); jax_intranode.shutdown()",
    "executables_first": "run(6); del program; jax.clear_caches(); jax_intranode.shutdown()",
    "executables_last": "run(6); jax_intranode.shutdown(); jax.clear_caches(); del program",
    "in_flight": "for _ in range(6): y = program(x)",
    "initialized_only": "jax_intranode.initialize(mesh)",
    "backends_first": "run(6); jax.clear_caches(); jax.extend.backend.clear_backends(); "
    "jax_intranode.shutdown()",
}


@pytest.mark.parametrize("order", quick(EXITS, ("in_flight", "backends_first")))
def test_exit(tmp_path: Path, order: str) -> None:
    need_devices(2)
    status, text = run_program(tmp_path, f"import jax.extend.backend\n{EXITS[order]}\nprint('END')")
    assert status == 0, text
    assert text.endswith("END\n"), text


FORK = """
run(1)
import warnings
warnings.simplefilter("ignore")  # JAX and Python warn of it
child = os.fork()
if child == 0:
    for name, call in (
        ("psum", lambda: jax.jit(jax.shard_map(lambda v: jax_intranode.psum(v, "x"), mesh=mesh,
                                               in_specs=P("x"), out_specs=P())).lower(x)),
        ("initialize", lambda: jax_intranode.initialize(mesh)),
        ("shutdown", jax_intranode.shutdown),
        ("usage_counter", jax_intranode.usage_counter),
    ):
        try:
            call()
        except RuntimeError as error:
            print(name, error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run(1)
jax_intranode.shutdown()
print("END")
"""


def test_fork_is_refused(tmp_path: Path) -> None:
    need_devices(2)
    status, text = run_program(tmp_path, FORK)
    assert status == 0 and text.endswith("END\n"), text
    for name in ("psum", "initialize", "shutdown", "usage_counter"):
        assert f"{name} jax_intranode: this process was forked" in text, text
    assert text.count("'spawn'") == 4


def test_replay_after_shutdown(tmp_path: Path) -> None:
    """A closed communicator also fails programs that XLA replays without calling a handler.

    On CPU devices nothing is replayed: see test_program_from_before_shutdown_raises.
    """
    need_gpus()
    need_devices(2)
    code = (
        "run(12)\nfrom jax_intranode._src.native import extension\n"
        "before = extension.handler_calls()\nrun(3)\n"
        "print('CALLS', extension.handler_calls() - before, flush=True)\n"
        "jax_intranode.shutdown()\nimport time\n"
        "try:\n    run(1)\n    print('WENT THROUGH')\n"
        "except Exception as error:\n    print('RAISED', error, flush=True)\n"
        "    time.sleep(0.3)\n    os._exit(7)\n"
    )
    status, text = run_program(tmp_path, code)
    assert status == 7 and "RAISED" in text, text
    assert "jax_intranode.shutdown()" in text and "jax.clear_caches()" in text, text
    assert "CALLS 0\n" in text, text
    assert "replayed from a CUDA graph" in text, text


SHOWS = """
import atexit, code, sys
from jax_intranode._src.health import peers
atexit.register(lambda: print(f"[{peers._failed().partition(':')[0]}]"))
"""
STORED = "try:\n  1 / 0\nexcept Exception as error:\n  sys.last_exc = sys.last_value = error\n"
STORED += "  sys.last_traceback = error.__traceback__\n"
# What a program does, and what has ended it.
ENDS = {
    "raises_again": ("try:\n  1 / 0\nexcept Exception:\n  print()\n  raise", "ZeroDivisionError"),
    "raises_another": (f"{STORED}  raise KeyError from error", "KeyError"),
    "hook": (
        "def hook(kind, error, trace):\n  error.__traceback__ = None\nsys.excepthook = hook\n1 / 0",
        "ZeroDivisionError",
    ),
    "stores": (f"{STORED}print()", ""),
    "stores_and_exits": (f"{STORED}sys.exit(0)", ""),
    "console": ("code.InteractiveConsole(globals()).push('1 / 0')", ""),
}


@pytest.mark.parametrize("name", quick(ENDS, ("raises_again",)))
def test_what_has_ended_a_program(name: str) -> None:
    code, error = ENDS[name]
    assert python("-P", "-c", SHOWS + code).stdout.splitlines()[-1] == f"[{error}]"


# Ranks that are processes of `multiprocessing`. Rank 1 ends as the test says, before rank 0.
RANKS = """
import multiprocessing, os, sys, time
def rank(number, port, end):
    import jax, jax_intranode, numpy as np
    from jax.sharding import PartitionSpec as P
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lambda v: jax_intranode.psum(v, "x")
    f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()))
    x = np.array([1.0, 2.0], np.float32)
    f(x).block_until_ready()
    if number == 1:
        exec(end)
        return
    try:
        if end:
            f(x).block_until_ready()
        while not os.path.exists("over"):
            time.sleep(0.02)
        print("FAILURE", jax_intranode.last_failure(), flush=True)
    except Exception as error:
        print("RAISED", error, flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=rank, args=(r, *sys.argv[2:])) for r in (0, 1)]
    for process in ranks:
        process.start()
    ranks[1].join(20 if sys.argv[3] else 5)  # by "spawn" it waits for rank 0 in JAX's last barrier
    open("over", "w").close()
    for process in ranks:
        process.join(60)
        process.kill()
    print("CODES", [process.exitcode for process in ranks])
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "FAILURE None"),
        ("raise ValueError('loss is NaN')", "has failed: RuntimeError: exit code 1."),
        full("sys.exit(3)", "has failed: SystemExit: 3."),
    ],
    ids=["returns", "raises", "exits"],
)
@pytest.mark.parametrize("method", quick(("spawn", "forkserver", "fork"), ("forkserver",)))
def test_ranks_that_multiprocessing_starts(
    tmp_path: Path, method: str, end: str, said: str
) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(RANKS)
    command = (file, method, str(free_port()), end)
    done = python(*command, cwd=tmp_path, JAX_NUM_CPU_DEVICES="1", JAX_PLATFORMS="cpu")
    assert said in done.stdout, done.stdout
    if not end:
        assert "CODES [0, 0]" in done.stdout, done.stdout
    assert end.startswith("raise") == ("ValueError: loss is NaN" in done.stdout), done.stdout


# Stands in for gevent and eventlet: a thread of the package that one of these would make a greenlet
# ends the program.
GREENLETS = """
import _thread, queue, sys, threading
def is_ours(frame):
    while frame is not None:
        if "jax_intranode" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
def replaced(function):
    def call(*args, **kwargs):
        if is_ours(sys._getframe()):
            raise SystemError(f"{function} would make a greenlet")
        return function(*args, **kwargs)
    return call
for module in (_thread, threading):
    for name in ("start_new_thread", "start_joinable_thread"):
        for name in (name, "_" + name):
            if hasattr(module, name):
                setattr(module, name, replaced(getattr(module, name)))
queue.SimpleQueue = replaced(queue.SimpleQueue)
"""


def test_no_thread_is_a_greenlet(tmp_path: Path) -> None:
    """The monitor's, the one that ends jax.distributed, and those that ask JAX's store."""
    need_devices(2)
    code = (
        "from jax_intranode._src.group import key_value_store\n"
        "from jax_intranode._src.jax_private import distributed\n"
        "run(2)\n"
        "key_value_store._in_time(lambda: print('ASKED'))\n"
        "nothing = lambda *_: False\n"
        "distributed.bound_distributed_shutdown(nothing, nothing, nothing)\n"
        "import threading, time\n"
        "names = {'jax_intranode monitor', 'jax_intranode shutdown'}\n"
        "while not names <= {thread.name for thread in threading.enumerate()}:\n"
        "    time.sleep(0.01)\n"
    )
    outcome = python("-P", "-c", GREENLETS + PRELUDE + code, JAX_NUM_CPU_DEVICES="2")
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout == "ASKED\n"
