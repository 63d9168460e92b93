# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation: virtual clock, seeded network, reference switch."""
