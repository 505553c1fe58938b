"""The log of a process that serves: on standard error, a line for each record, and only so many lines a second."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

LINES_PER_SECOND = 10.0
BURST = 50
MAX_LINE = 2000
_FRAMES = 6
_LOGGERS = ("uvicorn", "asyncio", "bexp", "mcp")


class OneLineFormatter(logging.Formatter):
    """Writes an exception as its type, its message and its innermost frames, all in the record's line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
            line += f": {type(error).__name__}: {error} [{where}]"
        return " ".join(line.split())[:MAX_LINE]


class RateFilter(logging.Filter):
    """Drops records beyond a rate, and says in the next one how many were dropped."""

    def __init__(
        self,
        per_second: float = LINES_PER_SECOND,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens < 1:
            self._dropped += 1
            return False
        self._tokens -= 1
        if self._dropped:
            record.msg = f"{record.getMessage()} ({self._dropped} lines before this one were left out)"
            record.args = None
            self._dropped = 0
        return True


def log_config() -> dict[str, Any]:
    """Return the configuration of `logging` for a process that serves."""
    loggers = {name: {"handlers": ["stderr"], "level": "WARNING", "propagate": False} for name in _LOGGERS}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"rate": {"()": RateFilter}},
        "formatters": {"line": {"()": OneLineFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["rate"]}},
        "loggers": loggers,
    }
