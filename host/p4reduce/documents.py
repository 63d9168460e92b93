# SPDX-License-Identifier: Apache-2.0
"""Where the commands' `--json` goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p4reduce.errors import UsageError


def unwritable(target: str, error: Exception) -> UsageError:
    """What to say when a document cannot be written to `target`."""
    return UsageError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}")


def write_json(document: Mapping[str, Any], target: str) -> None:
    """Write a document to a file, or to standard output for "-". UsageError when that fails."""
    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise unwritable(target, error) from None
