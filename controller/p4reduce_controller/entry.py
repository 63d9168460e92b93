# SPDX-License-Identifier: Apache-2.0
"""Entry points of the two commands, which say what to install when the extra `controller` is missing."""

from __future__ import annotations

import importlib
import sys

EXIT_MISSING = 2


def serve() -> int:
    """`p4reduce-controller`."""
    return _run("p4reduce_controller.serve", "p4reduce-controller")


def ctl() -> int:
    """`p4reducectl`."""
    return _run("p4reduce_controller.cli", "p4reducectl")


def _run(module: str, command: str) -> int:
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("p4reduce"):
            raise
        sys.stderr.write(
            f"{command}: the module {error.name} is missing: pip install 'p4reduce[controller]', "
            f"best in an environment of its own\n"
        )
        return EXIT_MISSING
    status: int = main()
    return status
