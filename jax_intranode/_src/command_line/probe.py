"""A process of `doctor` that tests memory: whether devices, or processes, reach each other's.

    python -m jax_intranode._src.command_line.probe peers COUNT
    python -m jax_intranode._src.command_line.probe owner PLATFORM DEVICE PEER_DEVICE

The first one writes from each GPU into each other one, and reads it there. The second one
allocates memory, lets a second process open it and write, and reads it. Prints the failures as a
list in JSON.
"""

import json
import subprocess
import sys
from itertools import permutations
from typing import Any

from jax_intranode._src.native import extension

_BYTES = 1 << 16
_WORD = 0x600DCAFE


def main() -> int:
    """Runs the test that the command line names."""
    what, *arguments = sys.argv[1:]
    if what == "peers":
        print(json.dumps(_peers(int(arguments[0]))))
    elif what == "owner":
        platform, device, peer = arguments
        print(json.dumps(_owner(platform, int(device), peer)))
    else:
        platform, device, handle = arguments
        module = extension.module(platform)
        memory = module.open(int(device), bytes.fromhex(handle), _BYTES)
        module.write_word(int(device), memory.address, _WORD)
    return 0


def _peers(count: int) -> list[str]:
    module = extension.module("gpu")
    memory = [module.allocate(device, _BYTES, False) for device in range(count)]
    failures = []
    for number, (writer, owner) in enumerate(permutations(range(count), 2)):
        try:
            module.enable_peer_access(writer, owner)
            address = memory[owner].address + 4 * number
            module.write_word(writer, address, _WORD + number)
            found = module.read_word(owner, address)
            if found != _WORD + number:
                failures.append(f"GPU {writer} wrote {_WORD + number} to GPU {owner}, read {found}")
        except RuntimeError as error:
            failures.append(f"GPU {writer} to GPU {owner}: {error}")
    return failures


def _owner(platform: str, device: int, peer: str) -> list[str]:
    module: Any = extension.module(platform)
    memory = module.allocate(device, _BYTES, True)
    try:
        command = [*(sys.executable, "-P", "-m", "jax_intranode._src.command_line.probe", "open")]
        done = subprocess.run(
            [*command, platform, peer, memory.handle().hex()], capture_output=True, text=True
        )
    finally:
        memory.unlink()
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1:]
    found = module.read_word(device, memory.address)
    return [] if found == _WORD else [f"a process wrote {_WORD}, and the owner reads {found}"]


if __name__ == "__main__":
    sys.exit(main())
