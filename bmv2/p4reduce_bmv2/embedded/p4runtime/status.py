# SPDX-License-Identifier: Apache-2.0
"""Status codes and the three-level error of a P4Runtime Write (P4Runtime specification, "Error Reporting")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import grpc

from p4reduce_bmv2.embedded.errors import BadEntry, EntryExists, EntryMissing, TableFull
from p4reduce_bmv2.embedded.p4runtime.stubs import p4runtime_pb2, status_pb2

SPACE = "p4reduce-embedded"
"""Value of p4.v1.Error.space: whose error numbers these are."""
DETAILS_BUDGET = 7000
"""Bytes. A gRPC client accepts 8 KiB of metadata unless told otherwise, and gets no details at all above that."""


class Code(IntEnum):
    """google.rpc.Code, the values in use here."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


MAX_TEXT = 4000
"""Bytes of a message, which travels as metadata too."""

_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Refused(Exception):
    """A request that the server refuses, with its status code. A message longer than MAX_TEXT is cut."""

    def __init__(self, code: Code, message: str) -> None:
        message = shortened(message, MAX_TEXT)
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The code as gRPC's own enumeration."""
        return _GRPC_CODES[int(self.code)]


def shortened(text: str, limit: int) -> str:
    """`text`, cut where needed to take no more than `limit` bytes in gRPC's grpc-message (percent-encoded UTF-8)."""
    size = 0
    for place, letter in enumerate(text):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode(errors="replace"))
        if size > limit:
            return text[:place] + "..."
    return text


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """What ServicerContext.abort_with_status takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


@contextmanager
def engine_refusals() -> Iterator[None]:
    """Translate the engine's errors into status codes."""
    try:
        yield
    except TableFull as error:
        raise Refused(Code.RESOURCE_EXHAUSTED, str(error)) from error
    except EntryExists as error:
        raise Refused(Code.ALREADY_EXISTS, str(error)) from error
    except EntryMissing as error:
        raise Refused(Code.NOT_FOUND, str(error)) from error
    except BadEntry as error:
        raise Refused(Code.INVALID_ARGUMENT, str(error)) from error


def batch_status(outcomes: Sequence[Refused | None]) -> RpcStatus | None:
    """Status of a Write: None when every update succeeded, else UNKNOWN with one p4.v1.Error per update, in order.

    A large batch loses the texts of its errors; the codes stay. Where even these do not fit (DETAILS_BUDGET) there are
    no details, and the message has the first error.
    """
    first = next((place for place, outcome in enumerate(outcomes) if outcome is not None), None)
    if first is None:
        return None
    for texts in (True, False):
        # Not built where it cannot fit: it would take seconds for a batch of a hundred thousand.
        if len(outcomes) * _SMALLEST_DETAIL > DETAILS_BUDGET:
            break
        status = _pack(outcomes, texts=texts)
        if status.ByteSize() <= DETAILS_BUDGET:
            return _with_details(status)
    return RpcStatus(grpc.StatusCode.UNKNOWN, _summary(outcomes, first), ())


def _with_details(status: status_pb2.Status) -> RpcStatus:
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    return RpcStatus(grpc.StatusCode.UNKNOWN, status.message, metadata)


def _count(outcomes: Sequence[Refused | None]) -> str:
    failed = sum(outcome is not None for outcome in outcomes)
    return f"{failed} of {len(outcomes)} updates failed"


def _summary(outcomes: Sequence[Refused | None], first: int) -> str:
    """What is said instead of details."""
    error = outcomes[first]
    text = "" if error is None else f"{error.code.name}: {error.message}"
    return shortened(f"{_count(outcomes)}, too many to list; the first is updates[{first}]: {text}", MAX_TEXT)


def _pack(outcomes: Sequence[Refused | None], *, texts: bool) -> status_pb2.Status:
    status = status_pb2.Status(code=Code.UNKNOWN, message=_count(outcomes))
    for outcome in outcomes:
        error = p4runtime_pb2.Error(canonical_code=Code.OK)
        if outcome is not None:
            error.canonical_code = outcome.code
            if texts:
                error.space = SPACE
                error.message = outcome.message
        status.details.add().Pack(error)
    return status


_SMALLEST_DETAIL = _pack([None], texts=False).ByteSize() - _pack([], texts=False).ByteSize()
"""Bytes of the detail of an update that succeeded."""
