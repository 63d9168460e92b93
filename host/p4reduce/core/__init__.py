# SPDX-License-Identifier: Apache-2.0
"""The protocol of a worker without any input or output: bytes and `now` in, frames, deadlines and events out."""
