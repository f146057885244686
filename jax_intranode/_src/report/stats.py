"""stats: how much this package has done in this process, and what it has left to jax.lax."""

from dataclasses import dataclass, field

from jax_intranode._src.group import communicator
from jax_intranode._src.health import counts
from jax_intranode._src.native import extension

# What `usage_counter` and `extension.handler_calls` were at the last reset.
_operations_before = 0
_handler_calls_before = 0


@dataclass(frozen=True)
class Lowered:
    """Operations of this package in the programs that were lowered.

    Attributes:
        operation: a function of this package. An operation of a gradient has the name of what it
            is.
        algorithm: what runs it, as in `Call.algorithm`; for an overlapped matmul "fused kernel" or
            "cuBLASLt pipeline".
        count: how many of them were lowered. JAX lowers equal operations of a program once, and
            also one in a loop, or in a function that is called several times.
        nbytes: bytes of all of them: of the array that a device gathers or sums.
    """

    operation: str
    algorithm: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Fallback:
    """Calls of this package that ``jax.lax`` runs, for one reason.

    Attributes:
        operation: the function's name.
        reason: why.
        count: how many of them were traced or lowered.
    """

    operation: str
    reason: str
    count: int


@dataclass(frozen=True)
class Stats:
    """What `stats` returns; ``str()`` gives a table.

    Attributes:
        operations: how many operations the devices of this process have executed, counted as by
            `usage_counter`.
        lowered: the operations in the programs that were lowered, most bytes first.
        fallbacks: the calls that fell back, most frequent first.
        waits: messages of waits that have lasted longer than JAX_INTRANODE_REPORT_AFTER_S, in the
            order in which they were first reported. Each says who waits for whom, and in what.
        handler_calls: how often XLA has called this package to run an operation, since the start or
            the last reset. It stands still while XLA replays CUDA graphs.
    """

    operations: int
    lowered: tuple[Lowered, ...] = field(default=())
    fallbacks: tuple[Fallback, ...] = field(default=())
    waits: tuple[str, ...] = field(default=())
    handler_calls: int = 0

    def __str__(self) -> str:
        """Returns all of it as text."""
        lines = [f"operations executed: {self.operations}"]
        lines += [f"calls of handlers by XLA: {self.handler_calls}"]
        lines += ["lowered:" if self.lowered else "lowered: none"]
        for row in self.lowered:
            lines.append(
                f"  {row.count:6} x {row.operation} as {row.algorithm}, {row.nbytes} bytes in all"
            )
        lines += ["fell back to jax.lax:" if self.fallbacks else "fell back to jax.lax: none"]
        lines += [f"  {row.count:6} x {row.operation}: {row.reason}" for row in self.fallbacks]
        lines += ["long waits:" if self.waits else "long waits: none"]
        lines += [f"  {message}" for message in self.waits]
        return "\n".join(lines)


def stats(*, reset: bool = False) -> Stats:
    """Returns what this package has done in this process: operations, bytes, fallbacks, waits.

    Programs do not become slower by it: what is executed is counted by the devices anyway, and
    everything else while a program is traced and lowered. A function that is traced or lowered
    again is counted again.

    >>> _ = jax_intranode.stats(reset=True)
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
    ... def total(x):
    ...     return jax_intranode.psum(x, "model")
    >>> y = total(jnp.ones(512)).block_until_ready()
    >>> print(jax_intranode.stats())  # each of the two devices has run the operation
    operations executed: 2
    calls of handlers by XLA: 2
    lowered:
           1 x psum as one_shot, 1024 bytes in all
    fell back to jax.lax: none
    long waits: none

    Args:
        reset: whether all counts begin anew after this call.

    Returns:
        The counts since the start of the process, or since the last reset.

    Raises:
        RuntimeError: as `usage_counter`.
    """
    global _operations_before, _handler_calls_before
    total, calls = communicator.usage_counter(), extension.handler_calls()
    operations, handler_calls = total - _operations_before, calls - _handler_calls_before
    if reset:
        _operations_before, _handler_calls_before = total, calls
    lowered, nbytes, fallbacks, waits = counts.take(reset)
    return Stats(
        operations=operations,
        lowered=tuple(
            sorted(
                (Lowered(*key, count, nbytes[key]) for key, count in lowered.items()),
                key=lambda row: (-row.nbytes, row.operation, row.algorithm),
            )
        ),
        fallbacks=tuple(Fallback(*key, count) for key, count in fallbacks.most_common()),
        waits=waits,
        handler_calls=handler_calls,
    )
