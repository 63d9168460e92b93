# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: bounded in the tests, as long as wanted with tools/fuzz.py."""
