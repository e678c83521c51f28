"""What tests share.

DEADLINE_S is the deadline of whatever a test waits for: it only ends what hangs, so it suits a slow machine.
PIPETRAIN_TEST_DEADLINE_SCALE multiplies it, for a machine that is slower still.
"""

import os

DEADLINE_S = 600.0 * float(os.environ.get("PIPETRAIN_TEST_DEADLINE_SCALE", "1"))
