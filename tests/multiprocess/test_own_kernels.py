"""Peer buffers and kernels of one's own on them, by the example, built as its users build it."""

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices, need_ranks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from multiprocess_ranks import leave, said, say
from tiers import full

import jax_intranode as jin

pytestmark = pytest.mark.one_version

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_collective"
MOST = 3000  # elements of a shift


@cache
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("ring_shift", EXAMPLE / "ring_shift.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's library for the devices of the tests."""
    platform = jax.devices()[0].platform
    for tools in (("cmake",), ("c++", "g++"), ("nvcc",)[: platform == "gpu"]):
        if tools and not any(map(shutil.which, tools)):
            pytest.skip(f"the example needs {' or '.join(tools)}")
    return example().build(platform, tmp_path_factory.mktemp("ring_shift"))


@pytest.fixture
def no_buffers() -> Iterator[None]:
    """Ends what the test made, so that others find the names free."""
    yield
    jax.clear_caches()
    jin.shutdown()


def mesh_of(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def sharded(mesh: jax.sharding.Mesh, f: Callable[..., Any], check_vma: bool = True) -> Any:
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
    )


def delay(x: Any, seed: int) -> Any:
    """The operand, on each rank after another random time."""

    def wait(rank: Any, v: Any) -> Any:
        time.sleep(np.random.default_rng([seed, int(rank)]).uniform(0, 0.02))
        return v

    kind = jax.typeof(x)
    return jax.pure_callback(wait, kind, jax.lax.axis_index("i"), x, vmap_method="sequential")


# One process. test_examples.py has shifts in it.


def test_memory(no_buffers: None) -> None:
    need_devices(2)
    mesh = mesh_of(2)
    first = jin.peer_buffer("first", (3, 5), jnp.bfloat16, "i", mesh=mesh)
    assert (first.shape, first.dtype, first.nbytes) == ((3, 5), jnp.bfloat16, 30)
    assert {i: v.any() for i, v in first.read().items()} == {0: False, 1: False}
    values = np.arange(15).reshape(3, 5).astype(jnp.bfloat16)
    first.write({1: values})
    assert not first.read()[0].any()
    np.testing.assert_array_equal(first.read()[1], values)
    first.write(values)
    np.testing.assert_array_equal(first.read()[0], values)
    # The same again is the same buffer; another mesh or shape is not.
    assert jin.peer_buffer("first", (3, 5), jnp.bfloat16, "i", mesh=mesh) is first
    with pytest.raises(ValueError, match=r"there is the peer buffer 'first' of bfloat16\[3, 5\]"):
        jin.peer_buffer("first", (3, 4), jnp.bfloat16, "i", mesh=mesh)
    with pytest.raises(ValueError, match=r"got float32\[5\] for device 0; pass an array of"):
        first.write(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="device 9 has no part of it"):
        first.write({9: values})
    first.close()
    first.close()
    for use in (first.read, partial(first.write, values)):
        with pytest.raises(ValueError, match="is closed"):
            use()
    again = jin.peer_buffer("first", (3, 4), np.uint8, "i", mesh=mesh)
    assert not again.read()[0].any()
    jin.shutdown()
    assert again.closed


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("a b", (2,), "f4", "i"), ValueError, "name is 'a b'; use 1 to 100 letters"),
        (("a", (0, 2), "f4", "i"), ValueError, r"shape is \[0, 2\]; a buffer needs"),
        (("a", (1.5,), "f4", "i"), TypeError, "pass a sequence of sizes"),
        (("a", 3, "f4", "i"), TypeError, "pass a sequence of sizes"),
        (("a", (2,), object, "i"), TypeError, "pass a dtype of a fixed size"),
        (("a", (2,), "what", "i"), TypeError, "dtype is 'what'"),
        (("a", (2,), "f4", "j"), ValueError, "axis_name is 'j'; name one or several of"),
        (("a", (2,), "f4", ("i", "i")), ValueError, "each once"),
        (("a", (2,), "f4", ()), ValueError, "axis_name is"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], text: str) -> None:
    need_devices(2)
    with pytest.raises(error, match=text):
        jin.peer_buffer(*arguments, mesh=mesh_of(2))


