"""The comparison: one training by several methods and seeds, each in its own processes; tables and a report.

It knows the trainer by its command line and by what a run leaves in its folder (`summary.json`,
`metrics.csv`), so that what it measures is what a user gets. It never imports torch: that would take memory
and cores from the runs that it times.

`request` reads what is asked for, `runs` makes the runs, in processes that `processes` starts and ends, and
`cli` goes through them. Shown: `table`, `plots`, `verdict`, and `report`, which puts all of them on one page.
"""
