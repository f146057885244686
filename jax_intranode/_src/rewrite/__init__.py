"""Rewrites programs that call jax.lax when JAX lowers them, so that this package runs them.

- switch.py: the public functions that turn it on and off, and what runs when JAX lowers a program;
  mode.py: which programs are rewritten;
- auto/: what XLA's partitioner adds to plain jit programs, under Explicit and under Auto axes;
- jaxprs.py: rewrites the body of a shard_map, and the jaxprs inside: collectives and the matmuls
  next to them, which gathers.py and scatters.py find; fusion.py: the operation that takes their
  place; dataflow.py, views.py and matrices.py: how arrays are made from others;
- norms.py: a sum over ranks, a residual add and a norm, which rows.py recognizes;
- collectives.py: the body, and any collective of lax in it; sums.py: merges sums; waiting.py: the
  order of equations;
- agreement.py: the processes of a mesh agree on rewriting a program.
"""
