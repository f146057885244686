"""Shows that a change of the Python sources leaves the programs that JAX lowers as they were.

Lower the corpus with each version of the package, then compare the two folders::

    PYTHONPATH=old python tools/compare_lowered.py --write before
    PYTHONPATH=new python tools/compare_lowered.py --write after
    python tools/compare_lowered.py --compare before after

If this program does not run with the old version, take that version's own copy of it for the first
step.

A file holds one program: the jaxpr, what `explain` says but the wording of reasons, and the
StableHLO without source locations.

No GPU is needed: programs for GPUs are lowered for fake devices, whose rendezvous always succeeds.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

# Devices.


class FakeGpu:
    """What lowering asks of a GPU."""

    platform = "gpu"
    device_kind = "NVIDIA H200"
    process_index = 0

    class Client:
        """What lowering asks of a GPU's client."""

        platform = "cuda"
        platform_version = ""
        _raw_platform = "cuda"

    client = Client()

    def __init__(self, number: int):
        """Creates the device with an id."""
        self.id = self.local_hardware_id = number


@contextlib.contextmanager
def without_rendezvous() -> Iterator[None]:
    """Lets every rendezvous succeed, with the memory that GPUs have by default."""
    from jax_intranode._src.group import agreed, communicator
    from jax_intranode._src.group import rendezvous as rendezvous_lib
    from jax_intranode._src.native import extension
    from jax_intranode._src.selection.overlap.profiles import H200

    met = agreed.Rendezvous({}, "gpu", "single", epoch_buffer_bytes=25 << 20, ring_bytes=512 << 20)
    met.shipped_profile = H200
    module = extension.module

    def module_of(platform: str) -> Any:
        if platform == "gpu":
            return SimpleNamespace(MATMUL_SCRATCH_BYTES=32 << 20)
        return module(platform)

    with (
        mock.patch.object(rendezvous_lib, "rendezvous_of", lambda devices: met),
        mock.patch.object(
            communicator, "communicator", lambda rendezvous, partition, algorithm=None: None
        ),
        mock.patch.object(extension, "module", module_of),
    ):
        yield


def mesh_of(platform: str, shape: dict[str, int]) -> Mesh:
    count = int(np.prod(list(shape.values())))
    devices = jax.devices() if platform == "cpu" else [FakeGpu(i) for i in range(8)]
    return Mesh(np.array(devices[:count]).reshape(tuple(shape.values())), tuple(shape))


