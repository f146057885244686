"""The command line: `python -m jax_intranode`.

Each file is a command, or what several commands use. Larger ones are packages: bench, tune, and
launcher, by which `launch` and other commands start processes.
"""
