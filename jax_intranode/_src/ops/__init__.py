"""The operations of the package, one file each.

Importing any of them registers the rules of all, since differentiation binds the primitives of
others. No file here imports the package itself. Each imports files below it only:

    fallback, lowering_site
    primitive
    global_arrays
    collective           <- psum_scatter, all_gather, all_to_all, ragged_all_to_all
    all_reduce           <- psum, pmax, ppermute
    norm_rules           <- residual_norm
    local_matmuls, matmul_arguments, overlapped_call
    experts
    few_rows
    collective_matmul    <- all_gather_matmul, matmul_reduce_scatter <- matmul_all_reduce
    combined_matmul      <- matmul_gradients
    column_parallel_matmul, row_parallel_matmul, which choose one of the collective matmuls
"""

from jax_intranode._src import operations
from jax_intranode._src.native import definitions
from jax_intranode._src.ops import all_gather as all_gather
from jax_intranode._src.ops import all_to_all as all_to_all
from jax_intranode._src.ops import column_parallel_matmul as column_parallel_matmul
from jax_intranode._src.ops import experts as experts
from jax_intranode._src.ops import matmul_all_reduce as matmul_all_reduce
from jax_intranode._src.ops import matmul_gradients as matmul_gradients
from jax_intranode._src.ops import pmax as pmax
from jax_intranode._src.ops import ppermute as ppermute
from jax_intranode._src.ops import psum as psum
from jax_intranode._src.ops import psum_scatter as psum_scatter
from jax_intranode._src.ops import ragged_all_to_all as ragged_all_to_all
from jax_intranode._src.ops import residual_norm as residual_norm
from jax_intranode._src.ops import row_parallel_matmul as row_parallel_matmul
from jax_intranode._src.ops.primitive import BY_OPERATION

operations.check(BY_OPERATION, definitions.OPERATIONS, definitions.DTYPES)