# The corpus. Each program is a function of a rank's shards, with the global shapes and specs of its
# operands. All of them are differentiable.


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the corpus.

    Attributes:
        body: from the package and a rank's shards to results.
        shapes: global shapes of the operands; `sizes` gives the lengths.
        specs: partition specs of the operands.
        out: partition spec of all results.
    """

    body: Callable[..., Any]
    shapes: tuple[tuple[str, ...], ...]
    specs: tuple[P, ...]
    out: P


def sizes(platform: str, kind: str, world: int) -> dict[str, int]:
    """The lengths that shapes name: t tokens, f features, h hidden features, l layers, s short.

    On GPUs "small" matmuls are not overlapped, "large" ones are, and for "narrow" ones the fused
    kernel also computes weight gradients.
    """
    unit = (1024 if kind == "large" else 16) if platform == "gpu" else 2
    lengths = {"t": 4 * unit * world, "f": 4 * unit * world, "h": 6 * unit * world}
    if kind == "narrow":
        lengths = {"t": 4096 * world, "f": 8192, "h": 1024 * world}
    return lengths | {"l": 3, "s": 16 * world}


ROWS, COLUMNS = P("x"), P(None, "x")
X, W, V = ("t", "f"), ("f", "h"), ("h", "f")


def sums(lib: Any, x: Any) -> Any:
    small = x[:2]
    tree = lib.psum({"a": x, "b": small, "c": (small * 2).astype(jnp.int32)}, "x")
    mean = lib.pmean((small, x.sum()), "x")
    unused = lib.psum((x, small * 3), "x")[1]
    return (tree["a"] + mean[1])[:2] * mean[0] + unused + tree["c"].astype(x.dtype)


def parts(lib: Any, x: Any) -> Any:
    a = lib.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    b = lib.all_gather(a, "x", axis=1, tiled=True)
    c = lib.all_gather(x[:1], "x", axis=1)
    d = lib.psum_scatter(jnp.moveaxis(c, 1, 0), "x")
    return b + jnp.sin(d) + lib.all_gather(x[:1], "x").sum()


def fallbacks(lib: Any, x: Any) -> Any:
    a = lib.psum(x.astype(jnp.complex64), "x").real
    a += lib.all_gather(np.ones((1, 4), np.float32), "x").sum() + lib.psum(np.float32(3), "x")
    if not jax.typeof(x).manual_axis_type.varying:  # lax refuses these under check_vma
        a += lib.psum(x, "x", axis_index_groups=[list(range(lax.axis_size("x")))])
        a += jax.vmap(lambda u: lib.psum(u, "i") + lib.psum(u, ("i", "x")), axis_name="i")(x)
    return a.astype(x.dtype)


def hidden_axis(lib: Any, x: Any) -> Any:
    if jax.typeof(x).manual_axis_type.varying:  # lax refuses it under check_vma
        return x
    traced = jax.make_jaxpr(lambda u: lib.psum(u, "x") + lib.all_gather(u, "x").sum(0))(x[0])
    run = jax.extend.core.jaxpr_as_fun(traced)
    return jax.vmap(lambda u: run(u)[0], axis_name="x", axis_size=x.shape[0])(x)


def loops(lib: Any, x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        c = lax.cond(c.sum() > 0, lambda u: lib.psum(u, "x") + u, lambda u: u * 2, c)
        return lib.pmean(c, "x") + c, c.sum()

    return lax.scan(step, x, None, length=3)[0]


def batches(lib: Any, x: Any) -> Any:
    a = jax.vmap(lambda u: lib.psum(u, "x"), 1, 1)(x)
    b = jax.vmap(lambda u: lib.all_gather(u, "x", tiled=True), 1, 1)(x)
    c = jax.vmap(lambda u: lib.psum_scatter(u, "x", tiled=True), 0)(x)
    return a.sum() + b.sum() + c


def products(lib: Any, x: Any, w: Any, v: Any) -> Any:
    return lib.matmul_reduce_scatter(jnp.tanh(lib.all_gather_matmul(x, w, "x")), v, "x")


def list_of_matrices(lib: Any, x: Any, w: Any, v: Any) -> Any:
    a, b = lib.all_gather_matmul(x, [w, w * 2], "x")
    return lib.matmul_reduce_scatter(a * jax.nn.sigmoid(b), v, "x") + x


def gathered(lib: Any, x: Any, w: Any, v: Any) -> Any:
    ys, whole = lib.all_gather_matmul(x, [w, w], "x", return_gathered=True)
    return lib.matmul_reduce_scatter(ys[0] * ys[1] * whole[:, :1], v, "x")


def all_reduce(lib: Any, x: Any, w: Any, v: Any) -> Any:
    del w
    y = lib.all_gather(x, "x", axis=0, tiled=True)[:, : v.shape[0]]
    return lib.matmul_all_reduce(y, v, "x")[: x.shape[0]] + x


def preferred(lib: Any, x: Any, w: Any, v: Any) -> Any:
    y = lib.all_gather_matmul(x, w, "x", preferred_element_type=jnp.float32)
    z = lib.matmul_reduce_scatter(y.astype(x.dtype), v, "x", preferred_element_type=jnp.float32)
    return z.astype(x.dtype)


def last_axis(lib: Any, x: Any, w: Any, v: Any) -> Any:
    wide = jnp.concatenate([w] * lax.axis_size("x"), 1)
    y = lib.matmul_reduce_scatter(x, wide, "x", scatter_dimension=-1)
    return lib.matmul_reduce_scatter(lib.all_gather_matmul(x, w, "x"), v, "x") + y.sum()


def batched_matmuls(lib: Any, x: Any, w: Any, v: Any) -> Any:
    def f(x: Any, w: Any) -> Any:
        y = jnp.tanh(lib.all_gather_matmul(x, w, "x"))
        return lib.matmul_reduce_scatter(y, v, "x") + lib.matmul_all_reduce(y, v, "x").mean()

    a = jax.vmap(f, (0, None))(jnp.stack([x, -x]), w)
    b = jax.vmap(f, (None, 0))(x, jnp.stack([w, -w]))
    return (a + b).sum(0)


def batch_of_rows(lib: Any, x: Any, w: Any, v: Any) -> Any:
    x = jnp.stack([x, x * 2])
    y = jnp.tanh(lib.all_gather_matmul(x, w, "x", gather_axis=1))
    return lib.matmul_reduce_scatter(y, v, "x", scatter_dimension=1).sum(0)


def remat(lib: Any, x: Any, w: Any, v: Any) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("jax_intranode.gathered")
    a = jax.checkpoint(functools.partial(products, lib))(x, w, v)
    return a + jax.checkpoint(functools.partial(products, lib), policy=policy)(x, w, v)


def tangents(lib: Any, x: Any, w: Any, v: Any) -> Any:
    f = functools.partial(list_of_matrices, lib)
    moved = jax.jvp(f, (x, w, v), (jnp.cos(x), jnp.sin(w), v))[1]
    return moved + jax.jvp(lambda w: f(x, w, v), (w,), (w,))[1]


def linear_transposes(lib: Any, x: Any, w: Any, v: Any) -> Any:
    def by(f: Any, u: Any) -> Any:
        return jax.linear_transpose(f, u)(jax.tree.map(jnp.cos, f(u)))[0]

    a = by(lambda x: lib.all_gather_matmul(x, [w, w], "x")[1], x)
    b = by(lambda w: lib.all_gather_matmul(x, w, "x"), w)
    pull = jax.vjp(lambda x, w: lib.all_gather_matmul(x, w, "x"), x, w)[1]
    ct = lib.all_gather_matmul(x, w, "x")
    c = by(pull, ct)
    return a + b.sum() + c.sum() + v.sum()


def layers(lib: Any, x: Any, w: Any, v: Any) -> Any:
    def layer(x: Any, weights: Any) -> Any:
        return x + products(lib, x, *weights), x.sum()

    return lax.scan(jax.checkpoint(layer), x, (w, v))[0]


def block(lib: Any, x: Any, w: Any, v: Any) -> Any:
    """A transformer block with sequence parallelism: attention of one head a rank, then an MLP."""

    def norm(u: Any) -> Any:
        return u * lax.rsqrt((u * u).mean(-1, keepdims=True) + 1e-6).astype(u.dtype)

    q, k, r = lib.all_gather_matmul(norm(x), [w, w * 2, w * 3], "x")
    scores = jax.nn.softmax(q @ k.T)
    x = x + lib.matmul_reduce_scatter(scores @ r, v, "x")
    gate, up = lib.all_gather_matmul(norm(x), [w, w * 2], "x")
    x = x + lib.matmul_reduce_scatter(jax.nn.silu(gate) * up, v, "x")
    return x * lib.pmean((x * x).mean(), "x")


MATMUL = (X, W, V), (ROWS, COLUMNS, ROWS), ROWS
PROGRAMS = {
    **{
        body.__name__: Program(body, (("s", "s"),), (ROWS,), ROWS)
        for body in (sums, parts, fallbacks, loops, batches)
    },
    "sums_large": Program(sums, (X,), (ROWS,), ROWS),
    "parts_large": Program(parts, (X,), (ROWS,), ROWS),
    "hidden_axis": Program(hidden_axis, (("s", "s"),), (ROWS,), ROWS),
    **{
        body.__name__: Program(body, *MATMUL)
        for body in (
            *(products, list_of_matrices, gathered, all_reduce, preferred, last_axis),
            *(batched_matmuls, batch_of_rows, remat, tangents, linear_transposes, block),
        )
    },
    "layers": Program(
        layers, (X, ("l", *W), ("l", *V)), (ROWS, P(None, None, "x"), P(None, "x")), ROWS
    ),
    "replicated_matrices": Program(products, (X, W, V), (ROWS, P(), P()), ROWS),
}


def two_axes(lib: Any, x: Any, w: Any) -> Any:
    y = lib.all_gather_matmul(x, w, ("x", "y"))
    y = lib.psum(y, "y") + lib.pmean(lib.psum(y, ("y", "x")), "x")
    return lib.matmul_reduce_scatter(y, w.T, "x")


def forward_and_gradient(
    lib: Any, of: Program, mesh: Mesh, check_vma: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A program with a library, `jax_intranode` or `jax.lax`, and its value with all gradients."""
    f = jax.shard_map(
        functools.partial(of.body, lib),
        mesh=mesh,
        in_specs=of.specs,
        out_specs=of.out,
        check_vma=check_vma,
    )

    def gradient(*args: Any) -> Any:
        return jax.value_and_grad(
            lambda *args: jnp.sin(f(*args).astype(jnp.float32)).sum(), tuple(range(len(args)))
        )(*args)

    return f, gradient


