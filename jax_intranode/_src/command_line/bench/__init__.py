"""The benchmark: our operations and those of `jax.lax`, checked and timed.

Both run in the same processes on the same data and take turns, so that whatever slows the node down
slows both. Options and columns follow nccl-tests. docs/bench.md explains the columns and the JSON.

The parent process (command, options, shapes) starts the ranks with `settings`, shows rank 0's table
while it grows, and collects its rows. A rank runs `measure`, which makes the rows: `collectives`
(and `graph`, their kernels alone) and `matmuls` check by `oracle` and time by `timing` what
`operations` lists. `record` has the header of the file, `report` the tables. The source tree's
folder tools has whole programs (bench_programs), other libraries (bench_peers) and plots.
"""
