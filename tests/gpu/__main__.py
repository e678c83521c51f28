import sys

from tests.gpu.cli import main

if __name__ == "__main__":  # the ranks import this file too
    sys.exit(main())
