"""What a process writes to its log: a line of text for each event, or one JSON object with its fields.

Events are logged as ``log.info("joined name=%s incarnation=%d", name, incarnation)``: the words before the first
``key=`` name the event, and the keys name its fields. As JSON that is {"time", "level", "logger", "event": "joined",
"name": ..., "incarnation": ...}, each value with its own type. Neither form ever holds a prompt, a completion or a key:
those are passed to no logger.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
import traceback
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)

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
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event, names = _template(str(record.msg))
        arguments = record.args if isinstance(record.args, tuple) else ()
        if names is not None and len(names) == len(arguments):
            said["event"] = event
            fields = {
                f"{key}_" if key in _OWN else key: _value(value)
                for key, value in zip(names, arguments, strict=True)
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


def begin(form: str, level: str) -> None:
    """Log to stderr from now on, in one of FORMATS."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(JsonLines() if form == JSON else _Text())
    logging.basicConfig(level=level.upper(), handlers=[stderr])
