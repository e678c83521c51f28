"""Published records of pipeline training, made again: `scripts/compare.py --experiment NAME`, or `all`.

`experiments/` has a module for each: `steps` says what is measured, and `show` yields what the results say:
numbers, checks and charts (`record.py`). `records.yaml` has its words. `cli.py` makes the steps and keeps
what they return, `charts.py` draws, `page.py` writes the pages. `measures.py` and `torchgpipe_race.py` have
what several records measure. The study of late gradients has `trials.py` and `emulation.py`.
"""
