"""Primitives that stand for a collective matmul and local products.

As one equation they can be lowered to one kernel, which computes the products while it waits for
data. Elsewhere they are lowered to the collective matmul and the products. Differentiation and
batching always act on these.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, mlir

from jax_intranode._src.ops import overlapped_call
from jax_intranode._src.ops.lowering_site import LoweringSite
from jax_intranode._src.ops.primitive import Decision, Operation, OpPrimitive

# Binds a primitive: (primitive, *operands, params) -> results.
Bind = Callable[..., list[Any]]

# A collective matmul: its primitive, its operands and its parameters.
Matmul = tuple[OpPrimitive, list[Any], Any]


def _bind_here(primitive: OpPrimitive, *operands: Any, params: Any) -> list[Any]:
    return primitive.bind(*operands, params=params)


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The rules of a primitive that stands for a collective matmul and local products.

    Attributes:
        matmul: (operands or their types, params) -> its collective matmul; None if nothing is sent.
        compute: (bind, *operands, params) -> results of the composition, from a `Bind`.
        request: (*avals, params) -> the request for one custom call, or why there is none.
        result_count: params -> number of results.
        needed: as in `OpPrimitive.register`.
        transpose: (cotangents, *operands, params) -> cotangents of the operands, or None for those
            of the composition.
    """

    matmul: Callable[[Sequence[Any], Any], Matmul | None]
    compute: Callable[..., list[Any]]
    request: Callable[..., overlapped_call.Request | str]
    result_count: Callable[[Any], int]
    needed: Callable[[list[bool], Any], tuple[list[bool], Any]]
    transpose: Callable[..., list[Any] | None] = lambda cotangents, *operands, params: None

    def register(self, primitive: OpPrimitive, abstract_eval: Callable[..., list[Any]]) -> None:
        """Registers the rules. `abstract_eval`: (*avals, params) -> result types."""
        primitive.register(
            abstract_eval=abstract_eval,
            decide=self._decide,
            jvp=self._jvp,
            transpose=self._transpose,
            batch=self._batch,
            needed=self.needed,
        )

    def _decide(self, site: LoweringSite, avals: Sequence[Any], params: Any) -> Decision:
        """Presents the call as its collective matmul."""
        own = self.matmul(avals, params)
        found: overlapped_call.Overlapped | str = "nothing is communicated"
        if own is not None:
            found = overlapped_call.find(site, params.axes, self.request(*avals, params=params))

        def operations() -> list[Operation]:
            if own is None:
                return []
            its_primitive, its_avals, its_params = own
            its_own = its_primitive.decide(site, its_avals, its_params).operations()
            if not isinstance(found, overlapped_call.Overlapped):
                return its_own
            return [dataclasses.replace(its_own[0], selected=found.selection)]

        def bind(primitive: OpPrimitive, *operands: Any, params: Any) -> list[Any]:
            return primitive.bind_at(site, *operands, params=params)

        if isinstance(found, overlapped_call.Overlapped):
            return Decision(mlir.lower_fun(found), operations, is_overlapped=True)
        return Decision(mlir.lower_fun(partial(self.compute, bind, params=params)), operations)

    def _dependencies(self, params: Any) -> list[list[bool]]:
        """For each result, which operands it depends on: those needed if it alone is used."""
        results = range(self.result_count(params))
        return [self.needed([i == k for i in results], params)[0] for k in results]

    def _of_some(
        self, chosen: Sequence[int], operands: Sequence[Any], params: Any
    ) -> Callable[..., list[Any]]:
        """The composition as a function of the chosen operands; the others are fixed."""

        def composed(*some: Any) -> list[Any]:
            given = dict(zip(chosen, some, strict=True))
            merged = [given.get(i, v) for i, v in enumerate(operands)]
            return self.compute(_bind_here, *merged, params=params)

        return composed

    def _jvp(
        self, bind: Any, primals: Sequence[Any], tangents: Sequence[Any], params: Any
    ) -> tuple[list[Any], list[Any]]:
        del bind  # the composition is traced here
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        results, moved = jax.jvp(
            self._of_some(moving, primals, params),
            [primals[i] for i in moving],
            [tangents[i] for i in moving],
        )
        # Tangents that are zero must not be sent.
        return results, [
            t if any(depends[i] for i in moving) else ad.Zero(jax.typeof(result).to_tangent_aval())
            for result, t, depends in zip(results, moved, self._dependencies(params), strict=True)
        ]

    def _transpose(self, cotangents: Sequence[Any], *operands: Any, params: Any) -> list[Any]:
        nonzero = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
        if not nonzero:
            return [None] * len(operands)
        own = self.transpose(cotangents, *operands, params=params)
        if own is not None:
            return own
        linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        composed = self._of_some(linear, operands, params)

        def of_linear(*some: Any) -> list[Any]:
            results = composed(*some)
            return [results[k] for k in nonzero]

        transposed = jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))
        found = transposed([cotangents[k] for k in nonzero])
        given = dict(zip(linear, found, strict=True))
        return [given.get(i) for i in range(len(operands))]

    def _batch(
        self, name: Hashable, size: int, operands: Sequence[Any], dims: Sequence[Any], params: Any
    ) -> tuple[Any, Any]:
        # The primitives of the composition know what to do where the mapped axis hides a mesh axis.
        hides = name in params.axes
        batched = [i for i, d in enumerate(dims) if d is not None]
        out_dims = [
            0 if hides or any(depends[i] for i in batched) else None
            for depends in self._dependencies(params)
        ]
        mapped = jax.vmap(
            partial(self.compute, _bind_here, params=params),
            tuple(dims),
            out_dims,
            axis_name=name if hides else None,
            axis_size=size,
        )
        return mapped(*operands), out_dims
