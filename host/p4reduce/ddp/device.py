# SPDX-License-Identifier: Apache-2.0
"""Quantization with torch operations, for gradients on a device: the integers of `p4reduce.quantize`, bit by bit.

Every operation here is exact or rounds as IEEE 754 says, so a device that keeps to that and to subnormal numbers (CUDA
does, unless told to flush them) gives the bits that numpy gives on a host. Lanes are unsigned and torch computes with
signed integers: a lane's bits are the same in both.

A communicator takes float32 today, so buckets of a device travel as such to the host (`p4reduce.ddp.staging`); with
lanes of 8 bits these operations would make a quarter of that of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from p4reduce.quantize import NOT_FINITE, LaneFormat, _scales
from p4reduce.rounding import Stochastic
from p4reduce.splitmix import GAMMA, LAST_SHIFT, STEPS

_LANES: Final = {32: torch.int32, 16: torch.int16, 8: torch.int8}
_UNIT: Final = 2.0**-24


class DeviceQuantizer:
    """As `p4reduce.quantize.Quantizer`, for whole buckets on one device."""

    def __init__(self, fmt: LaneFormat, device: torch.device | str = "cpu") -> None:
        """KeyError for lanes that torch has no integers for (64 bits, which no float needs)."""
        self.fmt = fmt
        self._lane = _LANES[fmt.lane_bits]
        up, down = _scales(fmt.precision)
        self._up = [torch.from_numpy(table).to(device) for table in (up.first, up.second)]
        self._down = [torch.from_numpy(table).to(device) for table in (down.first, down.second)]
        # A table, since a device's pow() need not be exact, not even for powers of two.
        quanta = np.ldexp(1.0, np.maximum(np.arange(256), 1) - 126 - fmt.precision)
        self._quantum = torch.from_numpy(quanta).to(device)
        # On the device, since CUDA divides by a number of the host's by multiplying with its reciprocal.
        self._workers = torch.tensor(float(fmt.workers), dtype=torch.float32).to(device)

    def exponents(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's exponent of every block of a float32 vector: uint8, shape (blocks,)."""
        magnitude = x.view(torch.int32) & 0x7FFFFFFF
        missing = self.fmt.blocks(x.numel()) * self.fmt.block - x.numel()
        blocks = torch.nn.functional.pad(magnitude, (0, missing)).view(-1, self.fmt.block)
        if not len(blocks):
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        return (blocks.amax(dim=1) >> 23).to(torch.uint8)

    def quantize(
        self,
        x: torch.Tensor,
        exponents: torch.Tensor,
        stream: Stochastic | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """u = q + bias for every element of a float32 vector, as signed integers of a lane's size with the bits of u.

        `exponents`: the agreed ones, uint8. `stream`: stochastic rounding. `residual`: float32, gets x less what the
        integers stand for, 0 where that is not finite.
        """
        levels = self._levels(exponents, x.numel())
        scaled = x * self._up[0][levels] * self._up[1][levels]
        scaled = torch.where(levels == NOT_FINITE, 0.0, scaled)
        if stream is None:
            scaled = scaled.round()
        else:
            whole = scaled.floor()
            scaled = whole + (scaled - whole - self._random(stream, x)).ceil()
        wide = (scaled.to(torch.int64) + self.fmt.bias).clamp_(0, 2 * self.fmt.bias)
        if residual is not None:
            residual.copy_(self._left(x, wide - self.fmt.bias, levels))
        return wide.to(self._lane)

    def dequantize(self, sums: torch.Tensor, exponents: torch.Tensor, mean: bool) -> torch.Tensor:
        """float32 from the sums of `fmt.workers` contributions; `sums` as quantize() returns them."""
        levels = self._levels(exponents, sums.numel())
        unsigned = sums.to(torch.int64) & ((1 << self.fmt.lane_bits) - 1)
        out = (unsigned - self.fmt.workers * self.fmt.bias).to(torch.float32)
        out = out * self._down[0][levels] * self._down[1][levels]
        return out / self._workers if mean else out

    def _levels(self, exponents: torch.Tensor, count: int) -> torch.Tensor:
        """The exponent of each element's block."""
        return exponents.to(torch.int64).repeat_interleave(self.fmt.block)[:count]

    def _left(self, x: torch.Tensor, sent: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        near = x - sent.to(torch.float32) * self._down[0][levels] * self._down[1][levels]
        # What was rounded to 2^128 is beyond float32, not beyond float64.
        far = x.double() - sent.double() * self._quantum[levels]
        far = torch.where((levels == NOT_FINITE) | ~far.isfinite(), 0.0, far)
        return torch.where(near.isfinite(), near, far.to(torch.float32))

    def _random(self, stream: Stochastic, x: torch.Tensor) -> torch.Tensor:
        """u of every element, in [0, 1): see `p4reduce.rounding`."""
        words = torch.arange(1, x.numel() // 2 + 2, dtype=torch.int64, device=x.device)
        z = words * _signed(GAMMA) + _signed(stream.key)
        for shift, factor in STEPS:
            z = (z ^ _shifted(z, shift)) * _signed(factor)
        z = z ^ _shifted(z, LAST_SHIFT)
        halves = torch.stack((_shifted(z, 8) & 0xFFFFFF, _shifted(z, 40)), dim=1)
        return halves.flatten()[: x.numel()].to(torch.float32) * _UNIT


def _shifted(z: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift to the right as an unsigned number."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a signed number."""
    return value - (1 << 64) if value >> 63 else value
