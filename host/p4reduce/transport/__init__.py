# SPDX-License-Identifier: Apache-2.0
"""How frames travel: the interface and the UDP socket."""
