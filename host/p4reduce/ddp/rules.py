# SPDX-License-Identifier: Apache-2.0
"""Which way a bucket goes. One table, which docs/hook.md repeats and a test compares.

Nothing but a bucket's dtype, layout and device decides, so all ranks of a model decide alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

Way = Literal["job", "plain", "refused"]
"""To the job, whose integers take the switch path or the ring path; to torch.distributed as it is; or nowhere."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to the buckets of some dtypes."""

    name: str
    dtypes: frozenset[torch.dtype]
    """Empty: every dtype."""
    devices: frozenset[str]
    """Empty: every device."""
    sparse: bool | None
    """None: every layout."""
    way: Way
    how: str

    def covers(self, dtype: torch.dtype, device: str, sparse: bool) -> bool:
        """Whether this rule is about such a bucket."""
        return (
            (not self.dtypes or dtype in self.dtypes)
            and (not self.devices or device in self.devices)
            and (self.sparse is None or self.sparse == sparse)
        )


_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_KNOWN = frozenset({"cpu", "cuda"})

RULES: tuple[Rule, ...] = (
    Rule(
        *("sparse gradients", _FLOATS | _COMPLEX, _KNOWN, True, "plain"),
        "torch.distributed sums indices and values",
    ),
    Rule(
        *("float32", frozenset({torch.float32}), frozenset({"cpu"}), False, "job"),
        "in the bucket's own memory, without a copy",
    ),
    Rule(
        *("float16, bfloat16", _HALVES, frozenset({"cpu"}), False, "job"),
        "as float32; the mean is rounded back once",
    ),
    Rule(
        *("float32, float16, bfloat16 on CUDA", _HALVES | {torch.float32}, frozenset({"cuda"}), False, "job"),
        "as float32 through pinned memory; the mean is rounded back once",
    ),
    Rule(
        *("float64", frozenset({torch.float64}), _KNOWN, False, "plain"),
        "torch.distributed sums it as it is: no lane holds its precision",
    ),
    Rule(
        *("complex", _COMPLEX, _KNOWN, False, "plain"),
        "torch.distributed sums it as it is; DDP itself shows complex parameters as real numbers twice as many",
    ),
    Rule(
        *("anything else", frozenset[torch.dtype](), frozenset[str](), None, "refused"),
        "integers, bool, float8, other devices: UsageError from the next optimizer step",
    ),
)
"""The first rule that covers a bucket counts."""


def rule_for(buffer: torch.Tensor) -> Rule:
    """The rule for a bucket with this buffer."""
    return _find(buffer.dtype, buffer.device.type, buffer.layout != torch.strided)


@functools.cache
def _find(dtype: torch.dtype, device: str, sparse: bool) -> Rule:
    return next(rule for rule in RULES if rule.covers(dtype, device, sparse))


def size_of(buffer: torch.Tensor) -> int:
    """Bytes of gradients in a bucket; of a sparse one, of its values."""
    stored = buffer._values() if buffer.is_sparse else buffer
    return stored.numel() * stored.element_size()