def test_wrong_calls(library: Path, no_buffers: None) -> None:
    need_devices(4)
    example().register(library, jax.devices()[0].platform)
    buffer, other_buffer = (
        jin.peer_buffer(name, (2, 8, 2), jnp.uint32, "i", mesh=mesh_of(2))
        for name in ("calls", "other")
    )

    def call(x: Any, buffer: Any = buffer) -> Any:
        attributes = {"shift": np.int64(1), "scale": np.float32(1), "offset": np.float32(0)}
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return buffer.ffi_call("ring_shift", result)(x, **attributes)

    with pytest.raises(ValueError, match="'i' is not bound here; call it inside"):
        call(jnp.ones(2))
    with pytest.raises(ValueError, match="'i' has 4 devices here, and 2 in the mesh"):
        sharded(mesh_of(4), call)(jnp.ones(8))
    turned = jax.sharding.Mesh(np.array(jax.devices()[1::-1]), ("i",))
    with jax.set_mesh(turned), pytest.raises(ValueError, match="in another order"):
        jax.jit(jax.shard_map(call, in_specs=P("i"), out_specs=P("i")))(jnp.ones(2))
    other = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("i",))
    with pytest.raises(Exception, match="is in none of its groups"):
        jax.block_until_ready(sharded(other, call)(jnp.ones(2)))
    with pytest.raises(Exception, match="array of 9 elements; half of the buffer has room for 8"):
        jax.block_until_ready(sharded(mesh_of(2), call)(jnp.ones(18)))
    # The handler's own checks have touched nothing.
    f = sharded(mesh_of(2), call)
    np.testing.assert_array_equal(f(jnp.arange(4.0)), [2, 3, 0, 1])
    buffer.close()
    with pytest.raises(Exception, match=r'the peer buffer \\?"calls\\?" was closed'):
        jax.block_until_ready(f(jnp.arange(4.0)))
    with pytest.raises(ValueError, match="is closed; make it again"):
        sharded(mesh_of(2), call)(jnp.ones(4))
    # A program that was compiled elsewhere finds no buffer, and says so.
    lowered = sharded(mesh_of(2), partial(call, buffer=other_buffer)).lower(jnp.ones(4))
    assert 'peer_buffer = "other"' in lowered.as_text() and "0x" not in lowered.as_text()
    jin.shutdown()
    with pytest.raises(Exception, match=r'no peer buffer \\?"other\\?"'):
        jax.block_until_ready(lowered.compile()(jnp.ones(4)))


_LIBRARY = """
#include <jax_intranode/peer_types.h>
namespace v1 = jax_intranode::v1;
static const v1::Library library = {{{version}, v1::{platform}, 0, {minor}, [](const v1::Api*) {{}},
                                    nullptr}};
extern "C" const v1::Library* {entry}() {{ return &library; }}
"""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, r"compiled with version 2 of jax_intranode/peer\.h, and this package has"),
        ({"platform": "kCuda"}, "it was compiled for GPUs, not for CPU devices"),
        ({"minor": 999}, r"version 0\.999 of XLA's FFI headers, but the installed jaxlib has 0\."),
        ({"entry": "another"}, r"has no JAX_INTRANODE_PEER_LIBRARY\(\)"),
        ({}, "the library exports no Missing; JAX_INTRANODE_PEER_HANDLER defines handlers"),
    ],
)
def test_libraries_that_are_refused(changes: Any, text: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++ or g++) on PATH")
    fields = {"version": 1, "platform": "kCpu", "minor": 1, "entry": "jax_intranode_peer_library"}
    source, output = tmp_path / "library.cc", tmp_path / "library.so"
    source.write_text(_LIBRARY.format(**fields | changes))
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{jin.get_include()}", source]
    subprocess.run([*command, "-o", output], check=True)
    with pytest.raises(ValueError, match=text):
        jin.register_ffi_library(output, {"missing": "Missing"}, platform="cpu")


def test_wrong_arguments_of_register(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="platform is 'tpu'; use 'cpu' or 'gpu'"):
        jin.register_ffi_library("x.so", {}, platform="tpu")
    with pytest.raises(ValueError, match="the target is 'a b'"):
        jin.register_ffi_library("x.so", {"a b": "A"}, platform="cpu")
    with pytest.raises(OSError, match=r"absent\.so"):
        jin.register_ffi_library(tmp_path / "absent.so", {}, platform="cpu")


