"""`python -m pipetrain.export`: see commands/export.py."""

import sys

from pipetrain.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
