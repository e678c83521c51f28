"""`python -m pipetrain` runs `pipetrain.train`, with the garbage collector off during imports.

While PyTorch is imported, the collector takes a sixth of the time and finds nothing.
"""

import gc

if __name__ == "__main__":
    gc.disable()
    from pipetrain.train import main

    main()
