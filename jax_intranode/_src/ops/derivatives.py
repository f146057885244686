"""Derivatives by x and by matrices of a collective matmul, as one primitive.

One of them is a collective matmul, the other ones are local products: one call can multiply these
while the link is busy.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, mlir

from jax_intranode._src import select
from jax_intranode._src.ops import (
    all_gather_matmul,
    collective,
    collective_matmul,
    matmul_reduce_scatter,
    overlapped,
)

# From a primitive of ours, operands and parameters to results.
Bind = Callable[..., list[Any]]


def _bind_here(primitive: collective.Primitives, *operands: Any, **params: Any) -> list[Any]:
    return primitive.bind(*operands, **params)


class Derivatives(collective.Primitives):
    """A primitive that is a collective matmul and local products.

    Where the two are not one call it is what it is composed of, and so are its derivatives and
    batches of it.
    """

    def __init__(self, operation: str):
        """Creates the primitives."""
        super().__init__(operation)
        self.register(
            self.abstract_eval,
            self._lower,
            self._jvp,
            self._transpose,
            self._batch,
            self.needed,
        )

    # What each has of its own.

    def own(
        self, operands: Sequence[Any], params: dict[str, Any]
    ) -> tuple[collective_matmul.CollectiveMatmul, list[Any], dict[str, Any]] | None:
        """The collective matmul, its operands and its parameters; None if nothing is sent."""
        raise NotImplementedError

    def compute(self, bind: Bind, *operands: Any, **params: Any) -> list[Any]:
        """The results, from what binds a primitive."""
        raise NotImplementedError

    def results(self, params: dict[str, Any]) -> int:
        """How many results there are."""
        raise NotImplementedError

    def needed(self, used: list[bool], params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
        """As in `Primitives.register`."""
        raise NotImplementedError

    def abstract_eval(self, *operands: Any, **params: Any) -> list[Any]:
        """From types to types."""
        raise NotImplementedError

    def request(self, *operands: Any, **params: Any) -> overlapped.Request | str:
        """What may be one call, from the operands' types, or why nothing can be."""
        raise NotImplementedError

    def transpose(
        self, cotangents: Sequence[Any], *operands: Any, **params: Any
    ) -> list[Any] | None:
        """The operands' cotangents, if they are not those of what it is composed of."""
        del cotangents, operands, params
        return None

    # What they share.

    def described(
        self, place: collective.Place, avals: Sequence[Any], **params: Any
    ) -> list[collective.Description]:
        """What a call runs as, for `explain`; the processes of the mesh may meet."""
        traced_over = params.pop("traced_over")
        own = self.own(avals, params)
        if own is None:
            return []
        primitive, its_avals, its_params = own
        described = primitive.described(place, its_avals, traced_over=traced_over, **its_params)
        found = self._overlapped(place, avals, traced_over, params)
        if isinstance(found, str):
            return described
        selected = select.Selection(found.operation, found.reason)
        return [dataclasses.replace(described[0], selected=selected)]

    def _overlapped(
        self, place: collective.Place, avals: Sequence[Any], traced_over: Any, params: Any
    ) -> overlapped.Overlapped | str:
        request = self.request(*avals, **params)
        own = self.own(avals, params)
        if isinstance(request, str) or own is None:
            return "no call of both"
        return overlapped.find(own[0].operation, place, traced_over, params["axes"], request)

    def _lower(self, ctx: Any, *operands: Any, traced_over: Any, **params: Any) -> Any:
        found = self._overlapped(collective.place_of(ctx), ctx.avals_in, traced_over, params)

        def bind(primitive: collective.Primitives, *operands: Any, **params: Any) -> list[Any]:
            return primitive.bind_as_traced(*operands, traced_over=traced_over, **params)

        apart = partial(self.compute, bind, **params)
        return mlir.lower_fun(apart if isinstance(found, str) else found)(ctx, *operands)

    def _depends(self, params: dict[str, Any]) -> list[list[bool]]:
        """Of each result, on which operands it depends: on those that are needed for it alone."""
        results = range(self.results(params))
        return [self.needed([i == k for i in results], params)[0] for k in results]

    def _of_some(
        self, chosen: Sequence[int], operands: Sequence[Any], params: dict[str, Any]
    ) -> Callable[..., list[Any]]:
        """What it is composed of, as a function of some of its operands."""

        def compute(*some: Any) -> list[Any]:
            given = dict(zip(chosen, some, strict=True))
            merged = [given.get(i, v) for i, v in enumerate(operands)]
            return self.compute(_bind_here, *merged, **params)

        return compute

    def _jvp(
        self,
        primitive: Any,
        primals: Sequence[Any],
        tangents: Sequence[Any],
        *,
        traced_over: Any,
        **params: Any,
    ) -> tuple[list[Any], list[Any]]:
        del primitive, traced_over  # what is bound next is traced here
        moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        results, moved = jax.jvp(
            self._of_some(moving, primals, params),
            [primals[i] for i in moving],
            [tangents[i] for i in moving],
        )
        # What does not move must not be sent.
        return results, [
            t if any(depends[i] for i in moving) else ad.Zero(jax.typeof(result).to_tangent_aval())
            for result, t, depends in zip(results, moved, self._depends(params), strict=True)
        ]

    def _transpose(self, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        asked = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
        if not asked:
            return [None] * len(operands)
        transposed = self.transpose(cotangents, *operands, **params)
        if transposed is not None:
            return transposed
        linear = [i for i, v in enumerate(operands) if ad.is_undefined_primal(v)]
        compute = self._of_some(linear, operands, params)

        def of_linear(*some: Any) -> list[Any]:
            results = compute(*some)
            return [results[k] for k in asked]

        transposed_of = jax.linear_transpose(of_linear, *(operands[i].aval for i in linear))
        found = transposed_of([cotangents[k] for k in asked])
        given = dict(zip(linear, found, strict=True))
        return [given.get(i) for i in range(len(operands))]

    def _batch(
        self,
        name: Hashable,
        size: int,
        operands: Sequence[Any],
        dims: Sequence[Any],
        /,  # a parameter of a primitive may be called "size" too
        **params: Any,
    ) -> tuple[Any, Any]:
        # A mapped axis of the name of a mesh axis hides it, which the primitives know that it is
        # composed of.
        hides = name in params["axes"]
        batched = [i for i, d in enumerate(dims) if d is not None]
        out_dims = [
            0 if hides or any(depends[i] for i in batched) else None
            for depends in self._depends(params)
        ]
        mapped = jax.vmap(
            partial(self.compute, _bind_here, **params),
            tuple(dims),
            out_dims,
            axis_name=name if hides else None,
            axis_size=size,
        )
        return mapped(*operands), out_dims


def _without(params: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in names}


def _by_matrix(x: Any, ct: Any, dtype: Any, precision: Any, transposed: bool) -> Any:
    """The derivative by a matrix, exactly as JAX has it of the product of x with the matrix."""
    matrix = _aval_by_matrix(jax.typeof(x), jax.typeof(ct), dtype, transposed)
    by_matrix = jax.linear_transpose(
        lambda w: collective_matmul.dot(x, w, ct.dtype, precision, transposed), matrix
    )
    (result,) = by_matrix(ct)
    return result


def _aval_by_matrix(x: Any, y: Any, dtype: Any, transposed: bool) -> Any:
    """The type of the derivative by a matrix of the product of x with it; y is of its type."""
    shape = (x.shape[-1], y.shape[-1])
    kind = x.manual_axis_type
    kind = kind.update(varying=kind.varying | y.manual_axis_type.varying)
    return x.update(
        shape=shape[::-1] if transposed else shape,
        dtype=dtype,
        weak_type=False,
        manual_axis_type=kind,
    )


class _TangentOfGather(Derivatives):
    """The tangent of all_gather_matmul: of `pairs` products, of which some matrices move."""

    def own(self, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        its_params = _without(params, "pairs", "by_w") | {"gathered": False}
        return all_gather_matmul.primitive, list(operands[: 1 + params["pairs"]]), its_params

    def compute(self, bind: Bind, *operands: Any, **params: Any) -> list[Any]:
        primitive, its_operands, its_params = self.own(operands, params)
        results = bind(primitive, *its_operands, **its_params)
        if params["by_w"]:
            whole, *dws = operands[1 + params["pairs"] :]
            how = [params[name] for name in ("dtype", "precision", "transposed")]
            for k, dw in zip(params["by_w"], dws, strict=True):
                by_this = collective_matmul.dot(whole, dw, *how)
                results[k] = ad.add_jaxvals(results[k], by_this)
        return results

    def results(self, params: dict[str, Any]) -> int:
        return int(params["pairs"])

    def needed(self, used: list[bool], params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
        by_w = params["by_w"]
        of_dws = [used[k] for k in by_w]
        kept = tuple(sum(used[:k]) for k in by_w if used[k])
        whole = [any(of_dws)] if by_w else []
        return [True, *used, *whole, *of_dws], params | {"pairs": sum(used), "by_w": kept}

    def abstract_eval(self, *operands: Any, **params: Any) -> list[Any]:
        _, its_operands, its_params = self.own(operands, params)
        return all_gather_matmul.abstract_eval(*its_operands, **its_params)

    def request(self, *operands: Any, **params: Any) -> overlapped.Request | str:
        del operands, params
        return "a tangent"

    def transpose(
        self,
        cotangents: Sequence[Any],
        dx: Any,
        *operands: Any,
        pairs: int,
        by_w: tuple[int, ...],
        axis: int,
        dtype: Any,
        transposed: bool,
        **params: Any,
    ) -> list[Any] | None:
        del dtype
        ws, known, dws = operands[:pairs], operands[: pairs + 1], operands[pairs + 1 :]
        if any(ad.is_undefined_primal(v) for v in known):
            return None
        whole = operands[pairs : pairs + 1]
        asked = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
        moving = [k for k, dw in zip(by_w, dws, strict=True) if ad.is_undefined_primal(dw)]
        summed = ad.is_undefined_primal(dx)
        by_both = {k: i for i, k in enumerate(asked) if k in moving}
        its_params = params | {
            "pairs": len(asked),
            "dimension": axis,
            "dtype": dx.aval.dtype if summed else dx.dtype,
            "transposed": not transposed,
        }
        its_operands = [cotangents[k] for k in asked]
        its_operands += [ws[k] for k in asked] if summed else []
        if by_both:
            results = of_all_gather_matmul.bind(
                *its_operands,
                *whole,
                by_x=summed,
                by_w=tuple(by_both.values()),
                dtype_by_w=ws[0].dtype,
                **its_params,
            )
        elif summed:
            results = matmul_reduce_scatter.primitive.bind(*its_operands, **its_params)
        else:
            results = []
        of_dws = dict(zip(by_both, results[summed:], strict=True))
        ct_x = results[0] if summed else None
        nothing = [None] * (pairs + len(whole))
        return [ct_x, *nothing, *(of_dws.get(k) for k in by_w)]


class _OfGather(Derivatives):
    """Both derivatives of all_gather_matmul: by x, a sum of `pairs` products, and by matrices."""

    def own(self, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if not params["by_x"]:
            return None
        its_params = _without(params, "by_x", "by_w", "dtype_by_w")
        return matmul_reduce_scatter.primitive, list(operands[: 2 * params["pairs"]]), its_params

    def compute(self, bind: Bind, *operands: Any, **params: Any) -> list[Any]:
        own = self.own(operands, params)
        results = [] if own is None else bind(own[0], *own[1], **own[2])
        how = params["dtype_by_w"], params["precision"], not params["transposed"]
        return results + [_by_matrix(operands[-1], operands[k], *how) for k in params["by_w"]]

    def results(self, params: dict[str, Any]) -> int:
        return params["by_x"] + len(params["by_w"])

    def needed(self, used: list[bool], params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
        pairs, by_x, by_w = params["pairs"], params["by_x"], params["by_w"]
        summed = by_x and used[0]
        kept = [k for k, asked in zip(by_w, used[by_x:], strict=True) if asked]
        of_cts = [summed or k in kept for k in range(pairs)]
        operands = [*of_cts, *[summed] * pairs * by_x, *[bool(kept)] * bool(by_w)]
        return operands, params | {
            "pairs": sum(of_cts),
            "by_x": summed,
            "by_w": tuple(sum(of_cts[:k]) for k in kept),
        }

    def abstract_eval(self, *operands: Any, **params: Any) -> list[Any]:
        own = self.own(operands, params)
        by_x = [] if own is None else matmul_reduce_scatter.abstract_eval(*own[1], **own[2])
        how = params["dtype_by_w"], not params["transposed"]
        return by_x + [_aval_by_matrix(operands[-1], operands[k], *how) for k in params["by_w"]]

    def request(self, *operands: Any, **params: Any) -> overlapped.Request | str:
        pairs, by_w = params["pairs"], params["by_w"]
        own = self.own(operands, params)
        if own is None or not by_w or not params["transposed"]:
            return "not the derivatives by both of matrices [K, N]"
        order = sorted(range(pairs), key=lambda k: k not in by_w)  # their pairs come first

        def ordered(*operands: Any) -> Sequence[Any]:
            cts, ws, whole = collective_matmul.split(operands, pairs)
            return [*(cts[k] for k in order), *(ws[k] for k in order), *whole]

        whole = operands[-1]
        request = matmul_reduce_scatter.request(*ordered(*operands)[: 2 * pairs], **own[2])
        if isinstance(request, str):
            return request
        return dataclasses.replace(
            request,
            wgrads=len(by_w),
            dtypes=(*request.dtypes, whole.dtype, params["dtype_by_w"]),
            operands=ordered,
        )


class _OfScatter(Derivatives):
    """Both derivatives of matmul_reduce_scatter, of one gathered cotangent."""

    def own(self, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        by_x, by_w = params["by_x"], params["by_w"]
        its_params = _without(params, "by_x", "by_w", "dtype_by_w") | {"gathered": by_w}
        return all_gather_matmul.primitive, list(operands[: 1 + by_x]), its_params

    def compute(self, bind: Bind, *operands: Any, **params: Any) -> list[Any]:
        primitive, its_operands, its_params = self.own(operands, params)
        results = bind(primitive, *its_operands, **its_params)
        if params["by_w"]:
            how = params["dtype_by_w"], params["precision"], not params["transposed"]
            results[-1] = collective_matmul.dot_of_matrix(operands[-1], results[-1], *how)
        return results

    def results(self, params: dict[str, Any]) -> int:
        return int(params["by_x"] + params["by_w"])

    def needed(self, used: list[bool], params: dict[str, Any]) -> tuple[list[bool], dict[str, Any]]:
        by_x, by_w = params["by_x"], params["by_w"]
        return [True, *used], params | {"by_x": by_x and used[0], "by_w": by_w and used[-1]}

    def abstract_eval(self, *operands: Any, **params: Any) -> list[Any]:
        _, its_operands, its_params = self.own(operands, params)
        results = all_gather_matmul.abstract_eval(*its_operands, **its_params)
        if params["by_w"]:
            how = params["dtype_by_w"], not params["transposed"]
            results[-1] = _aval_by_matrix(operands[-1], results[-1], *how)
        return results

    def request(self, *operands: Any, **params: Any) -> overlapped.Request | str:
        if not params["by_x"] or not params["by_w"] or not params["transposed"]:
            return "not the derivatives by both of a matrix [K, N]"
        _, its_operands, its_params = self.own(operands, params)
        request = all_gather_matmul.request(*its_operands, **(its_params | {"gathered": False}))
        if isinstance(request, str):
            return request
        x = operands[-1]
        return dataclasses.replace(
            request,
            wgrads=1,
            dtypes=(*request.dtypes, x.dtype, params["dtype_by_w"]),
        )


# The primitives. Parameters are those of the collective matmul, and:
# `pairs`: how many products; in a sum of a collective matmul it is one of its own.
# `by_x`: whether the derivative by x is a result, the first one.
# `by_w`: which pairs have a derivative by their matrix; of the only one, whether it has.
# `dtype_by_w`: the dtype of these.

# From dx, ws, and where any moves the gathered x and the dws, to a tangent of each product.
tangent_of_all_gather_matmul = _TangentOfGather("tangent_of_all_gather_matmul")

# From cotangents of products, their ws if by_x, and the gathered x if by_w.
of_all_gather_matmul = _OfGather("derivatives_of_all_gather_matmul")

# From the cotangent of the sum, w if by_x, and x if by_w.
of_matmul_reduce_scatter = _OfScatter("derivatives_of_matmul_reduce_scatter")
