"""The command line: `python -m jax_intranode`.

Each file is a command, or what several commands use. start_rank.py is the program that `launch` and
`run` start; acceleration.py is what `run` switches on in it. Larger commands are packages: bench,
tune, and launcher, by which `launch` and other commands start processes.
"""
