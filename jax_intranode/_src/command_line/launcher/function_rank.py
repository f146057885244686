"""The program of a rank that calls a function of this package, as `functions.run_function` asks.

Command line: "module:name" of the function, its keyword arguments, the `Devices`, both as JSON, and
the file for the messages.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax

from jax_intranode._src.command_line.launcher import rank as launched
from jax_intranode._src.command_line.launcher.functions import Devices


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
            with self._messages.open("a") as file:
                file.write(json.dumps(message) + "\n")

    def begin(self, what: str) -> None:
        """Tells the parent process that a measurement begins."""
        self.tell(begun=what)

    def print(self, text: object) -> None:
        """Prints a line, if this is rank 0."""
        if self.number == 0:
            print(text, flush=True)

    def mesh(self) -> jax.sharding.Mesh:
        """Returns a mesh of all devices with one axis "x".

        Raises:
            RuntimeError: JAX runs on another platform.
        """
        if jax.default_backend() != self.devices.platform:
            raise RuntimeError(
                f"wanted JAX on {self.devices.platform}, got {jax.default_backend()}"
            )
        # make_mesh's default axis type is Explicit, which requires operands with shardings.
        return jax.make_mesh(
            (self.devices.size,),
            ("x",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[: self.devices.size],
        )


def main() -> None:
    """Calls the function. Rank 0 sends its result."""
    function, arguments, devices, messages = sys.argv[1:]
    rank = Rank(Devices(*json.loads(devices)), Path(messages))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, **json.loads(arguments))
    rank.tell(result=result)


if __name__ == "__main__":
    main()
