"""The programs that other_programs.py runs, a file each.

A file has

- REPOSITORY, COMMIT: where its sources are, and the commit that was tried;
- FOLDER: their place below the folder that has the clones of all repositories;
- PACKAGES: what pip has to install for it;
- TOLERANCE: by how much a result may differ, relative to the largest absolute value of its array;
- steps(small): a generator that takes a step of the program each time, and yields a dict of arrays.
  `small` asks for a model that CPU devices can run.
"""
