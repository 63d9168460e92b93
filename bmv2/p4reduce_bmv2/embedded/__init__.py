# SPDX-License-Identifier: Apache-2.0
"""A v1model switch in Python: executes compiled BMv2 JSON behind a P4Runtime server."""
