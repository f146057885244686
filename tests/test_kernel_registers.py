"""The kernels of collectives have as few registers as their grids allow."""

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from jax_intranode._src.native import extension
from jax_intranode._src.selection import select
from jax_intranode._src.selection.generations import HOPPER

pytestmark = pytest.mark.one_version

REGISTERS_OF_AN_SM = 65536
THREADS = (64, 128, 256, 512)


class Kernel(NamedTuple):
    """A kernel of xla_ffi/cuda/collectives.cuh, for groups of a size; 0: of any."""

    name: str
    size: int
    aligned: bool
    registers: int

    def resident(self, threads: int) -> int:
        """How many blocks run at the same time. A warp's registers are given out by 256."""
        of_a_warp = -(-self.registers * 32 // 256) * 256
        of_an_sm = min(REGISTERS_OF_AN_SM // (of_a_warp * (threads // 32)), 2048 // threads)
        return HOPPER.sms * of_an_sm


def kernels_in(text: str) -> list[Kernel]:
    """The kernels that ``cuobjdump --dump-resource-usage`` lists."""
    names = "kernel|cube_mesh|dispatch|combine"
    found = re.findall(rf"Function (\S*jax_intranode_(?:{names})I\S*):\s+REG:(\d+)", text)
    return [
        Kernel(name, int(re.findall(r"Li(\d+)E", name)[-1]), "AlignedBuffer" in name, int(count))
        for name, count in found
    ]


@functools.cache
def kernels() -> list[Kernel]:
    module = extension.module("gpu")
    if module is None:
        pytest.skip("needs the kernels; the package was built without CUDA")
    spec = importlib.util.find_spec("nvidia")  # of the wheel nvidia-cuda-cuobjdump
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    tools = [str(tool) for place in places for tool in Path(place).glob("*/bin/cuobjdump")]
    tool = next(iter(tools), None) or shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump, which the wheel nvidia-cuda-cuobjdump has")
    command = [tool, "--dump-resource-usage", module.__file__]
    found = kernels_in(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(found) > 80
    return found


def of_experts(kernel: Kernel) -> bool:
    return re.search("jax_intranode_(dispatch|combine)I", kernel.name) is not None


def outgrown(kernel: Kernel) -> list[str]:
    """The launches that would not be resident as a whole, with the block that checks."""
    worlds = (3, 5, 6, 7, 8) if kernel.size == 0 else (kernel.size,)
    return [
        f"{kernel.name}: {kernel.registers} registers, {blocks} blocks of {threads} threads"
        for world in worlds
        for threads in THREADS
        if (blocks := min(256, select.resident_blocks(threads, world, HOPPER.sms))) + 1
        > kernel.resident(threads)
    ]


def test_grids_are_resident() -> None:
    """Of aligned buffers, and of all buffers in groups of other sizes than 2 and 4.

    Two-shot among 4 ranks is not: the table has the grid with which it was measured.
    """
    assert {k.size for k in kernels()} == {0, 2, 4, 8}
    checked = [k for k in kernels() if k.aligned or k.size in (0, 8)]
    checked = [k for k in checked if not of_experts(k)]
    checked = [k for k in checked if k.size != 4 or "7TwoShot" not in k.name]
    wrong = [text for k in checked for text in outgrown(k)]
    assert not wrong, "\n".join(wrong)


def test_grids_of_experts_are_resident() -> None:
    checked = [k for k in kernels() if of_experts(k)]
    assert len(checked) == 8  # a dispatch and combines of 3 dtypes, of 2 ranks and of any number
    for kernel, world in itertools.product(checked, (2, 3, 4, 8)):
        chosen = select.select_experts(
            "moe_combine", nbytes=100 << 20, dtype="bfloat16", world_size=world,
            hardware="hopper", epoch_buffer_bytes=32 << 20,
        )  # fmt: skip
        assert chosen.blocks + 1 <= kernel.resident(chosen.threads), kernel
