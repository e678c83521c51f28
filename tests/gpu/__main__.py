import sys
from multiprocessing import forkserver

from tests.gpu.cli import main

if __name__ == "__main__":  # the ranks import this file too
    if "cpu" in sys.argv:  # the ranks of a rehearsal are forked: all that they need is imported once
        forkserver.set_forkserver_preload(["torch._dynamo", "tests.gpu.cli"])
        forkserver.ensure_running()
    sys.exit(main())
