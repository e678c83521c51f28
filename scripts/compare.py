"""Compare schedules: the same training by each, in one table, plots and a report. Works without installing.

python scripts/compare.py --schedules layer_dist pipedream --seeds 0 1 2 model=vgg16 data=digits epochs=5
python scripts/compare.py --experiment xdypipe_full
python scripts/compare.py --experiment zero-bubble    # a published record, beside what is found here; or all
"""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if lacking := [name for name in ("jinja2", "scipy") if find_spec(name) is None]:
    sys.exit(f"compare: {' and '.join(lacking)} not installed: pip install 'pipetrain[compare]'")

from comparison import cli as comparison
from published import cli as published

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(published.main(words) if published.asked_for(words) else comparison.main(words))
