"""Why jax.lax or XLA runs what this package does not: every reason is worded here, with its cause.

Other modules find out which reason applies, and fill in its values. To add one, word it here. Only
what a rendezvous or the model of overlapped matmuls has found, in its own numbers, is worded there.

This module is below all others: it imports the standard library only.
"""

from collections.abc import Hashable, Sequence
from typing import Any

# Causes. JAX_INTRANODE_STRICT=1 tells them apart.
NOT_FASTER = "not faster"  # nothing is sent, or no algorithm is faster, or none that was asked for
UNSUPPORTED = "unsupported"  # this package has no algorithm for it
REFUSED = "refused"  # an algorithm was wanted and could not be used


class Reason(str):
    """The text of a reason, which may have fields to be filled in."""

    cause = REFUSED

    def of(self, **values: Any) -> "Reason":
        """The reason with its values."""
        return type(self)(self.format(**values))


class Unsupported(Reason):
    """A reason whose cause is UNSUPPORTED."""

    cause = UNSUPPORTED


class NotFaster(Reason):
    """A reason whose cause is NOT_FASTER."""

    cause = NOT_FASTER


def is_missed(reason: str | None) -> bool:
    """Whether an operation was left although this package might be faster, by the reason."""
    return reason is not None and cause_of(reason) == REFUSED


def cause_of(reason: str | None) -> str:
    """The cause of a reason; REFUSED for one that another process has worded."""
    return reason.cause if isinstance(reason, Reason) else REFUSED


def names(axes: Sequence[Hashable]) -> str:
    """Axes as text that is the same in all processes: names may be objects of any kind."""
    return ", ".join(repr(a) if isinstance(a, str) else type(a).__name__ for a in axes)


# The axes of a call. Others look for the first three in a reason.

OTHER_AXIS = "is not one that shard_map has bound"
UNBOUND_AXIS = "is not bound by shard_map, vmap or pmap"
PARTLY_MANUAL = "a partly manual mesh"
AXIS_NOT_BOUND = Reason(f"axis {{axes}} {OTHER_AXIS}")
AXIS_UNBOUND = Reason(f"axis {{axes}} {UNBOUND_AXIS}")
AXIS_HIDDEN = Reason(f"axis {{axes}} {OTHER_AXIS}: vmap hides that one")
AXES_LEFT_TO_XLA = Reason(f"{PARTLY_MANUAL}: shard_map has not bound {{axes}}")
AXES_NOT_NAMED = Reason(f"{PARTLY_MANUAL}: neither axis_name nor batch_axes has {{axes}}")
AXIS_MISSING = Reason("an axis that is not bound")
NO_AXES = NotFaster("no axes")
AXIS_TWICE = Unsupported("an axis that is named twice in {axes}")
AXES_OF_VMAP = Reason("a vmap whose batch is divided over the mesh axes {axes}")
AXES_OF_VMAP_TOO = Reason("over axes of vmap, too")
AXES_IN_OTHER_ORDER = Unsupported("axes that the mesh has in another order")
AXIS_OF_ONE_DEVICE = NotFaster(
    "an axis of one device under jax_remove_size_one_mesh_axis_from_type"
)
NO_COLLECTIVES = Reason("jax.sharding.no_collectives")
INDEX_GROUPS = Unsupported("axis_index_groups")

# Its operands and other arguments.

CONSTANT = Reason("a constant")
NOT_AN_ARRAY = Unsupported("not an array")
EMPTY = NotFaster("{operation} of no elements")
DTYPE = Unsupported("dtype {dtype}; supported are {dtypes}")
ROW_TOO_LONG = Unsupported("rows of {hidden} elements; up to {most} are supported")
UNREDUCED = Unsupported("an operand that is unreduced or reduced over mesh axes")
VARIES_PARTLY = Reason("an operand that does not vary over all of the axes {axes}")
VARY_DIFFERENTLY = Reason("results that vary over different axes")
EXPLICIT_OPERAND = Reason("an operand sharded over explicit axes of the mesh")
TO = Unsupported("to={to!r}")
NO_DIMENSIONS = Reason("x has no dimensions")
DIMENSION = Reason("{name} is {value}; with {ndim} dimensions it must be from {least} to {most}")
LENGTH = Reason(
    "x has the shape {shape}; with {size} ranks, the length of its dimension {dimension} must be "
    "{needed}"
)
PERM_OF_OTHER_TYPE = Unsupported("perm is no list or tuple")
PERM_WITHOUT_PAIRS = Unsupported("perm is {perm!r}; it must be pairs of source and destination")
PERM_OUTSIDE = Unsupported("perm has the {what} {rank}; there are {size} ranks")
PERM_TWICE = Unsupported("perm has the {what} {rank} more than once")
PLACED = Reason("under compute_on or set_xla_metadata")
INSIDE = Reason("inside {name}, where nothing is rewritten")

