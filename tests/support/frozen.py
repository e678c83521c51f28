"""What is imported by now is not looked through for garbage, nor copied for that where it is forked."""

import gc

gc.freeze()
