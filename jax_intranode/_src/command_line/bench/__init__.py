"""The benchmark: our operations and those of `jax.lax`, checked and timed.

Both run in the same processes on the same data and take turns, so that whatever slows the node down
slows both. Options and columns follow nccl-tests. docs/bench.md explains the columns and the JSON.

command.py is the parent process, measure.py what each rank runs. tools/bench.py of the source tree
also measures whole programs and other libraries, and plots.
"""
