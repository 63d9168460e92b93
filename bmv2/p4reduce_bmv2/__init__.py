# SPDX-License-Identifier: Apache-2.0
"""Brings a switch up: the real simple_switch_grpc, or the embedded one."""
