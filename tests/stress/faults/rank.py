"""The program of each process of a case: runs an operation again and again, or fails.

It tells what happens in lines of JSON, each with the time of the clock that all processes share.
"""

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src import timeouts
from jax_intranode._src.command_line.launcher import rank as launched
from jax_intranode._src.group import key_value_store, rendezvous
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.native import extension
from jax_intranode._src.selection.overlap import choice
from stress.faults import matrix, verdict
from stress.faults.matrix import Case
from stress.faults.operations import OPERATIONS, data

# Runs before the job ends. The fourth may be the victim's last one.
_RUNS = 5
_DELAYS_S = {"delay": 1.0, "late": 12.0}
# Turns of the loop inside a program: of one that a fault ends, and of one that ends by itself.
_ENDLESS, _LONG = 10**9, 3000
# How long a program with a loop has run when the victim fails, and how long after a fault the
# others are idle.
_WAIT_S = 0.5
_IDLE_S = 2.0
# A victim that stays alive outlives the others.
_AWAY_S = 600.0
# How long a victim that raises waits at most before it ends JAX's backends.
_KNOWN_S = 25.0

# The exit code of a process whose peers would not meet.
_REFUSED = 4


class Injected(RuntimeError):
    """The exception of a victim."""


class Rank:
    """A process of a case."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        """Takes the case, the number of this process and the folder of all events."""
        self._case = case
        self._rank = rank
        self._folder = folder
        self._events = os.open(folder / f"{rank}.events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._operation = OPERATIONS[case.operation]

    def say(self, event: str, **facts: Any) -> None:
        """Writes a line about what happens now."""
        line = json.dumps({"event": event, "time": time.monotonic(), **facts}) + "\n"
        os.write(self._events, line.encode())

    def run(self) -> None:
        """Runs the operation until the victim fails, and in the others until the error comes."""
        mesh = cases.line()
        self._phase("meeting")
        if self._is_victim and self._case.phase.startswith("in_meeting_"):
            self._fail_in_stage(self._case.phase.removeprefix("in_meeting_"))
        self.say("begins")
        self._meet(mesh)
        with contextlib.ExitStack() as settings:
            if self._operation.unedited:
                settings.enter_context(jax_intranode.accelerate())
            if self._overlapped:
                settings.enter_context(choice.forced(self._operation.plan))
            self._again = functools.partial(jax_intranode.initialize, mesh)
            try:
                self._use(mesh)
            except Exception:
                if self._is_victim or not self._case.rest_goes_on(jax.default_backend()):
                    raise
                self._go_on(mesh)

    def _go_on(self, mesh: Mesh) -> None:
        """The processes that are left set up anew, with their devices."""
        jax_intranode.shutdown()
        jax.clear_caches()
        devices = [d for d in mesh.devices.flat if d.process_index != self._case.victim]
        rest = Mesh(np.array(devices), ("x",))
        jax_intranode.initialize(rest)
        v = cases.put(rest, P("x"), np.float32(self._case.survivors))
        before = extension.handler_calls()
        program = jax.jit(_sharded(lambda v: jax_intranode.psum(v, "x"), rest, P("x")))
        (total,) = np.asarray(program(v).addressable_data(0))
        ours = extension.handler_calls() > before and jax_intranode.last_failure() is not None
        self.say("right" if ours and total == sum(self._case.survivors) else "wrong", turn="rest")
        self.say("went on")

    @property
    def _overlapped(self) -> bool:
        return self._operation.plan is not None and jax.default_backend() == "gpu"

    def _meet(self, mesh: Mesh) -> None:
        """Lets the processes meet. Ends this one if they can't use our kernels."""
        try:
            jax_intranode.initialize(mesh)
            reason = rendezvous.rendezvous_of(mesh.devices.flat).reason
        except Exception as error:
            self._tell(error)
            raise
        if reason is None or self._case.fault == "none":
            return
        self.say("refused", text=reason)
        # jax.lax would take over, and wait for the victim in its own way.
        if self._case.before_watch:
            os._exit(_REFUSED)  # JAX's last barrier would wait for the victim
        raise RuntimeError(reason)

    @property
    def _is_victim(self) -> bool:
        return self._rank == self._case.victim

    @property
    def _ends_in_order(self) -> bool:
        return self._case.raises or self._case.fault == "exit"

    def _use(self, mesh: Mesh) -> None:
        def of_device(v: Any) -> Any:
            return self._operation.run(v, "x")

        def repeated(count: Any, v: Any) -> Any:
            def turn(_: Any, state: Any) -> Any:
                # The same value, which XLA does not know.
                v, _ = state
                y = self._operation.run(v, "x")
                return v + (jnp.max(y) > 1e9), y

            zeros = jnp.zeros_like(jax.eval_shape(lambda u: self._operation.run(u, "x"), v))
            return lax.fori_loop(0, count, turn, (v, zeros))[1]

        once = jax.jit(_sharded(of_device, mesh, (P("x"),)))
        v = self._operand(mesh, 0)
        if self._case.fault == "none":
            self.say("explained", text=" ".join(c.reason for c in jax_intranode.explain(once)(v)))
        if self._case.phase in ("inside", "idle"):
            # All are through when the victim begins to fail, and nobody waits for anybody.
            self._check(once(v), 0)
            self._together("run")
        if self._case.phase == "inside":
            ends = not self._case.fails or self._ends_in_order
            count = cases.put(mesh, P(), np.int32(_LONG if ends else _ENDLESS))
            program = jax.jit(_sharded(repeated, mesh, (P(), P("x")))).lower(count, v).compile()
            self._together("compiled")
            self._attempt(lambda: self._run_inside(program, count, v))
        elif self._case.phase == "idle":
            if self._is_victim:
                self.fail()
            elif self._case.fault != "none":
                time.sleep(_IDLE_S)
        else:
            self._phase("lowering")
        for k in range(_RUNS):
            self._phase(("first_run", "second_run", "", "fourth_run", "")[k])
            self._attempt(functools.partial(self._run_once, once, mesh, k))
        self.say("done")

    def _run_inside(self, program: Any, count: Any, v: Any) -> None:
        if self._is_victim and self._ends_in_order:
            program(count, v)
            self.fail()  # without waiting for the result
        if self._is_victim and self._case.fault != "none":
            self._fail_soon()
        self._check(program(count, v), 0)

    def _run_once(self, program: Any, mesh: Mesh, turn: int) -> None:
        self._check(program(self._operand(mesh, turn)), turn)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Makes a call. When it raises, tells of it, of the next calls' errors, and raises."""
        self.say("begins")
        try:
            call()
        except Injected:
            raise
        except Exception as error:
            self._tell(error)
            for again in (call, self._again):
                self.say("begins")
                try:
                    again()
                except Exception as later:
                    self._tell(later)
                else:
                    self.say("no later error")
            raise

    def _tell(self, error: Exception) -> None:
        failure = jax_intranode.last_failure()
        to_monotonic = time.monotonic() - time.time()
        self.say(
            "error",
            type=type(error).__name__,
            text=str(error),
            failure=failure.message if failure is not None else "",
            reason=failure and failure.reason,
            missing=failure and failure.missing_process,
            found=failure.time + to_monotonic if failure is not None else None,
        )

    def _check(self, result: jax.Array, turn: int) -> None:
        jax.block_until_ready(result)
        world = self._case.world
        xs = np.stack([data(rank, world, turn) for rank in range(world)])
        expected = self._operation.expected(xs, self._rank)
        (shard,) = result.addressable_shards
        right = bool(np.array_equal(np.asarray(shard.data), expected))
        self.say("right" if right else "wrong", turn=turn)

    def _operand(self, mesh: Mesh, turn: int) -> jax.Array:
        world = self._case.world
        parts = np.concatenate([data(rank, world, turn) for rank in range(world)])
        return cases.put(
            mesh, P("x"), parts.astype(jnp.bfloat16 if self._overlapped else np.float32)
        )

    def _together(self, stage: str) -> None:
        """Waits until all processes have come to this stage."""
        client = distributed.key_value_client()
        assert client is not None
        client.wait_at_barrier(f"faults/{stage}", 60_000)

    # What a victim does.

    def _phase(self, name: str) -> None:
        if self._is_victim and name == self._case.phase:
            self.fail()

    def fail(self) -> None:
        """Fails."""
        if self._case.fault == "none":
            return
        self.say("fault")
        match self._case.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                if not (self._case.in_meeting or self._case.phase == "inside"):
                    distributed.at_end_of_backends(self._until_others_know)
                raise Injected("the injected fault")
            case "interrupt":
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(_AWAY_S)
            case "shutdown":
                jax_intranode.shutdown()
                time.sleep(_AWAY_S)
            case "away":
                time.sleep(_AWAY_S)
            case "exit":
                sys.exit(3)
            case "os_exit":
                os._exit(3)
            case "delay" | "late" as fault:
                time.sleep(_DELAYS_S[fault])

    def _until_others_know(self) -> None:
        """The end of JAX's backends may wait for kernels that wait for this process."""
        files = [self._folder / f"{rank}.events" for rank in self._case.survivors]
        deadline = time.monotonic() + _KNOWN_S
        while not all('"error"' in file.read_text() for file in files):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(1)  # until what they tell in turn has come

    def _fail_in_stage(self, stage: str) -> None:
        gather = key_value_store.KeyValueStore.gather

        def failing(store: Any, of: str, *arguments: Any) -> Any:
            if of == stage:
                self.fail()
            return gather(store, of, *arguments)

        setattr(key_value_store.KeyValueStore, "gather", failing)  # noqa: B010, or mypy objects

    def _fail_soon(self) -> None:
        """Lets this process fail while its program runs. A delay stops the whole process."""

        def later() -> None:
            delay_s = _DELAYS_S.get(self._case.fault)
            time.sleep(_WAIT_S if delay_s is None else 0.05)
            if delay_s is not None:
                self.say("fault")
                with subprocess.Popen(["sh", "-c", f"sleep {delay_s}; kill -CONT {os.getpid()}"]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            else:
                self.fail()

        threading.Thread(target=later, daemon=True).start()


def _sharded(f: Any, mesh: Mesh, in_specs: Any) -> Any:
    return cases.sharded(f, mesh, in_specs, P("x"))


def main() -> None:
    """Command line: the case, the platform, this process's number, and the folder of events."""
    case, platform, rank = matrix.parse(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    logging.basicConfig()
    if case.fault == "stop":
        timeouts.SILENT_S = verdict.SILENT_S
    launched.join_at_first_use()
    Rank(case, rank, Path(sys.argv[4])).run()


if __name__ == "__main__":
    main()
