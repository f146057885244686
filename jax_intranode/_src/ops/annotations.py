"""Types of the public functions' arguments and results."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias, TypeVar

from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

# The name of a mesh axis, or several names.
AxisNames: TypeAlias = Hashable | Sequence[Hashable]

# An array, or any nesting of tuples, lists, dictionaries and registered classes with arrays in it.
# The results are nested in the same way.
PyTree = TypeVar("PyTree")

# A matrix, or several matrices that are multiplied with the same array.
Matrices: TypeAlias = ArrayLike | Sequence[ArrayLike]

AnyMesh: TypeAlias = Mesh | AbstractMesh
