# SPDX-License-Identifier: Apache-2.0
"""`p4reduce demo`: trains a small language model twice, with plain DDP and through the switch, and compares."""
