# SPDX-License-Identifier: Apache-2.0
"""Log lines that carry job, epoch, rank and bucket as fields of their own, as text or as JSON."""

from __future__ import annotations

import ast
import json
import logging
import re
import time
from typing import IO, Any

FIELDS = ("job", "epoch", "rank", "bucket")
_MENTIONED = {name: re.compile(rf"\b{name} (\d+)\b") for name in FIELDS[1:]} | {
    "job": re.compile(r"""\bjob ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
}
"""How messages speak of these things, everywhere in this project."""
FORMATS = ("text", "json")
_KEY = "p4reduce"


def about(**fields: object) -> dict[str, Any]:
    """Keyword `extra` of a log call: what the line is about. Fields that are None are left out."""
    return {_KEY: {name: value for name, value in fields.items() if value is not None}}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What a line is about, in the order of FIELDS."""
    given: dict[str, object] = getattr(record, _KEY, {})
    return {name: given[name] for name in FIELDS if name in given}


def mentioned(message: str) -> dict[str, object]:
    """What a message is about, as far as it says so: for lines that were logged without fields."""
    found: dict[str, object] = {}
    for name in FIELDS:
        match = _MENTIONED[name].search(message)
        if match is not None:
            found[name] = ast.literal_eval(match[1])
    return found


class TextFormatter(logging.Formatter):
    """One line for people, with the fields as key=value at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        suffix = " ".join(f"{name}={_plain(value)}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + (f" [{suffix}]" if suffix else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, the fields, and a traceback if any.

    A line that was logged without fields gets those that its message mentions.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(fields_of(record) or mentioned(record.getMessage())),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: object) -> str:
    text = str(value)
    return text if text and not any(c.isspace() or c in '"[]=' for c in text) else json.dumps(text, ensure_ascii=False)


def set_up(form: str, level: str, stream: IO[str]) -> None:
    """Send the process's log lines from `level` on to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
