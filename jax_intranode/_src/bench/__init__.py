"""The benchmark: our collectives beside those of `jax.lax`, checked and measured as by nccl-tests.

Both are measured in the same process on the same data, taking turns, so that whatever slows the
node down slows both. The parent process (command.py) only starts the ranks, shows rank 0's table
while it grows, and collects its rows; all use of devices happens in the ranks (rank.py):

    one process per device   n ranks with one device each, joined by `jax.distributed`
    a single process         one rank that has all n devices

Other libraries (peers.py) are measured after the ranks have ended. docs/bench.md says what the
figures mean and how the JSON file is laid out.
"""
