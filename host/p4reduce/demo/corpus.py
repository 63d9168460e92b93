# SPDX-License-Identifier: Apache-2.0
"""The text the demo learns: the help pages of Python itself, about 450,000 characters of English, always at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from p4reduce.errors import P4ReduceError

HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as int64 character numbers, split into a part to learn and a part held out."""

    symbols: int
    training: torch.Tensor
    held_out: torch.Tensor

    def batches(self, seed: int, rank: int, world_size: int, batch: int, context: int) -> Iterator[torch.Tensor]:
        """Endless batches (batch / world_size, context + 1) of one rank.

        The ranks share one seeded order and take a slice each, so together they see the same text for every world_size.
        """
        generator = torch.Generator().manual_seed(seed)
        share = batch // world_size
        offsets = torch.arange(context + 1)
        while True:
            starts = torch.randint(len(self.training) - context - 1, (batch,), generator=generator)
            yield self.training[starts[rank * share : (rank + 1) * share, None] + offsets]

    def examination(self, count: int, context: int) -> torch.Tensor:
        """The same `count` evenly spaced windows (count, context + 1) of the held-out text, every time."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, count).long()
        return self.held_out[starts[:, None] + torch.arange(context + 1)]


def load() -> Corpus:
    """Read Python's help topics. P4ReduceError when this Python comes without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise P4ReduceError("this Python has no pydoc_data.topics, the text the demo learns") from None
    text = "\n".join(topics[name] for name in sorted(topics))
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    alphabet, numbers = np.unique(points, return_inverse=True)
    numbers_tensor = torch.from_numpy(numbers.astype(np.int64))
    held_out = int(len(numbers_tensor) * HELD_OUT_SHARE)
    return Corpus(len(alphabet), numbers_tensor[:-held_out], numbers_tensor[-held_out:])
