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


_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Refused(Exception):
    """A request that the server refuses, with its status code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The code as gRPC's own enumeration."""
        return _GRPC_CODES[int(self.code)]


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

    A large batch loses the texts of its errors rather than all of its details (DETAILS_BUDGET); the codes stay.
    """
    if not any(outcomes):
        return None
    status = _pack(outcomes, texts=True)
    if status.ByteSize() > DETAILS_BUDGET:
        status = _pack(outcomes, texts=False)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    return RpcStatus(grpc.StatusCode.UNKNOWN, status.message, metadata)


def _pack(outcomes: Sequence[Refused | None], *, texts: bool) -> status_pb2.Status:
    failed = sum(outcome is not None for outcome in outcomes)
    status = status_pb2.Status(code=Code.UNKNOWN, message=f"{failed} of {len(outcomes)} updates failed")
    for outcome in outcomes:
        error = p4runtime_pb2.Error(canonical_code=Code.OK)
        if outcome is not None:
            error.canonical_code = outcome.code
            error.space = SPACE
            if texts:
                error.message = outcome.message
        status.details.add().Pack(error)
    return status
