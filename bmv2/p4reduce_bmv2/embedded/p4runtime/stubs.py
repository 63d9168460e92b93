# SPDX-License-Identifier: Apache-2.0
"""The generated P4Runtime code, imported in one place, because it is an extra and pins an old protobuf."""

from __future__ import annotations

from typing import Any

from p4reduce.errors import SwitchError

try:
    from google.protobuf import any_pb2, text_format
    from google.rpc import status_pb2
    from p4.config.v1 import p4info_pb2
    from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc
except ImportError as error:
    raise SwitchError(
        f"the embedded switch needs the module {error.name}: pip install 'p4reduce[bmv2]', best in its own environment"
    ) from error
except TypeError as error:
    # What protobuf >= 4 says to code generated for protobuf 3.
    raise SwitchError(
        "the installed protobuf is too new for the P4Runtime stubs: pip install 'p4reduce[bmv2]' in its own environment"
    ) from error

Message = Any
"""Any protobuf message; the stubs carry no types."""

__all__ = ["Message", "any_pb2", "p4info_pb2", "p4runtime_pb2", "p4runtime_pb2_grpc", "status_pb2", "text_format"]
