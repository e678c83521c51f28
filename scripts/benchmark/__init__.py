"""The benchmark: pipetrain beside what else there is, measured in turns on one machine, in one table.

A machine's speed drifts more than the differences that matter. So all contestants of a suite are built once,
in the same processes, and take turns, round by round, in an order that rotates; and a ratio is the median of
the ratios within each round, so that the drift cancels. `worlds` starts the processes, `tasks` says what is
trained, `contestants` trains and times it, and each suite has a file; `report` makes the table.
"""
