"""The sizes of a collective matmul, and what follows from them alone: rows, tiles and bytes."""

from dataclasses import dataclass

from jax_intranode._src.native import definitions
from jax_intranode._src.selection.overlap.plan import Plan

_ELEMENT_BYTES = 2  # of bfloat16 and float16


@dataclass(frozen=True)
class Sizes:
    """The sizes of one collective matmul.

    Attributes:
        operation: "all_gather_matmul" or "matmul_reduce_scatter".
        outer: number of arrays that are multiplied as a batch: the product of the dimensions before
            the one that is gathered or scattered.
        rows: rows of each array in a rank's shard: of the operand (all-gather) or of the result
            (reduce-scatter).
        ks: length of the contracted dimension; for a sum of several terms that of each.
        ns: columns of each matrix; all terms of a sum have the same.
        world_size: ranks of the group.
    """

    operation: str
    outer: int
    rows: int
    ks: tuple[int, ...]
    ns: tuple[int, ...]
    world_size: int

    @property
    def gathers(self) -> bool:
        """Whether rows travel before they are multiplied (all-gather + matmul)."""
        return self.operation == "all_gather_matmul"

    @property
    def out_of_step(self) -> bool:
        """Whether there are too many ranks to send to one peer at a time, in rotated order."""
        return self.world_size > definitions.MAX_RANKS_IN_STEP

    @property
    def k(self) -> int:
        """Contracted length of all terms together."""
        return sum(self.ks)

    @property
    def stages(self) -> int:
        """Stages of one tile of the fused kernel; each term takes whole stages."""
        return sum(-(-k // definitions.TILE_DEPTH) for k in self.ks)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row that travels: of the operand or of the product."""
        return _ELEMENT_BYTES * (self.k if self.gathers else self.ns[0])

    @property
    def all_rows(self) -> int:
        """Rows that each rank multiplies: those of all ranks and arrays."""
        return self.world_size * self.outer * self.rows

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank receives from its peers."""
        return (self.world_size - 1) * self.outer * self.rows * self.row_bytes

    @property
    def row_tiles(self) -> int:
        """Row tiles of a shard in the fused kernel; each array takes whole ones."""
        return self.outer * -(-self.rows // definitions.TILE_ROWS)

    def column_tiles(self, tile_columns: int) -> int:
        """Column tiles of all matrices in the fused kernel; each matrix takes whole ones."""
        return sum(-(-n // tile_columns) for n in self.ns)

    def ring_bytes(self, tile_columns: int, rounds: int = 1) -> int:
        """Bytes that one round of the fused kernel needs in the ring: whole tiles."""
        if self.gathers:
            columns = self.stages * definitions.TILE_DEPTH
        else:
            columns = -(-self.column_tiles(tile_columns) // rounds) * tile_columns
        rows = (self.world_size - 1) * self.row_tiles * definitions.TILE_ROWS
        return _ELEMENT_BYTES * rows * columns

    def scratch_bytes(self, plan: Plan) -> int:
        """Bytes of scratch for products, under a plan of either kind."""
        if self.gathers or (plan.fused and plan.direct):
            return 0
        if plan.fused:  # the products for peers, until the sender warps copy them
            return self.ring_bytes(plan.tile_columns, plan.rounds)
        return _ELEMENT_BYTES * self.all_rows * self.ns[0]  # the products of all ranks' rows

    def fit_fused(self, plan: Plan, ring_bytes: int) -> bool:
        """Whether the fused kernel takes these sizes under a plan, with a ring of `ring_bytes`."""
        needed = self.ring_bytes(plan.tile_columns, plan.rounds)
        matrices = max(len(self.ks), len(self.ns))
        return matrices <= definitions.MAX_MATRICES and needed <= ring_room(ring_bytes)


def ring_room(ring_bytes: int) -> int:
    """Returns how many bytes of data a ring of `ring_bytes` has room for."""
    return ring_bytes - definitions.ring_data_offset(ring_bytes)
