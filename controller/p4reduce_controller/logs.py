# SPDX-License-Identifier: Apache-2.0
"""Log lines that carry job, epoch, rank and bucket as fields of their own, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO, Any

FIELDS = ("job", "epoch", "rank", "bucket")
_MENTIONED = {name: re.compile(rf"\b{name} ([0-9]{{1,20}})\b") for name in FIELDS[1:]}
_JOB = re.compile(r"""\bjob ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
"""How messages speak of these things, everywhere in this project."""
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
FORMATS = ("text", "json")
_KEY = "p4reduce"


def about(**fields: object) -> dict[str, Any]:
    """Keyword `extra` of a log call: what the line is about. Fields that are None are left out."""
    return {_KEY: {name: value for name, value in fields.items() if value is not None}}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What a line is about, in the order of FIELDS."""
    given: dict[str, object] = getattr(record, _KEY, {})
    return {name: given[name] for name in FIELDS if name in given}


def printable(text: str) -> str:
    """The text with everything escaped that would break a line or garble a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def mentioned(message: str) -> dict[str, object]:
    """What a message is about, as far as it says so: for lines that were logged without fields. Never raises."""
    found: dict[str, object] = {}
    job = _JOB.search(message)
    if job is not None:
        found["job"] = _ESCAPE.sub(_unescaped, job[1][1:-1])
        # A job may be called "epoch 7".
        message = _JOB.sub("job", message)
    for name, pattern in _MENTIONED.items():
        match = pattern.search(message)
        if match is not None:
            found[name] = int(match[1])
    return found


def _unescaped(match: re.Match[str]) -> str:
    """One of the escapes that repr() writes."""
    said = match[1]
    if len(said) == 1:
        return _LETTERS.get(said, said)
    code = int(said[1:], 16)
    return chr(code) if code <= sys.maxunicode else match[0]


class TextFormatter(logging.Formatter):
    """One line for people, with the fields as key=value at its end. Only a traceback adds lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        suffix = " ".join(f"{name}={_plain(value)}" for name, value in fields_of(record).items())
        return printable(super().formatMessage(record) + (f" [{suffix}]" if suffix else ""))

    def formatException(self, ei: Any) -> str:
        """See logging.Formatter."""
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


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
