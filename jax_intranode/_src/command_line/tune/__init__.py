"""The command `tune`: measures this node, and writes what `tuning.py` reads.

command.py is the parent process, sweep.py what each rank runs. tools/tune_profile.py of the source
tree adds the profile of the overlap model to the file.
"""