def functions() -> Iterator[tuple[str, str, Callable[..., Any], tuple[Any, ...]]]:
    """The programs: name, platform, a jitted function and the types of its arguments."""
    import jax_intranode as lib

    def program(
        platform: str, mesh: Mesh, world: int, of: Program, check_vma: bool, size: str
    ) -> Any:
        lengths = sizes(platform, size, world)
        dtype = jnp.bfloat16 if platform == "gpu" else jnp.float32
        args = tuple(
            jax.ShapeDtypeStruct(tuple(lengths[n] for n in shape), dtype) for shape in of.shapes
        )
        f, gradient = forward_and_gradient(lib, of, mesh, check_vma)

        def some(*args: Any) -> Any:
            return [gradient(*args)[1][k] for k in (0, -1)]

        return {"forward": f, "gradient": gradient, "some": some}, args

    for platform, worlds in (("cpu", (2, 4, 8)), ("gpu", (2, 4, 8))):
        for world in worlds:
            mesh = mesh_of(platform, {"x": world})
            for check_vma in (False, True):
                for name, of in PROGRAMS.items():
                    matmuls = platform == "gpu" and len(of.shapes) > 1
                    for size in ("small", "large", "narrow") if matmuls else ("small",):
                        found, args = program(platform, mesh, world, of, check_vma, size)
                        for kind, f in found.items():
                            title = [name, platform, str(world), *[size] * (size != "small"), kind]
                            title += ["check_vma"] * check_vma
                            yield "-".join(title), platform, jax.jit(f), args
        mesh = mesh_of(platform, {"x": 2, "y": 4})
        of = Program(two_axes, (X, W), (P(("x", "y")), P()), P(("x", "y")))
        size = "large" if platform == "gpu" else "small"
        found, args = program(platform, mesh, 8, of, False, size)
        for kind, f in found.items():
            yield f"two_axes-{platform}-{kind}", platform, jax.jit(f), args


