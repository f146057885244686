"""How long this package waits, in seconds, where no environment variable or option says so.

The variables are in selection/config.py, with their defaults from here; what kernels and the native
watch of the peers wait is in C++. command_line/start_rank.py, which imports nothing of the package,
has its own.

This module is below all others.
"""

# A call that waits for other ranks: how long, when it first logs a warning, and the number that
# stands for no limit: 30 years.
WAIT_S = 1800.0
REPORT_AFTER_S = 10.0
NO_LIMIT_S = 1e9

# Processes that meet.

# What needs all processes at once, at most: a rendezvous, or JAX's store.
MEETING_S = 300.0
# How much longer a process waits for the verdict of a rendezvous.
VERDICT_S = 10.0
# How long the processes of a mesh may take to connect after all have come to the rendezvous.
CONNECT_S = 30.0
# How often a process that waits looks for a verdict, and whether another one is gone.
LOOK_S = 0.25
# Before a program is rewritten: how long a process waits for those that have not said that they
# come, and for all where it does not call the program; when a call has waited in vain for these
# devices; and for what a process that has come says.
FIRST_WAIT_S = 10.0
LATER_WAIT_S = 1.0
SAYING_S = 1.0

# Peers.

# How long a process may be silent until it counts as stopped. JAX ends all processes when one has
# been silent for 100 s.
SILENT_S = 30.0
# How long, at the end of a process after a failure, JAX's last barrier may take: while all peers
# run, and when one has ended, which won't come.
BARRIER_S = 5.0
HOPELESS_BARRIER_S = 0.5
# How long the process with JAX's coordination service then waits for its peers to end: when it
# ends, JAX aborts those that are left.
LAST_S = 5.0
# How long a program that ends with an error code waits for what it has dispatched: `launch` ends it
# after 30 s.
DRAIN_BEFORE_FAILURE_S = 25.0
# How long a process waits for its threads to rest where JAX has no last barrier.
REST_S = 10.0
# How often a process that has finished looks whether its peers have, and whether it still computes.
# A peer waits longer for one that has finished (kPatience of xla_ffi/health/timeouts.h).
LAST_LOOK_S = 0.02
COMPUTES_LOOK_S = 0.25

# Ranks of `launch` and of other commands.

# After this time the coordination service and a rank that do not hear from each other take each
# other for dead: a week. A launcher sees processes end. One that is suspended, alone or with all
# others, is not dead; with JAX's 100 s it would be when it goes on.
HEARTBEAT_S = 7 * 24 * 3600
# Ranks of commands that connect: how long they meet, may be silent, and end.
OF_COMMANDS = {
    "initialization_timeout": 60,
    "heartbeat_timeout_seconds": 100,
    "shutdown_timeout_seconds": 30,
}
# How long the ranks may go on after one has failed, to report what they see of it.
OWN_ERRORS_S = 2.0
# How long a rank may take to print its stacks after SIGABRT, and to end after SIGKILL.
ABORT_S = 1.0
KILLED_S = 60.0
# How long a signal to the launcher may have to wait for its handler.
SIGNAL_S = 0.1
# After this time a line that has not ended is shown as it is: a progress bar, or a question.
LINE_S = 1.0
# How long ranks wait for a number of another one, which may compile for long.
NUMBER_S = 600.0
# What each mode of `bench`, of `demo` and a test of `doctor` may take, also on a busy machine; and
# what starting the ranks and the last measurement of `tune` may take beyond the time of a job.
BENCH_S = 1800
DEMO_S = 240
DOCTOR_S = 120.0
TUNE_SLACK_S = 300
