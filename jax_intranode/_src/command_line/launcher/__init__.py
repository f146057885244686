"""One process per rank on this node: start them, watch them, and leave none behind.

The parent process:
    job: the processes of one run.
    service: JAX's coordination service, which tells the ranks of each other.
    runs: runs whose output goes to files, of commands and of functions of this package.
    output: a rank's output as `python -m jax_intranode launch` (command_line/launch.py) shows it.
Each rank (`launch` starts them as command_line/start_rank.py, which runs the user's script):
    rank: how a rank joins the others.
    all_ranks: the program that `runs.run_function` starts, and numbers that ranks exchange.

torchrun and mpirun start processes, too. Neither starts JAX's coordination service, so it would
live in rank 0 and die with it, and neither is a dependency that JAX programs have anyway.
"""
