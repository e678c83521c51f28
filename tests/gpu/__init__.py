"""What only a GPU can prove, in one command, which scripts/gpu_check.py starts.

Here and not in pytest, because a machine with a GPU is seldom at hand, and then for minutes: torch and Hydra
must be enough for most of it, what decides most fits in 9 minutes, and what was found is in a table after
every row. Each check spawns its ranks, all of them on the first GPU, under a deadline; one that fails,
crashes or hangs is a line of the table, and the next goes on. The rehearsal on a CPU runs the same over gloo.

`cli` reads the command line and keeps the budget, `rows` is the table; `transport`, `training`, `traces`,
`memory`, `front` and `speed` hold the checks. `over_nccl` starts a rank of torchrun that shares its GPU.
"""
