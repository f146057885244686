"""Turning the rewriting of programs on and off."""

import contextlib
from collections.abc import Iterator

from jax_intranode._src import compat, config
from jax_intranode._src.rewrite import hook

# Whether programs are rewritten here. JAX compiles a function anew when the value changes, so the
# value chooses between the programs that were compiled with and without.
_enabled = hook.enabled


def install() -> None:
    """Accelerates all programs of this process from now on, without a change to them.

    When JAX lowers a program, the collectives in the bodies of its shard_maps (and pmaps) are
    replaced where `explain` says that it pays: psum, pmean, psum_scatter, all_gather and
    all_to_all of ``jax.lax``, those that JAX inserts for gradients included. (On GPUs all_to_all
    only with a tuning of the node, because its rows were not measured.) Sums that do not depend on
    each other are issued as one operation, as XLA would. Results are those of the functions of this
    package; see the README for how sums are rounded.

    Functions that were compiled before are compiled again when they are called. Nothing is
    rewritten under ``jax.export``, or with JAX_INTRANODE_DISABLE=1. All processes of a program must
    install it, or none.

    Raises:
        RuntimeError: this version of JAX has changed in a way that makes rewriting impossible. JAX
            is as it was.

    Examples:
        >>> jax_intranode.install()
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax.lax.psum(x, "model")
        >>> total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
        >>> jax_intranode.uninstall()
    """
    if not config.get().disable:
        compat.hook_lowering(hook.rewrite_body, hook.lower_program)
        _enabled.set_global(hook.ON)


def uninstall() -> None:
    """Undoes `install`; functions that were compiled with it are compiled again when called."""
    _enabled.set_global(None)


@contextlib.contextmanager
def accelerate() -> Iterator[None]:
    """Accelerates the programs that this thread calls inside of the context, as `install` does.

    It is a decorator, too. A function that is called both inside and outside is compiled twice.

    Raises:
        RuntimeError: as `install`.

    Examples:
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P("model"), out_specs=P())
        ... def total(x):
        ...     return jax.lax.psum(x, "model")
        >>> with jax_intranode.accelerate():
        ...     total(jnp.array([1.0, 2.0]))
        Array([3.], dtype=float32)
    """
    if config.get().disable:
        yield
        return
    compat.hook_lowering(hook.rewrite_body, hook.lower_program)
    with _enabled(hook.ON):
        yield