# Several processes.


def run_shifts(library: str) -> None:
    """In a rank: shifts with random delays, with the bits that they must have; and a gradient.

    And what peers wrote, and buffers that differ.
    """
    example().register(Path(library), jax.devices()[0].platform)
    n, me = jax.device_count(), jax.process_index()
    mesh = mesh_of(n)
    shift = example().make(mesh, "i", MOST)
    random = np.random.default_rng(n)
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    for count, by, scale, offset in [
        (1, 1, 1.0, 0.0), (7, n - 1, -2.0, 0.0), (MOST, 2, 1.0, 0.0), (513, 0, 0.5, 0.0),
        (1000, -1, 1.0, 0.0),
    ]:  # fmt: skip
        for late in (False, True):

            def shifted(v: Any, late: bool = late, how: Any = (by, scale, offset)) -> Any:
                return shift(delay(v[0], 3) if late else v[0], *how)[None]

            f = sharded(mesh, shifted)
            for _ in range(10):
                # Any bits but NaNs, which arithmetic may change: zeros of both signs, subnormals.
                x = random.integers(0, 1 << 32, (n, count), np.uint32).view(np.float32)
                x = np.where(np.isfinite(x) & (np.abs(x) > 1e-30) & (abs(x) < 1e30), x, -0.0)
                wanted = np.roll(np.float32(scale) * x + np.float32(offset), by, 0)
                for shard in f(jax.device_put(x, sharding)).addressable_shards:
                    assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes()
    x = random.integers(-99, 99, (n, MOST)).astype(np.float32)
    f = sharded(mesh, lambda v: shift(v[0], 1, 2.0, 0.0)[None])
    g = jax.jit(jax.grad(lambda v: (f(v) ** 2).sum()))
    for shard in g(jax.device_put(x, sharding)).addressable_shards:
        np.testing.assert_array_equal(shard.data, 8 * x[shard.index])
    # Another buffer over the same ranks, closed and made again with another shape.
    for size in (4, 9):
        buffer = jin.peer_buffer("other", (size,), jnp.int32, "i", mesh=mesh)
        assert [v.tolist() for v in buffer.read().values()] == [[0] * size]
        buffer.close()
    differs = r"makes int32\[\d\] for groups .*, this one int32\[\d\] for groups"
    with pytest.raises(RuntimeError, match=differs):
        jin.peer_buffer("differs", (4 + me,), jnp.int32, "i", mesh=mesh)
    print(f"RIGHT {me}")


@pytest.mark.parametrize("world", [2, full(4)])
def test_processes(world: int, ranks: Any, library: Path) -> None:
    need_ranks(world)
    logs = ranks(run_shifts, world, arguments=[str(library)])
    assert all(f"RIGHT {rank}" in log for rank, log in enumerate(logs))


def is_missed(library: str) -> None:
    """In a rank: a call that rank 1 does not make."""
    example().register(Path(library), jax.devices()[0].platform)
    n = jax.device_count()
    mesh = mesh_of(n)
    shift = example().make(mesh, "i", MOST)
    x = jax.device_put(np.ones(4 * n, np.float32), jax.sharding.NamedSharding(mesh, P("i")))
    compiled = sharded(mesh, lambda v: shift(v, 1)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    if jax.process_index() == 0:
        with pytest.raises(Exception) as error:  # XLA chooses the type
            jax.block_until_ready(compiled(x))
        say(error.value)
        failure = jin.last_failure()
        assert failure is not None
        say((failure.reason, failure.operation, failure.missing_rank), "RECORD")
    leave()


@pytest.mark.full
def test_a_rank_that_does_not_call(ranks: Any, library: Path) -> None:
    need_ranks(2)
    log = ranks(is_missed, 2, arguments=[str(library)], env={"JAX_INTRANODE_TIMEOUT_S": "2"})[0]
    (text,) = said(log)
    for part in (
        'ring_shift on the peer buffer "ring_shift_i"', "timed out after 2 s",
        "rank 0 (device 0) waited for rank 1 (device", "ring_shift.py:",
    ):  # fmt: skip
        assert part in text, (part, log)
    record = ("timeout", 'ring_shift on the peer buffer "ring_shift_i"', 1)
    assert said(log, "RECORD") == [str(record)], log
