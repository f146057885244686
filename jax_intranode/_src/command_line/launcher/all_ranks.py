"""What each rank of `runs.run_function` is: its `Rank`, and numbers that all ranks exchange."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax

from jax_intranode._src import timeouts
from jax_intranode._src.command_line.launcher import rank as launched
from jax_intranode._src.command_line.launcher.own_files import open_own
from jax_intranode._src.command_line.launcher.runs import Devices
from jax_intranode._src.jax_private import distributed


class Rank:
    """A process of a job.

    Attributes:
        number: the rank.
        devices: the devices of the job.
    """

    def __init__(self, devices: Devices, messages: Path) -> None:
        """Joins the other ranks, if there are any."""
        self.devices = devices
        self.number = launched.connect(devices.platform) if devices.ranks > 1 else 0
        self._messages = messages

    def tell(self, **message: Any) -> None:
        """Sends a message to the parent process, if this is rank 0."""
        if self.number == 0:
            with open_own(self._messages, append=True) as file:
                file.write(f"{json.dumps(message)}\n".encode())

    def begin(self, what: str) -> None:
        """Tells the parent process that a measurement begins."""
        self.tell(begun=what)

    def print(self, text: object) -> None:
        if self.number == 0:
            print(text, flush=True)

    def mesh(self) -> jax.sharding.Mesh:
        """Returns a mesh of all devices with one axis "x".

        Raises:
            RuntimeError: JAX runs on another platform.
        """
        platform, size, _ = self.devices
        if jax.default_backend() != platform:
            raise RuntimeError(f"wanted JAX on {platform}, got {jax.default_backend()}")
        # make_mesh's default axis type is Explicit, which requires operands with shardings.
        auto = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((size,), ("x",), axis_types=auto, devices=jax.devices()[:size])


def call() -> None:
    """The program of a rank: calls the function that `run_function` asks for in `sys.argv`.

    Rank 0 sends its result.
    """
    function, arguments, devices, messages = sys.argv[1:]
    rank = Rank(Devices(*json.loads(devices)), Path(messages))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, **json.loads(arguments))
    rank.tell(result=result)


def values(name: str, value: float) -> list[float]:
    """Returns the values of all ranks; only this process's without `jax.distributed`.

    Args:
        name: identifies the value; each name may be used once.
    """
    client = distributed.key_value_client()
    if client is None:
        return [value]
    prefix = f"jax_intranode/command/{name}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", repr(float(value)))
    return [
        float(client.blocking_key_value_get(f"{prefix}/{rank}", int(timeouts.NUMBER_S * 1e3)))
        for rank in range(jax.process_count())
    ]


def total(name: str, value: int) -> int:
    return int(sum(values(name, value)))


def largest(name: str, value: float) -> float:
    """Returns the largest value of all ranks; NaN if one is NaN."""
    of_all = values(name, value)
    return next((v for v in of_all if v != v), max(of_all))
