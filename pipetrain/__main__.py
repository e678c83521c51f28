"""`python -m pipetrain` runs `pipetrain.train`, with the garbage collector off during imports.

While PyTorch is imported, the collector takes a sixth of the time and finds nothing. SIGUSR1 asks to save,
and there is nothing yet.
"""

import gc
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.disable()
    from pipetrain.train import main

    main()
