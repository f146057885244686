"""The benchmark: our operations and those of `jax.lax`, checked and timed.

Both run in the same processes on the same data and take turns, so that whatever slows the node down
slows both. Options and columns follow nccl-tests.

The parent process (command.py) starts the ranks, shows rank 0's table while it grows and collects
its rows. Only the ranks (rank.py) use devices:

    process-per-device   n ranks with one device each, joined by `jax.distributed`
    single-process       one rank that has all n devices

There are three kinds of measurements, each in a package with the same modules: what can be measured
(operations.py or definitions.py), how it is checked (oracle.py), how it is timed (measure.py) and
its table (report.py).

    collectives/   psum, pmean, psum_scatter, all_gather, all_to_all
    matmuls/       collective matmuls
    programs/      whole programs
    peers/         other libraries, measured after the ranks have ended
    plots/         plots of the JSON files

docs/bench.md explains the columns and the layout of the JSON file.
"""
