"""The comparison: one training by several methods and seeds, each in its own processes; tables and a report.

It stands outside the trainer and knows it only by its command line and by what a run leaves in its folder
(`summary.json`, `metrics.csv`), so that what it measures is what a user gets, and it never imports torch:
it would take memory and cores from the runs that it times.

Asked: `methods` and `experiment` are what can be asked for, `request` reads the command line. Done: `runs`
starts and keeps runs, `processes` ends them whole, `machine` says what they ran on, `cli` goes through
them. Shown: `table`, `record` beside it (in `text`'s hand), `plots`, and `report`, which puts `verdict`,
`charts`, `timelines` and `sections` on one page.
"""
