"""The command `tune`: measures this node, and writes what `tuning.py` reads.

The parent process (command.py) starts the ranks of each mode and world size, one job after another,
collects what rank 0 found, and writes the file. tools/tune_profile.py, which only the source tree
has, measures the profile of the overlap model.

    measure: what each rank runs.
    sweep: one operation of one dtype: which algorithm, which launch, and up to which size; and the
        rows of the table that follow.
"""