# Writing.


def write(folder: Path, only: str) -> None:
    import jax_intranode

    folder.mkdir(parents=True, exist_ok=True)
    for name, platform, f, args in functions():
        if not re.search(only, name):
            continue
        with without_rendezvous():
            traced = f.trace(*args)
            lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "cpu",))
            calls = [
                f"{c.operation} {c.algorithm} {c.shapes} {c.dtype} {c.nbytes} {c.axes} {c.groups} "
                f"{c.blocks} {c.threads} {c.times} {c.conditional}"
                for c in jax_intranode.explain(f)(*args)
            ]
        sections = {
            "jaxpr": str(traced.jaxpr),
            "explain": "\n".join(calls),
            "stablehlo": lowered.as_text(),
        }
        text = "".join(f"==== {title}\n{body}\n" for title, body in sections.items())
        (folder / f"{name}.txt").write_text(text)


# Comparing.


def differences(before: Path, after: Path) -> list[str]:
    texts = [path.read_text().splitlines() for path in (before, after)]
    return list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]


def compare(before: Path, after: Path) -> int:
    names = {path.name for path in before.iterdir()}
    others = {path.name for path in after.iterdir()}
    for name in sorted(names ^ others):
        print(f"only in {before if name in names else after}: {name}")
    different = 0
    for name in sorted(names & others):
        lines = differences(before / name, after / name)
        if lines:
            different += 1
            print(f"{name}:", *lines[:40], sep="\n  ")
    print(f"{len(names & others)} programs compared; {different} differ")
    return int(different > 0 or names != others)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FOLDER")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--only", default="", help="a pattern that names of programs match")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    jax.config.update("jax_num_cpu_devices", 8)
    write(options.write, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
