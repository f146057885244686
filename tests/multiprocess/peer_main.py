"""The program of a rank in test_peers.py: it runs some operations, and one rank ends early.

    peer_main.py PLATFORM ENDING WAITING VICTIM

WAITING is "waiting" or "not": whether the others call an operation before the rank ends; or "rest":
they do, and go on without it. "new": they call one later that needs another communicator.
"reason": all say why they use jax.lax, and end.

The last lines of main() are those of an ordinary program: it ends by an exception, or returns.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import cases  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_intranode  # noqa: E402
from jax_intranode._src.command_line import launcher  # noqa: E402
from jax_intranode._src.health import peers  # noqa: E402
from jax_intranode._src.native import extension  # noqa: E402

is_reversed = False  # whether the mesh has its devices in another order
SILENT_S = 3.0  # how long a process may be silent in these tests


def say(label: str, text: object = "") -> None:
    # Text and newline in one write, because threads that log write to the same file.
    print(f"{label}: {time.monotonic():.3f} {' '.join(str(text).split())}\n", end="", flush=True)


def mesh_of_all() -> jax.sharding.Mesh:
    devices = np.array(jax.devices())
    return jax.sharding.Mesh(devices[::-1] if is_reversed else devices, ("x",))


@functools.cache
def program(mesh: jax.sharding.Mesh) -> Any:
    """A sum that is compiled once, so that later calls begin to wait at once."""
    body = cases.sharded(lambda v: jax_intranode.psum(v, "x"), mesh, P("x"), P("x"))
    return jax.jit(body, in_shardings=jax.sharding.NamedSharding(mesh, P("x")))


def check_sum(seed: int) -> None:
    mesh = mesh_of_all()
    parts = cases.random("float32", (mesh.size, 100), seed)
    result = program(mesh)(cases.put(mesh, P("x"), parts))
    cases.check(result, cases.everywhere(cases.oracle(parts), mesh.size))


def attempt(label: str, seed: int) -> None:
    try:
        check_sum(seed)
    except Exception as error:  # XLA chooses the type
        say(label, error)
    else:
        say(label, "no error")


def end(how: str) -> None:
    """Ends the victim; a normal end and an exception are left to main()."""
    if how == "killed_parent":
        # A child like a data loader's: it has the descriptors of its parent and outlives it.
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        say("CHILD", child)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "os_exit":
        os._exit(0)
    elif how == "sys_exit":
        sys.exit(0)
    elif how == "exception":
        raise ValueError("the victim's own error")
    elif how == "shutdown":
        jax_intranode.shutdown()
        time.sleep(3)
    elif how == "interrupted":
        # As Ctrl-C in a terminal, which all processes get.
        ((_, other, *_),) = peers._watches[0].peers()
        os.kill(other, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # until the launcher ends it


def go_on_without(victim: int) -> None:
    """The other processes set up anew, with their devices."""
    jax_intranode.shutdown()
    jax.clear_caches()
    assert jax_intranode.last_failure() is not None
    devices = [device for device in jax.devices() if device.process_index != victim]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    jax_intranode.initialize(mesh)
    before = extension.handler_calls()
    for seed in range(3):
        parts = cases.random("float32", (mesh.size, 100), seed)
        cases.check(cases.psum_of(parts, mesh), cases.everywhere(cases.oracle(parts), mesh.size))
    assert extension.handler_calls() > before, "ours did not run"
    say("REST", "right")


def main() -> None:
    platform, ending, waiting, victim = sys.argv[1:]
    launcher.connect(platform)
    sys.excepthook = sys.__excepthook__  # end as programs do that nobody prepared
    peers.SILENT_S = SILENT_S
    jax_intranode.initialize(cases.line())
    if waiting == "reason":
        check_sum(0)
        mesh = cases.line()
        x = cases.put(mesh, P("x"), cases.random("float32", (mesh.size, 100), 0))
        (call,) = jax_intranode.explain(program(mesh))(x)
        assert call.algorithm == "lax"
        say("REASON", call.reason)
        return
    before = extension.handler_calls()
    check_sum(0)
    assert extension.handler_calls() > before, "ours did not run"
    say("PID", os.getpid())
    if jax.process_index() == int(victim):
        time.sleep(0.5)  # the others wait by then
        say("END")
        end(ending)
        return
    if waiting in ("not", "new"):
        time.sleep(4 if ending == "stopped" else 2.5)
    global is_reversed
    is_reversed = waiting == "new"
    say("CALL")
    attempt("FIRST", 1)
    attempt("LATER", 2)
    if waiting == "rest":
        go_on_without(int(victim))
        return
    failure = jax_intranode.last_failure()
    say("LAST", failure and f"{failure.reason} {failure.missing_process} {failure.message}")
    try:
        jax_intranode.initialize(cases.line())
    except jax_intranode.CommunicationError as error:
        say("INITIALIZE", error)
    assert np.all(np.asarray(jax.numpy.ones(4)) == 1)  # other work goes on
    raise RuntimeError("the survivor ends")


if __name__ == "__main__":
    main()
