# SPDX-License-Identifier: Apache-2.0
"""P4Runtime server of the embedded switch."""

from p4reduce_bmv2.embedded.p4runtime.device import Device
from p4reduce_bmv2.embedded.p4runtime.server import P4RuntimeServer

__all__ = ["Device", "P4RuntimeServer"]
