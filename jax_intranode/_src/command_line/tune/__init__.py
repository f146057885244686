"""The command `tune`: measures this node, and writes what `tuning.py` reads.

The parent process (command.py) starts the ranks of each mode and world size, one job after another,
collects what rank 0 found, and writes the file.

    rank: the program of a rank.
    sweep: one operation of one dtype: which algorithm, which launch, and up to which size.
    rows: the rows of the table that follow from measured sizes.
    matmuls: the profile of the overlap model.
"""
