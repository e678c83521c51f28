"""The comparison: the same training by several schedules and seeds, each in its own processes, in a table.

It stands outside the trainer and knows it only by its command line and by what a run leaves in its folder
(`summary.json`, `metrics.csv`), so that what it measures is what a user gets, and it never imports torch: it
would take memory and cores from the runs that it times. `cli` reads the command line, `runs` starts and keeps
runs, `processes` ends them whole, `table` and `plots` show what came out.
"""
