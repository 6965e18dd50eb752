"""What a process writes to its log: a line of text for each event, or one JSON object with its fields.

Events are logged as ``log.info("joined name=%s incarnation=%d", name, incarnation)``: the words before the first
``key=`` name the event, and the keys name its fields. As JSON that is {"time", "level", "logger", "event": "joined",
"name": ..., "incarnation": ...}, each value with its own type. Neither form ever holds a prompt, a completion or a key:
those are passed to no logger.

Whoever reads the log may stop reading: then lines wait, up to a number, and nothing that logs waits with them.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import select
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)

# Some megabytes.
MOST_LINES = 10_000
# An orderly end is promised within a second.
FLUSH_S = 0.2

# Of the request on whose behalf something is logged; empty: of none.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_CONVERSION = re.compile(r"%(?:%|[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z])")
_FIELD = re.compile(r"(\w+)=$")
_OWN = frozenset({"time", "level", "logger", "event", "request_id", "error"})


@lru_cache(maxsize=1024)
def _template(message: str) -> tuple[str, tuple[str, ...] | None]:
    """The event and the fields that a template names, in order; None where an argument has no name."""
    names: list[str] = []
    first = len(message)
    for found in _CONVERSION.finditer(message):
        if found.group() == "%%":
            continue
        named = _FIELD.search(message, 0, found.start())
        if named is None or "*" in found.group():
            return message, None
        first = min(first, named.start())
        names.append(named.group(1))
    return message[:first].strip() or message, tuple(names)


def _value(value: object) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class JsonLines(logging.Formatter):
    """One JSON object for each record, on one line whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        said: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event, names = _template(str(record.msg))
        arguments = record.args if isinstance(record.args, tuple) else ()
        if names is not None and len(names) == len(arguments):
            said["event"] = event
            fields = {
                f"{key}_" if key in _OWN else key: _value(value) for key, value in zip(names, arguments, strict=True)
            }
            said.update(fields)
        else:
            said["event"] = record.getMessage()
        if request_id := REQUEST_ID.get():
            said["request_id"] = request_id
        if record.exc_info and record.exc_info[0] is not None:
            said["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(said, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    """A record may not begin a line that looks like another's."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if record.exc_info:
            return line
        return line.replace("\r", "\\r").replace("\n", "\\n")


class Lines(logging.Handler):
    """Writes lines from a thread of its own: whoever reads them may stop, and nothing that logs waits for it.

    A record is formatted where it is logged. Of MOST_LINES that wait none is lost; those beyond are counted, and their
    number is logged once there is room.
    """

    def __init__(self, fd: int) -> None:
        """Args: fd: Written to for as long as the process lives; it stays the caller's."""
        super().__init__()
        self._fd, self._dropped = fd, 0
        self._waiting: deque[str] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a line behind the others. Does not wait for anything to be written."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) >= MOST_LINES:
                self._dropped += 1
                return
            self._waiting.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when all is written, or after FLUSH_S: nobody may be reading."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, FLUSH_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                left = (self._waiting[0] + "\n").encode(errors="backslashreplace")
            # Whoever read it may have gone.
            with suppress(OSError):
                while left:
                    try:
                        left = left[os.write(self._fd, left) :]
                    except BlockingIOError:
                        # A parent made it so.
                        select.select([], [self._fd], [])
            with self._changed:
                self._waiting.popleft()
                if self._dropped:
                    said, counts = "log_lines_dropped count=%d", (self._dropped,)
                    told = logging.LogRecord(__name__, logging.WARNING, __file__, 0, said, counts, exc_info=None)
                    self._waiting.append(self.format(told))
                    self._dropped = 0
                self._changed.notify_all()


def begin(form: str, level: str) -> None:
    """Log to stderr from now on, in one of FORMATS."""
    lines = Lines(sys.stderr.fileno())
    lines.setFormatter(JsonLines() if form == JSON else _Text())
    logging.basicConfig(level=level.upper(), handlers=[lines])
    # What ends a thread is a line like others: written to stderr here, it would wait for whoever reads that.
    sys.excepthook = _on_exception
    threading.excepthook = lambda found: _on_exception(found.exc_type, found.exc_value, found.exc_traceback)


def _on_exception(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    found = (kind, error or kind(), where)
    logging.getLogger(__name__).critical("uncaught thread=%s", threading.current_thread().name, exc_info=found)


def end_at_once(code: int) -> NoReturn:
    """End the process and close nothing: a thread of it hangs and may hold whatever an orderly end needs. What was
    logged is written before, if that takes no longer than FLUSH_S."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)
