"""The comparison: one training by several methods and seeds, each in its own processes; tables and a report.

It stands outside the trainer and knows it only by its command line and by what a run leaves in its folder
(`summary.json`, `metrics.csv`), so that what it measures is what a user gets. But for `workers`, a process of
its own, it never imports torch: that would take memory and cores from the runs that it times.

Asked: `experiment` is what can be asked for, `request` reads the command line. Done: `runs` starts and keeps
runs in the `workers`, which `processes` starts and ends; `cli` goes through them. Shown: `table`, `record`
beside it, `plots`, `verdict`, and `report`, which puts all of them on one page. `metric` is what the runs are
compared by.
"""
