"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, nohup its command with SIGHUP. Children inherit that,
# and tests would press Ctrl-C in vain.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
