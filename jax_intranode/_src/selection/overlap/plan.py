"""The plan of an overlapped matmul: one record, with the same field names everywhere.

The fields are those of `MatmulPlan` in xla_ffi/cuda/matmul_plan.h, the keys of the custom call's
attribute `plan`, and the names that `bench --plan` and tools/fused_probe.cu take.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_intranode._src.native import definitions


def _field(default: int | bool, meaning: str, least: int, most: int | None = None) -> Any:
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "least": least, "most": most}
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an overlapped matmul runs: as a fused kernel, or as a cuBLASLt pipeline.

    The metadata of each field say what it means, and its smallest and largest value.
    """

    # The pipeline.
    first_pieces: int = _field(
        1,
        "pieces of the first shard of a reduce-scatter; the smallest comes first",
        least=1,
        most=definitions.MAX_PIECES,
    )
    last_pieces: int = _field(
        1, "pieces of the last shard; the smallest comes last", least=1, most=definitions.MAX_PIECES
    )
    # The fused kernel.
    tile_columns: int = _field(
        0,
        "columns of the fused kernel's tiles: 128, 192, 224 (all-gather), 256; 0 for the pipeline",
        least=0,
    )
    band_pairs: int = _field(
        8, "row pairs whose tiles are all computed before the next ones begin", least=1
    )
    parts: int = _field(
        1,
        "reduce-scatter: parts of each peer's tiles; the first parts of all peers are multiplied "
        "before the second ones",
        least=1,
    )
    direct: bool = _field(
        False,
        "reduce-scatter: store products straight into the peer's ring, not in scratch",
        least=0,
        most=1,
    )
    rounds: int = _field(
        1,
        "reduce-scatter: launches, each of which does a range of columns that fits the ring",
        least=1,
    )
    wgrad: bool = _field(False, "compute weight gradients, too", least=0, most=1)
    row_pairs_before_wgrad: int = _field(
        0, "all-gather: arriving row pairs that are multiplied before the weight gradients", least=0
    )
    wgrad_tiles_last: int = _field(
        0,
        "all-gather: cluster tiles of weight gradients that come after all arriving rows",
        least=0,
    )

    @property
    def fused(self) -> bool:
        """Whether the fused kernel runs it, not the pipeline."""
        return self.tile_columns > 0

    def attributes(self) -> dict[str, np.generic]:
        """Returns the dictionary that the custom call carries as its attribute `plan`."""
        return {
            name: np.bool_(value) if isinstance(value, bool) else np.int32(value)
            for name, value in dataclasses.asdict(self).items()
        }

    def __str__(self) -> str:
        if not self.fused:
            return (
                f"cuBLASLt pipeline, first shard in {self.first_pieces}, last in "
                f"{self.last_pieces} pieces"
            )
        text = f"fused kernel, tiles of {definitions.TILE_ROWS} x {self.tile_columns}"
        text += f" in bands of {self.band_pairs} row pairs"
        if self.parts > 1:
            text += f", {self.parts} parts"
        if self.direct:
            text += ", products stored directly"
        if self.rounds > 1:
            text += f", {self.rounds} rounds"
        if self.wgrad:
            text += ", with weight gradients"
            if self.row_pairs_before_wgrad:
                text += f" after {self.row_pairs_before_wgrad} row pairs"
            if self.wgrad_tiles_last:
                text += f", {self.wgrad_tiles_last} of their tiles last"
        return text


_FIELDS = {field.name: field for field in dataclasses.fields(Plan)}
_DEFAULTS = Plan()


def parse(text: str) -> Plan:
    """Returns the plan that "tile_columns=192,direct=1" stands for; other fields have defaults.

    Raises:
        ValueError: it isn't of this form, a name is unknown, or a value is out of range.
    """
    plan: dict[str, Any] = {}
    for assignment in text.split(","):
        name, equals, digits = (part.strip() for part in assignment.partition("="))
        if not equals or not digits.isdecimal():
            raise ValueError(
                f"{assignment!r} is not NAME=INTEGER; the names are {', '.join(_FIELDS)}"
            )
        if name in plan:
            raise ValueError(f"{name} is given twice")
        if name not in _FIELDS:
            raise ValueError(f"a plan has no {name!r}; it has {', '.join(_FIELDS)}")
        value, field = int(digits), _FIELDS[name]
        least, most = field.metadata["least"], field.metadata["most"]
        if value < least or (most is not None and value > most):
            allowed = f"integers from {least} {'on' if most is None else f'to {most}'}"
            raise ValueError(f"{name}={value}: it takes {allowed}")
        plan[name] = type(getattr(_DEFAULTS, name))(value)
    if plan.get("tile_columns", 0) not in (0, *definitions.TILE_COLUMNS):
        raise ValueError(
            f"tile_columns={plan['tile_columns']}: it takes 0 (the pipeline) or one of "
            f"{', '.join(map(str, definitions.TILE_COLUMNS))}"
        )
    return Plan(**plan)


def describe_fields() -> str:
    """Returns all fields with their defaults and meanings, for the help of commands."""
    return ", ".join(
        f"{name}={int(getattr(_DEFAULTS, name))} ({field.metadata['meaning']})"
        for name, field in _FIELDS.items()
    )
