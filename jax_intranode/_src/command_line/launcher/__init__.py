"""One process per rank on this node: start them, watch them, and leave none behind.

The parent process:
    job: the processes of one run.
    service: JAX's coordination service, which tells the ranks of each other.
    files: `run_ranks`, a run whose output goes to files, for tests and benchmarks.
    functions: `run_function`, a run of a function of this package, with messages and progress.
    progress: the progress line.
    output: a rank's output as `python -m jax_intranode launch` (command_line/launch.py) shows it.
Each rank:
    start_rank: the program that `launch` starts, which runs the user's script.
    rank: how a rank joins the others.
    function_rank: the program that `run_function` starts.
    all_ranks: numbers that the ranks exchange.

torchrun and mpirun start processes, too. Neither starts JAX's coordination service, so it would
live in rank 0 and die with it, and neither is a dependency that JAX programs have anyway.
"""
