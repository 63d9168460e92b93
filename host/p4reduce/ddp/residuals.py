# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what rounding took from each parameter's gradient, to be added to the next one.

A residual belongs to a parameter, not to a bucket: DDP builds its buckets anew after the first backward pass. What a
bucket needs is one flat tensor in the order of its buffer; the residuals of its parameters are pieces of that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from p4reduce.errors import UsageError

logger = logging.getLogger("p4reduce.ddp")


class Residuals:
    """The residuals of one rank, float32 in CPU memory, four bytes a parameter. Used in the thread of the hook alone.

    Between the hook and the completion of its bucket a flat tensor belongs to the job, which writes it.
    """

    def __init__(self) -> None:
        self._order: dict[int, int] = {}
        """Number of each parameter, by id(): in the order in which they were first seen, the same in every run."""
        self._parameters: list[torch.Tensor] = []
        self._pieces: dict[int, torch.Tensor] = {}
        """By number."""
        self._flats: dict[tuple[int, ...], torch.Tensor] = {}
        self._loaded: dict[int, torch.Tensor] = {}
        """Of parameters that have not been seen since load()."""

    def note(self, bucket: GradBucket) -> tuple[int, ...]:
        """The numbers of the bucket's parameters; new ones get theirs."""
        numbers = []
        for parameter in bucket.parameters():
            number = self._order.get(id(parameter))
            if number is None:
                number = self._order[id(parameter)] = len(self._parameters)
                # Kept, since an id is worth nothing once its object is gone.
                self._parameters.append(parameter)
            numbers.append(number)
        return tuple(numbers)

    def of(self, numbers: tuple[int, ...], count: int) -> torch.Tensor | None:
        """The residual of a bucket of `count` elements with these parameters; zeros where there was none.

        None when the buffer holds something else than its parameters' gradients.
        """
        flat = self._flats.get(numbers)
        if flat is None:
            sizes = [_elements(self._parameters[number]) for number in numbers]
            if sum(sizes) != count:
                return None
            flat = self._build(numbers, sizes)
        return flat

    def _build(self, numbers: tuple[int, ...], sizes: Sequence[int]) -> torch.Tensor:
        flat = torch.zeros(sum(sizes))
        pieces = dict(zip(numbers, torch.split(flat, list(sizes)), strict=True))
        for number, piece in pieces.items():
            old = self._pieces.get(number)
            if old is None:
                old = self._loaded.pop(number, None)
            if old is not None:
                if old.numel() != piece.numel():
                    raise UsageError(f"the residual of parameter {number} has {old.numel()} elements, not {len(piece)}")
                piece.copy_(old)
        self._pieces.update(pieces)
        moved = set(numbers)
        self._flats = {key: kept for key, kept in self._flats.items() if not moved.intersection(key)}
        self._flats[numbers] = flat
        return flat

    def save(self) -> list[torch.Tensor]:
        """Copies, in the order of the parameters; empty for a parameter without."""
        count = max([len(self._parameters), *(number + 1 for number in self._loaded)])
        kept = [self._pieces.get(number, self._loaded.get(number)) for number in range(count)]
        return [torch.empty(0) if piece is None else piece.clone() for piece in kept]

    def load(self, saved: Sequence[torch.Tensor]) -> None:
        """Replace all residuals. UsageError when one does not fit its parameter; nothing is changed then."""
        found = {number: piece.to("cpu", torch.float32) for number, piece in enumerate(saved) if piece.numel()}
        for number, piece in found.items():
            if number < len(self._parameters) and _elements(self._parameters[number]) != piece.numel():
                raise UsageError(
                    f"the residual saved for parameter {number} has {piece.numel()} elements and the parameter "
                    f"{_elements(self._parameters[number])}: it was saved for another model"
                )
        for piece in self._pieces.values():
            piece.zero_()
        for number in list(found):
            if number in self._pieces:
                self._pieces[number].copy_(found.pop(number))
        self._loaded = {number: piece.clone() for number, piece in found.items()}

    def norm(self) -> float:
        """Euclidean norm of all residuals together."""
        return float(sum(float(flat.square().sum()) for flat in self._flats.values()) ** 0.5)


def restore(residuals: Residuals, state: dict[str, Any], rank: int, world_size: int) -> None:
    """Load what `state` holds if it is this rank's own; otherwise begin with none, and say so."""
    if (state["rank"], state["world_size"]) == (rank, world_size):
        residuals.load(state["residuals"])
        return
    residuals.load([])
    if any(piece.numel() for piece in state["residuals"]):
        logger.warning(
            "the residuals are those of rank %d of %d, and this is rank %d of %d: it begins without. Every rank saves "
            "and loads a state of its own",
            state["rank"], state["world_size"], rank, world_size,
        )  # fmt: skip


def _elements(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)