# Where it is lowered, and by whom.

NO_MESH = Reason("no shard_map over a mesh of known devices around it")
EXPORT = Reason("lowered by jax.export")
PLATFORMS = Reason("lowered for several platforms: {platforms}")
PLATFORM = Reason("platform {platform}; supported are cpu and cuda")
OTHER_PLATFORM = Reason("lowered for {platform}, which is not the platform of the devices")
WITHOUT_SET_MESH = Reason("traced without the mesh of jax.set_mesh")
OTHER_DEVICES = Reason("traced under a mesh with other devices, or in another order")
NOT_HERE = Reason("this process has none of these devices")
INTERRUPTED = Reason("the rendezvous of its processes was interrupted")
OTHER_OPERATIONS = Reason("the processes would replace different operations of a program")
DISABLED = Reason("JAX_INTRANODE_DISABLE=1")
NOT_INSTALLED = Reason("left to lax; jax_intranode.install() replaces it where that pays")
NOT_SEEN = Reason("not seen by the rewriting")
OTHER_KIND = Reason("{operation} is not one of the kinds that this package accelerates")

# The group, its memory, and what was measured.

ONE_RANK = NotFaster("a group of one rank")
TOO_MANY_RANKS = Unsupported("a group of {ranks} ranks; at most {most} are supported")
HOSTS = Reason("group {group} spans hosts: its processes are {difference}")
NO_LINK = Reason(
    "devices {first} and {second} of group {group} have no link to each other (hybrid cube mesh)"
)
HYBRID_CUBE_MESH = Unsupported("only psum has kernels for a hybrid cube mesh")
NEEDS_LINKS = Reason("JAX_INTRANODE_ALGORITHM={algorithm} needs a link between each pair of ranks")
REGIONS = Reason(
    "the slab's {regions} regions serve other groups of these devices; a program can use that many "
    "partitions of a mesh, and permutes take one more for each"
)
_EPOCH_BUFFER = "an epoch buffer, which has {has} bytes; JAX_INTRANODE_SLAB_MIB sets its size"
EPOCH_BUFFER = Reason(f"{{nbytes}} bytes of {{dtype}} need {{needed}} bytes of {_EPOCH_BUFFER}")
FORCED_EPOCH_BUFFER = NotFaster(EPOCH_BUFFER)
ROWS_IN_EPOCH_BUFFER = Reason(
    f"rows of {{nbytes}} bytes among {{ranks}} ranks do not fit {_EPOCH_BUFFER}"
)
TOO_MANY_UPDATES = Unsupported("{updates} updates; up to {most} are supported")
UPDATES_IN_EPOCH_BUFFER = Reason(f"{{updates}} updates do not fit {_EPOCH_BUFFER}")
ALGORITHM_LAX = NotFaster("JAX_INTRANODE_ALGORITHM=lax")
NOT_MEASURED = NotFaster("no group of {ranks} ranks or more has been measured")
NOT_TUNED = NotFaster("{reason}; a tuning of this node would decide")
TOO_LARGE_TOGETHER = Reason("together the arrays are larger than 64 GiB")
TOO_LARGE = NotFaster("{nbytes} bytes of {dtype}; up to {upto} are faster than lax {source}")
ABOVE_ROWS = NotFaster("{nbytes} bytes of {dtype}; up to {upto} use our kernels (not measured)")

# Overlapped matmuls.

