"""SIGINT, SIGTERM and SIGHUP: the first asks the loop to save and stop after this step, the second exits now."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Context manager; `received` is the signal's number, 0 before any. Exit status 128 + number (130, 143, 129)."""

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> StopSignal:
        self._old = {number: signal.signal(number, self._handle) for number in STOPS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        with suppress(OSError):
            os.write(2, b"\nstopping after this step with a checkpoint; once more to exit at once\n")

    @property
    def exit_code(self) -> int:
        return 128 + self.received if self.received else 0
