"""What holds for every test."""

from __future__ import annotations

import signal

# A shell starts what runs in its background deaf to Ctrl-C, and so would be all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
