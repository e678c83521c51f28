"""`python -m pipetrain` runs `commands/train.py`, with the garbage collector off during imports.

While PyTorch is imported, the collector takes a sixth of the time and finds nothing. SIGUSR1 asks to save,
and there is nothing yet; Ctrl-C ends the imports without a traceback.
"""

import gc
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    from pipetrain.commands.train import main

    main()
