"""Jobs in which one process fails, and what the others must do then.

matrix.py      the cases: who fails, how, when and in which operation
operations.py  the operations, with their right results
rank.py        the program of each process: runs an operation, or fails
job.py         starts the processes of a case and notes what they do
verdict.py     what must have happened

tests/multiprocess/test_faults.py runs them.
"""
