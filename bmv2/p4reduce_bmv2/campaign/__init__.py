# SPDX-License-Identifier: Apache-2.0
"""Fault campaign: training jobs through a real switch and controller, each with one fault at a random moment."""
