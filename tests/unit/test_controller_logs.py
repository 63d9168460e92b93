# SPDX-License-Identifier: Apache-2.0
"""Log lines with fields: as text, as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from p4reduce.proto import controller_pb2 as pb
from p4reduce_controller import messages
from p4reduce_controller.logs import JsonFormatter, TextFormatter, about, mentioned


def record(message: str = "bucket %d is late", *arguments: object, **fields: object) -> logging.LogRecord:
    given = () if arguments == ("",) else arguments or (7,)
    made = logging.LogRecord("p4reduce_controller.x", logging.WARNING, __file__, 1, message, given, None)
    made.__dict__.update(about(**fields))
    made.created, made.msecs = 1_900_000_000.25, 250
    return made


def test_text_has_the_fields_at_its_end() -> None:
    text = TextFormatter().format(record(rank=0, job="train", epoch=5, bucket=None))
    assert text.endswith(" WARNING p4reduce_controller.x: bucket 7 is late [job=train epoch=5 rank=0]")
    assert TextFormatter().format(record()).endswith(": bucket 7 is late")


def test_odd_values_are_quoted() -> None:
    text = TextFormatter().format(record(job='a b="c"'))
    assert text.endswith(' [job="a b=\\"c\\""]')
    assert TextFormatter().format(record(job="")).endswith(' [job=""]')


def test_json_is_one_object_a_line() -> None:
    text = JsonFormatter().format(record("line one\nline %d", 2, job="träin\n", epoch=5))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2030-03-17T17:46:40.250Z",
        "level": "warning",
        "logger": "p4reduce_controller.x",
        "message": "line one\nline 2",
        "job": "träin\n",
        "epoch": 5,
    }


def test_json_lines_without_fields_get_what_they_mention() -> None:
    message = """job 'it\\'s "mine"': ring path from bucket 12 on, epoch 7: rank 3 on host h1 is silent"""
    found = json.loads(JsonFormatter().format(record(message, "")))
    assert [found.get(name) for name in ("job", "epoch", "rank", "bucket")] == ['it\'s "mine"', 7, 3, 12]
    assert "epoch" not in json.loads(JsonFormatter().format(record("no epochs here, rank none", "")))
    given = json.loads(JsonFormatter().format(record("epoch 7", "", job="x")))
    assert (given["job"], "epoch" in given) == ("x", False)


def test_json_keeps_tracebacks() -> None:
    made = record()
    try:
        raise ValueError("odd")
    except ValueError:
        made.exc_info = sys.exc_info()
    found = json.loads(JsonFormatter().format(made))
    assert "ValueError: odd" in found["traceback"]


def test_text_is_one_line_and_leaves_the_terminal_alone() -> None:
    made = record("said \x1b[31m%s", "a\nb\u202e", job="x\x07")
    text = TextFormatter().format(made)
    assert text.endswith("said \\x1b[31ma\\nb\\u202e [job=x\\x07]")
    assert text.isprintable()
    try:
        raise ValueError("odd\x1b")
    except ValueError:
        made.exc_info = sys.exc_info()
    lines = TextFormatter().format(made).split("\n")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: odd\\x1b"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("epoch 007, rank 00", {"epoch": 7, "rank": 0}),
        ("epoch \u0663", {}),
        ("epoch " + "9" * 5000, {}),
        ("job 'epoch 5': rank 3", {"job": "epoch 5", "rank": 3}),
        ("job 'a': instead of job 'rank 9'", {"job": "a"}),
        (f"job {chr(10) + chr(0xE4) + chr(7)!r} is late", {"job": "\n\u00e4\a"}),
        ("job 'a\nb'", {"job": "a\nb"}),
        (r"job '\x \d \N{} \Uffffffff'", {"job": r"x d N{} \Uffffffff"}),
        ("job 'not closed, epoch 4", {"epoch": 4}),
    ],
)
def test_whatever_a_message_mentions_the_line_is_written(message: str, found: dict[str, object]) -> None:
    assert mentioned(message) == found
    assert json.loads(JsonFormatter().format(record(message, "")))["message"] == message


def test_words_of_workers_are_escaped() -> None:
    said = "\x1b]0;x\x07\nERROR forged \u202e" + "\x00" * 2000
    found = messages.report(pb.ProgressReport(trouble=pb.Trouble(message=said), answer=pb.Answer(message=said)))
    assert found.trouble is not None
    assert found.answer is not None
    for text in (found.trouble.message, found.answer.message):
        assert text.startswith("\\x1b]0;x\\x07\\nERROR forged \\u202e\\x00")
        assert (text.isprintable(), len(text)) == (True, 1000)
