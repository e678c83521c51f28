"""Published records of pipeline training, made again: `scripts/compare.py --experiment NAME`, or `all`.

`record.py` says what a record is, and `experiments/` has one file for each: what is run, what is drawn and
what must come back. `running.py` makes the steps and keeps them, `charts.py` draws, `page.py` writes the
pages, and `measures.py` has what several records measure.
"""