NOT_OVERLAPPED = Reason("{operation} {order} the matmul, not overlapped ({why}); {reason}")
CPU_DEVICES = Reason("CPU devices")
NO_CUBLAS = Reason("cuBLASLt was not found")
CUBLAS_VERSIONS = Reason("processes have different versions of cuBLASLt: {versions}")
NO_RING = Reason("JAX_INTRANODE_RING_MIB=0")
RING_TOO_SMALL = Reason(
    "rows of {nbytes} bytes and a ring of {has}; JAX_INTRANODE_RING_MIB sets its size"
)
CUBE_MESH_OF_MATMULS = Reason("a hybrid cube mesh")
GPUS_NOT_MEASURED = Reason("not measured on {gpus} GPUs")
GPUS_WITHOUT_FACTS = Reason("{gpus} does not report its SMs, clock and NVLinks")
DTYPES_DIFFER = Reason("dtypes {dtypes}; all operands and results must have the same")
PRECISION = Reason("precision {precision}")
NOT_FEW_ROWS = NotFaster(
    "{rows} rows of {k} elements and {n} columns; not for the kernel of few rows"
)
NOT_MULTIPLES_OF_8 = Reason("K {ks}, N {ns}; overlapped are multiples of 8")

# Programs that XLA's partitioner divides, as a whole, and their operations.

NO_SHARDY = Reason("jax_use_shardy_partitioner is False")
NOTHING_SHARDED = NotFaster("nothing is sharded")
SEVERAL_MESHES = Reason("several meshes")
MESH_OF_OTHER_DEVICES = Reason("a mesh of other devices than the program's")
PARTS_OF_AXES = Unsupported("shardings over parts of axes, or unreduced values")
ARGUMENT = Reason("an argument of {name}")
CALL_WITH_ATTRIBUTES = Reason("a call of a function with attributes")
MANY_CONSTANTS = Reason("more than 32 MiB of constants: pass the arrays as arguments")
CALLBACK = Reason("a callback to Python")
OWN_FUNCTION = Reason("an operation that has its own function")
SYMBOLIC_SHAPES = Reason("symbolic shapes")
REFUSED_BY_XLA = Reason("XLA does not compile what it became")
SHARDED_DIFFERENTLY = Reason(
    "with the replacements XLA would shard the rest of the program differently; "
    "jax.lax.with_sharding_constraint on intermediate results, also inside loops, often avoids that"
)
UNKNOWN_DTYPE = Unsupported(
    "a dtype, such as complex64, for which collectives of XLA's partitioner are not replaced"
)
UNEVEN = Unsupported("a dimension that the axes do not divide")
BOOLEANS = Unsupported("a sum of booleans is True or False, and a psum counts")
DOT_ALGORITHM = Unsupported("a dot algorithm")
NO_SUM = Unsupported("a reduction that is no sum, maximum or minimum")
SUM_FROM_OTHER = Unsupported(
    "a reduction that begins at another number than a sum, maximum or minimum does"
)
NO_PLAN = Unsupported("no plan of gathers and sums")
UNKNOWN_PLAN = Unsupported("XLA computes it with {collectives}, in a way that is not known")
NOT_COMPILED_ALONE = Unsupported("XLA does not compile it alone: {error}")
UNKNOWN_COLLECTIVE = Unsupported("XLA adds a collective that is not understood")
UNKNOWN_GROUPS = Unsupported("XLA adds {kind} among {groups}")
GROUPS_OF_NO_AXES = Unsupported("groups that are not those of mesh axes")
SEVERAL_OPERANDS = Unsupported("several operands")
DIMENSION_OF_AUTO_AXES = Unsupported(
    "its dimension is sharded over Auto axes, or its result otherwise"
)
NOT_IN_AUTO = Unsupported("{name} over manual axes in an auto-sharded program")
OTHER_OPERATION = Unsupported("XLA adds it for {name}, and it is not of an operation listed above")
NO_COLLECTIVE = NotFaster("nothing in it is a collective")
SHARED = NotFaster("another operation that needs the same gathered array is left")
WHOLE_SUM = NotFaster("XLA would have the whole sum for another operation that needs it")
# Measured: decoding with two sums of this package a layer was 0.96 times as fast where the queries,
# keys and values are three parts of one product. See docs/measurements/earlier.md.
PERMUTES = NotFaster("XLA permutes between such operations, which then cost more than they gain")
SHORTER = NotFaster(
    "XLA removes dimensions of one element, here and from operations that it still does"
)
OVERLAPS = NotFaster("XLA can overlap it with the matmuls after it")
OVERLAPS_SEVERAL = NotFaster(f"{OVERLAPS}, with others that it combines")
