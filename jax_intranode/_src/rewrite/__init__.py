"""Rewrites programs that call jax.lax when JAX lowers them, so that this package runs them.

- switch.py: the public functions that turn it on and off;
- mode.py: which programs are rewritten; hook.py: what runs when JAX lowers a program;
- auto/: what XLA's partitioner adds to plain jit programs under Auto axes;
- explicit.py: matmuls of plain jit programs under Explicit axes;
- jaxprs.py: rewrites the body of a shard_map (body.py), and the jaxprs inside;
- matmuls.py: collectives and the matmuls next to them, which gathers.py and scatters.py find;
  fusion.py: the operation that takes their place; dataflow.py, views.py and matrices.py: how arrays
  are made from others;
- norms.py: a sum over ranks, a residual add and a norm, which rows.py recognizes;
- sums.py: merges sums; collectives.py: any collective of lax; waiting.py: the order of equations;
- agreement.py: the processes of a mesh agree on rewriting a program.
"""
