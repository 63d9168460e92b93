# SPDX-License-Identifier: Apache-2.0
"""p4reduce: allreduce inside a P4 switch."""

__version__ = "0.1.0"
