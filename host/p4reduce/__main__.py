# SPDX-License-Identifier: Apache-2.0
"""`python -m p4reduce` is the command `p4reduce`."""

import sys

from p4reduce.cli import main

sys.exit(main())
