#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill, stop, cut and drain what training jobs depend on, and compare their bits with an undisturbed run's.

Usage: campaign_faults.py [--seed N] [--runs N] [--switch embedded|bmv2] [--only RUN] [--fault NAME] ...

See docs/campaign.md. Progress goes to stderr; the last line on stdout is one JSON object; the exit status is 1 when a
run was bad, and such a run is printed with the command that does it again.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Here, because every worker process reads this file once more.
    import sys

    from p4reduce_bmv2.campaign.cli import main

    sys.exit(main())
