"""The primitives of this package: how they are bound, and how their rules are registered.

Every operation is an `OpPrimitive`. Its file defines plain functions, in the order public function,
abstract evaluation, decision, jvp, transpose, batching, and registers them at the end. What a call
runs as is decided in one place, for lowering and for `explain`.

Every equation has two parameters: `params`, a frozen record of the operation that has the mesh axes
in `axes`, and `traced_over`, the ids of the devices of the mesh, if these were known while tracing.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_intranode._src.jax_private import primitive_rules, trace_state
from jax_intranode._src.ops.lowering_site import LoweringSite, device_ids
from jax_intranode._src.selection import select

# The operation of each JAX primitive of this package.
BY_PRIMITIVE: dict[Primitive, "OpPrimitive"] = {}
# The same by name.
BY_OPERATION: dict[str, "OpPrimitive"] = {}


@dataclass(frozen=True)
class Operation:
    """One operation that a call runs as, for `explain`.

    Attributes:
        name: its name.
        operands: the types of its operands.
        nbytes: bytes of the array that a device gathers, sums or exchanges.
        selected: the algorithm, and why.
    """

    name: str
    operands: list[Any]
    nbytes: int
    selected: select.Selection


@dataclass(frozen=True)
class Decision:
    """What a call runs as.

    Attributes:
        lower: (ctx, *operands) -> results: emits it.
        operations: () -> the operations that it runs as, for `explain`.
        is_overlapped: whether it multiplies and communicates in one custom call, and is known to be
            faster than lax.
    """

    lower: Callable[..., Any]
    operations: Callable[[], list[Operation]]
    is_overlapped: bool = False


# (site, types of the operands, params) -> what a call runs as.
Decide = Callable[[LoweringSite, Sequence[Any], Any], Decision]


def nbytes(aval: Any) -> int:
    """Bytes of an array of a type."""
    return int(math.prod(aval.shape)) * int(aval.dtype.itemsize)


@contextmanager
def own_equations() -> Iterator[None]:
    """The context of equations that this package makes: the program's settings don't apply."""
    with (
        jax.auto_pcast(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


class OpPrimitive:
    """An operation as a JAX primitive, in two forms.

    Both forms have the same rules. They differ in whether JAX caches their lowering per order of
    devices. Our custom calls hold device ids. Under ``jax.set_mesh`` the jaxpr does not name the
    mesh, so JAX would reuse a lowering for a mesh with other devices. The second form tells JAX to
    key its lowering on the devices. That forbids two meshes in one program, so only calls under
    ``jax.set_mesh`` are bound as the second form.

    A jaxpr that was traced under one mesh can also be lowered under another. So an equation records
    the devices it was traced over. lax runs it if lowering finds other devices, or if a mesh was
    set only after tracing. (An eager shard_map sets its mesh while it runs.)
    """

    def __init__(self, operation: str, params: type[Any] | None = None):
        """Makes both forms.

        Args:
            operation: the name of its record (operations.py).
            params: the class of its parameters, if it can replace a collective of jax.lax.
        """
        self.operation = operation
        self.params = params
        self.plain = Primitive(f"intranode_{operation}")
        self._over_set_mesh = Primitive(f"intranode_{operation}_over_set_mesh")
        self.decide: Decide
        BY_OPERATION[operation] = self
        for primitive in (self.plain, self._over_set_mesh):
            BY_PRIMITIVE[primitive] = self
            primitive.multiple_results = True
        primitive_rules.lower_with_devices(self._over_set_mesh)

    @property
    def scope(self) -> str:
        """The named scope of its calls, which profilers show."""
        return f"jax_intranode.{self.operation}"

    def bind(self, *operands: Any, params: Any) -> list[Any]:
        """Binds the form that fits where this is traced; returns the results."""
        primitive = self.plain if trace_state.set_mesh() is None else self._over_set_mesh
        mesh = trace_state.set_mesh() or trace_state.eager_mesh()
        traced_over = None if mesh is None else device_ids(mesh)
        return list(primitive.bind(*operands, params=params, traced_over=traced_over))

    def bind_at(self, site: LoweringSite, *operands: Any, params: Any) -> list[Any]:
        """Binds inside the lowering of a call, as if it was traced with that call."""
        return list(self.plain.bind(*operands, params=params, traced_over=site.traced_over))

    def register(
        self,
        *,
        abstract_eval: Callable[..., list[Any]],
        decide: Decide,
        jvp: Callable[..., tuple[list[Any], list[Any]]] | None,
        transpose: Callable[..., list[Any]] | None,
        batch: Callable[..., tuple[Any, Any]],
        needed: Callable[[list[bool], Any], tuple[list[bool], Any]] | None = None,
    ) -> None:
        """Registers the rules.

        Args:
            abstract_eval: (*avals, params) -> result types.
            decide: (site, avals, params) -> what a call runs as. The mesh's processes rendezvous
                if needed.
            jvp: (bind, primals, tangents, params) -> results and their tangents. `bind` binds
                the form that is differentiated, for the devices it was traced over. None: it has
                no derivative.
            transpose: (cotangents, *operands, params) -> cotangents of the operands. None: it is
                not linear.
            batch: (name, size, operands, dims, params) -> results and their batch dimensions.
                `name` and `size` are those of the mapped axis. Called only if an operand is batched
                or if the mapped axis has the name of one of the operation's axes.
            needed: (used results, params) -> needed operands, and params for the used results only.
                None if a call whose results are not all used stays whole.
        """
        self.decide = decide

        def lower(ctx: Any, *operands: Any, params: Any, traced_over: Any) -> Any:
            site = LoweringSite.of(ctx, traced_over)
            with own_equations():
                return decide(site, ctx.avals_in, params).lower(ctx, *operands)

        @own_equations()
        def batch_if_needed(
            name: Hashable,
            size: int,
            operands: Sequence[Any],
            dims: Sequence[Any],
            *,
            params: Any,
            traced_over: Any,
        ) -> tuple[Any, Any]:
            del traced_over  # what is bound next is traced here
            if name in params.axes or any(d is not None for d in dims):
                return batch(name, size, operands, dims, params)
            results = self.bind(*operands, params=params)
            return results, [None] * len(results)

        @own_equations()
        def transpose_here(
            cotangents: Sequence[Any], *operands: Any, params: Any, traced_over: Any
        ) -> list[Any]:
            del traced_over  # what is bound next is traced here
            assert transpose is not None
            return transpose(cotangents, *operands, params=params)

        def needed_by_equation(
            used: list[bool], of_equation: dict[str, Any]
        ) -> tuple[list[bool], dict[str, Any]]:
            assert needed is not None
            operands, params = needed(used, of_equation["params"])
            return operands, of_equation | {"params": params}

        for primitive in (self.plain, self._over_set_mesh):

            def types_and_effects(
                *avals: Any, params: Any, traced_over: Any
            ) -> tuple[list[Any], Any]:
                del traced_over
                return abstract_eval(*avals, params=params), trace_state.named_axis_effects(
                    params.axes
                )

            def jvp_of_form(
                primals: Any,
                tangents: Any,
                *,
                params: Any,
                traced_over: Any,
                form: Primitive = primitive,
            ) -> tuple[list[Any], list[Any]]:
                assert jvp is not None
                bind = partial(form.bind, traced_over=traced_over)
                with own_equations():
                    return jvp(bind, primals, tangents, params)

            primitive.def_effectful_abstract_eval(types_and_effects)
            mlir.register_lowering(primitive, lower)
            if jvp is not None:
                ad.primitive_jvps[primitive] = jvp_of_form
            if transpose is not None:
                ad.primitive_transposes[primitive] = transpose_here
            primitive_rules.batch_by_axis(primitive, batch_if_needed)
            if needed is not None:
                primitive_rules.drop_unused_results(primitive, needed_by_equation)
                primitive_rules.evaluate_known_results(primitive, needed_by_equation)
