"""A collective of your own: rank r sends scale * x + offset to rank r + shift, in one kernel.

    python examples/custom_collective/ring_shift.py [--devices N]

Builds ring_shift.cu (with nvcc for GPUs, else with the C++ compiler), registers it, runs it on all
devices, and compares the result and the gradient with jax.lax.ppermute. `docs/own_kernels.md`
explains each part. It runs in one process, for all its devices: with a process per GPU, build once
before, and call register() and make() in each process.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode

HERE = Path(__file__).resolve().parent


def build(platform: str, folder: Path) -> Path:
    """Builds the library for "cpu" or "gpu" in a folder; returns its path."""
    options = [f"-DPLATFORM={platform}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure = ["cmake", "-S", HERE, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *options]
    for command in (configure, ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
    return folder / "ring_shift.so"


def register(library: Path, platform: str) -> None:
    """Registers the library's handler."""
    targets = {"ring_shift": "RingShiftHandler"}
    jax_intranode.register_ffi_library(library, targets, platform=platform)


def make(mesh: jax.sharding.Mesh, axis_name: str, most: int) -> Callable[..., Any]:
    """A ring shift of float32 arrays of at most `most` elements, with a buffer of its own.

    All processes of the mesh call it together.

    Returns:
        shift(x, by, scale=1.0, offset=0.0), to be called inside ``shard_map``. It differentiates
        with respect to x. `by` is an integer of any sign.
    """
    # Two halves, and for each element a packet of two words: see peer.h.
    name = f"ring_shift_{axis_name}"
    buffer = jax_intranode.peer_buffer(name, (2, most, 2), jnp.uint32, axis_name, mesh=mesh)

    def call(x: Any, by: int, scale: float, offset: float) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return buffer.ffi_call("ring_shift", result, vmap_method="sequential")(
            x, shift=np.int64(by), scale=np.float32(scale), offset=np.float32(offset)
        )

    @partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
    def shift(x: Any, by: int, scale: float = 1.0, offset: float = 0.0) -> Any:
        return call(x, by, scale, offset)

    def forward(x: Any, by: int, scale: float, offset: float) -> tuple[Any, None]:
        return call(x, by, scale, offset), None

    def backward(by: int, scale: float, offset: float, _: None, ct: Any) -> tuple[Any]:
        return (call(ct, -by, scale, 0.0),)  # the inverse shift

    shift.defvjp(forward, backward)
    return shift


def by_lax(x: Any, by: int, scale: float, offset: float, axis_name: str) -> Any:
    """The same by jax.lax."""
    n = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(scale * x + offset, axis_name, [(r, (r + by) % n) for r in range(n)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="number of CPU devices")
    parser.add_argument("--build", type=Path, default=HERE / "build", help="folder to build in")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)  # has no effect on GPUs
    platform = jax.devices()[0].platform
    device = f"{jax.device_count()} devices ({jax.devices()[0].device_kind})"
    print(f"{device}: building the kernel in {options.build}", flush=True)
    register(build(platform, options.build / platform), platform)

    mesh = jax.make_mesh((jax.device_count(),), ("ring",), axis_types=(AxisType.Auto,))
    shift = make(mesh, "ring", 1 << 16)
    x = jax.random.normal(jax.random.key(0), (jax.device_count() << 12,))

    def results(function: Callable[[Any], Any]) -> Any:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
        value, vjp = jax.jit(partial(jax.vjp, mapped))(x)
        return value, jax.jit(vjp)(jnp.cos(x))[0]

    ours = results(lambda v: shift(v, 1, 2.0, 0.5))
    lax = results(lambda v: by_lax(v, 1, 2.0, 0.5, "ring"))
    for what, a, b in zip(("result", "gradient"), ours, lax, strict=True):
        print(f"{what}: differs by at most {np.abs(a - b).max():.1e} from that of jax.lax")
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    main()
