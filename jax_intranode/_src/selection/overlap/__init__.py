"""Overlapped collective matmuls: whether an operation is overlapped, and how it runs.

`plan` has the record of how it runs, `sizes` what follows from its shapes, `profiles` the measured
constants of each GPU, `model` the predicted costs and the choice by them, and `selection` what
lowering asks.
"""

from jax_intranode._src.selection.overlap.plan import Plan as Plan
from jax_intranode._src.selection.overlap.profiles import H200 as H200
from jax_intranode._src.selection.overlap.profiles import Profile as Profile
from jax_intranode._src.selection.overlap.profiles import from_facts as from_facts
from jax_intranode._src.selection.overlap.profiles import known_from_kinds as known_from_kinds
from jax_intranode._src.selection.overlap.profiles import profile_from_json as profile_from_json
from jax_intranode._src.selection.overlap.selection import choose as choose
from jax_intranode._src.selection.overlap.selection import digest as digest
from jax_intranode._src.selection.overlap.selection import forced as forced
from jax_intranode._src.selection.overlap.selection import static_reason as static_reason
from jax_intranode._src.selection.overlap.sizes import Sizes as Sizes
