"""`python -m pipetrain.timelines`: see commands/timelines.py."""

import sys

from pipetrain.commands.timelines import main

if __name__ == "__main__":
    sys.exit(main())
