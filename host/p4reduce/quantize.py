# SPDX-License-Identifier: Apache-2.0
"""float32 to lanes and back: block floating point with a common exponent per block (docs/design.md, section 5).

A block's exponent is the largest over all workers, so every worker scales by the same power of two and the sum of
the integers is the sum of the numbers. Scaling by a power of two is exact, wherever the exponents lie; the only
losses are one rounding to an integer per worker and one rounding of the sum to float32. A worker rounds to nearest,
or at random so that the expected value is exact (rounding.py), and may keep what it did not send (error feedback).

The integers travel in offset-binary form, u = q + bias with 0 <= u <= limit, where limit is the largest number of
which `workers` still fit a lane. Whatever the input holds, u keeps to these bounds: a lane never carries into its
neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.errors import ConfigError, UsageError
from p4reduce.rounding import Dice, Stochastic

Float32Array = npt.NDArray[np.float32]
Exponents = npt.NDArray[np.uint8]
"""One biased IEEE 754 exponent per block: 0..254, 255 when the block holds an infinity or a NaN."""
Lanes = npt.NDArray[np.unsignedinteger[Any]]

PIECE = 1 << 16
"""Elements handled at a time: large enough to hide numpy's cost per call, small enough for a core's own cache."""
NOT_FINITE = 255
BLOCKS = {8: 1024, 16: 512, 32: 256, 64: 256}
"""Elements of a block by lane width, unless a bucket says otherwise: exponents cost 1/32 of the data, or less."""
_LANE_TYPES: dict[int, type[np.unsignedinteger[Any]]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_MANTISSA_BITS = 24


@dataclass(frozen=True, slots=True)
class LaneFormat:
    """How numbers of a job stand in their lanes: bits of a lane, workers that add, elements that share an exponent."""

    lane_bits: int
    workers: int
    block: int = 256

    def __post_init__(self) -> None:
        if self.lane_bits not in _LANE_TYPES:
            raise ConfigError(f"lanes have 8, 16, 32 or 64 bits, not {self.lane_bits}")
        if not 1 <= self.workers <= constants.MAX_WORKERS:
            raise ConfigError(f"a switch adds for 1..{constants.MAX_WORKERS} workers, not {self.workers}")
        if self.block < 1:
            raise ConfigError(f"a block has at least one element, not {self.block}")

    @property
    def limit(self) -> int:
        """Largest value a worker may put into a lane: `workers` times this still fits."""
        return ((1 << self.lane_bits) - 1) // self.workers

    @property
    def bias(self) -> int:
        """What stands for zero; integers reach from -bias to +bias."""
        return self.limit // 2

    @property
    def precision(self) -> int:
        """Bits of an integer without its sign: the largest p for which every number of a block scales to +-bias.

        Numbers of a block are below 2^e and have 24 bits, so the largest becomes 2^p - 2^(p-24), exactly. Up to
        p = 24 it may be rounded up to 2^p instead.
        """
        coarse = self.bias.bit_length() - 1
        fine = coarse + 1
        if fine > _MANTISSA_BITS and (1 << fine) - (1 << (fine - _MANTISSA_BITS)) <= self.bias:
            return fine
        return coarse

    @property
    def lane_type(self) -> type[np.unsignedinteger[Any]]:
        """Unsigned numpy type of a lane."""
        return _LANE_TYPES[self.lane_bits]

    def blocks(self, count: int) -> int:
        """Blocks of a bucket of `count` elements."""
        return -(-count // self.block)

    def require_usable(self) -> None:
        """Raise UsageError when so many workers leave an integer no bit besides its sign."""
        if self.precision < 1:
            raise UsageError(
                f"{self.lane_bits}-bit lanes are too narrow for {self.workers} workers: each could send "
                f"{-self.bias}..{self.bias} and nothing between; use lanes of {2 * self.lane_bits} bits or more"
            )


def block_exponents(x: Float32Array, block: int = 256) -> Exponents:
    """Exponent of every block of `x` (1-D, C-contiguous): the exponent field of its largest magnitude.

    Returns uint8, shape (ceil(len(x) / block),). The last block may be shorter. Raises UsageError for another dtype
    or shape.
    """
    bits = _vector(x, "x").view(np.uint32)
    exponents = np.zeros(-(-len(bits) // block), dtype=np.uint8)
    step = max(PIECE // block, 1) * block
    scratch = np.empty(min(step, len(bits)), dtype=np.uint32)
    for start in range(0, len(bits), step):
        piece = bits[start : start + step]
        magnitude = np.bitwise_and(piece, _MAGNITUDE, out=scratch[: len(piece)])
        first, whole = start // block, len(piece) // block
        largest = magnitude[: whole * block].reshape(whole, block).max(axis=1)
        exponents[first : first + whole] = largest >> 23
        if whole * block < len(piece):
            exponents[first + whole] = int(magnitude[whole * block :].max()) >> 23
    return exponents


def quantize(
    x: Float32Array,
    exponents: Exponents,
    fmt: LaneFormat,
    out: Lanes,
    *,
    stream: Stochastic | None = None,
    residual: Float32Array | None = None,
) -> None:
    """Write u = q + bias for every element of `x` into `out`, native byte order; the rest of `out` becomes zero (bias).

    `exponents` are the agreed ones, uint8 of shape (fmt.blocks(len(x)),). A block that is not finite contributes
    zeros. Rounds to nearest, ties to even; with a `stream` at random (rounding.py). `residual`, float32 of the length
    of `x`, gets x less what u stands for, and 0 wherever that is not a finite number. Raises UsageError when dtypes or
    lengths do not fit.

    x == sent + residual exactly, but for one case: where a stochastic rounding has gone away from zero, to one
    quantum, from less than half of it, the residual is rounded to float32, so off by at most 2^-25 quanta.
    """
    Quantizer(fmt, max(min(len(x), PIECE), 1)).quantize(x, exponents, out, stream=stream, residual=residual)


def dequantize(sums: Lanes, exponents: Exponents, fmt: LaneFormat, out: Float32Array, mean: bool) -> None:
    """Turn the first len(out) sums of `fmt.workers` contributions back into float32.

    The sum is rounded to float32 once, overflows to infinity as a float32 would, and is divided by the number of
    workers afterwards when `mean` is set. Blocks that are not finite become NaN. Raises UsageError when dtypes or
    lengths do not fit.
    """
    Quantizer(fmt).dequantize(sums, exponents, out, mean)


class Quantizer:
    """quantize() and dequantize() with kept scratch memory and for ranges that start inside a block. One thread."""

    def __init__(self, fmt: LaneFormat, largest: int = PIECE) -> None:
        """`largest`: elements of the longest range to come, when that is less than a piece."""
        self.fmt = fmt
        self._up, self._down = _scales(fmt.precision)
        self._integer: type[np.signedinteger[Any]] = np.int64 if fmt.lane_bits == 64 else np.int32
        self._unsigned: type[np.unsignedinteger[Any]] = np.uint64 if fmt.lane_bits == 64 else np.uint32
        self._bias = self._unsigned(fmt.bias)
        self._largest = self._unsigned(2 * fmt.bias)
        # Sums are unsigned numbers of up to lane_bits bits; the difference to this is a signed one.
        self._zero = self._unsigned(fmt.workers * fmt.bias)
        self._scaled = np.empty(min(largest, PIECE), dtype=np.float32)
        self._wide = np.empty(min(largest, PIECE), dtype=self._unsigned)
        # For stochastic rounding and residuals, when they are wanted for the first time.
        self._dice: Dice | None = None
        self._whole = self._random = np.empty(0, dtype=np.float32)
        self._sent = np.empty(0, dtype=self._unsigned)

    def quantize(
        self,
        x: Float32Array,
        exponents: Exponents,
        out: Lanes,
        offset: int = 0,
        *,
        stream: Stochastic | None = None,
        residual: Float32Array | None = None,
    ) -> None:
        """As quantize(), for the elements `offset` .. offset + len(x) - 1 of the bucket that `exponents` describe.

        `residual` is as long as `x`.
        """
        _vector(x, "x")
        self._require(exponents, out, len(x), offset)
        if residual is not None and len(_vector(residual, "residual")) != len(x):
            raise UsageError(f"the residual of {len(x)} elements has as many, not {len(residual)}")
        with np.errstate(all="ignore"):
            for start in range(0, len(x), len(self._scaled)):
                piece = x[start : start + len(self._scaled)]
                stop = start + len(piece)
                wide = self._quantize_piece(piece, exponents, out[start:stop], offset + start, stream)
                if residual is not None:
                    self._leave(piece, wide, exponents, offset + start, residual[start:stop])
        out[len(x) :] = self.fmt.bias

    def dequantize(self, sums: Lanes, exponents: Exponents, out: Float32Array, mean: bool, offset: int = 0) -> None:
        """As dequantize(), for the elements `offset` .. offset + len(out) - 1 of the bucket."""
        _vector(out, "out")
        self._require(exponents, sums, len(out), offset)
        with np.errstate(all="ignore"):
            for start in range(0, len(out), len(self._scaled)):
                piece = out[start : start + len(self._scaled)]
                # Unsigned arithmetic wraps, which leaves the difference in two's complement.
                wide = self._wide[: len(piece)]
                np.subtract(sums[start : start + len(piece)], self._zero, out=wide, dtype=self._unsigned)
                np.copyto(piece, wide.view(self._integer), casting="unsafe")
                self._scale(piece, self._down, exponents, offset + start, piece)
                if mean:
                    np.divide(piece, np.float32(self.fmt.workers), out=piece)

    def _quantize_piece(
        self, x: Float32Array, exponents: Exponents, out: Lanes, offset: int, stream: Stochastic | None
    ) -> Lanes:
        """Returns u in a type that is wide enough to compute with."""
        scaled = self._scaled[: len(x)]
        self._scale(x, self._up, exponents, offset, scaled)
        self._clear_not_finite(scaled, exponents, offset)
        if stream is None:
            np.rint(scaled, out=scaled)
        else:
            self._round_at_random(scaled, stream, offset)
        narrow = out.dtype != self._unsigned
        wide = self._wide[: len(x)] if narrow else out
        np.copyto(wide.view(self._integer), scaled, casting="unsafe")
        np.add(wide, self._bias, out=wide)
        # Data that changed since its exponents were agreed may not fit; it must not spoil the neighbouring lane.
        np.clip(wide, self._unsigned(0), self._largest, out=wide)
        if narrow:
            np.copyto(out, wide, casting="unsafe")
        return wide

    def _round_at_random(self, scaled: Float32Array, stream: Stochastic, offset: int) -> None:
        if self._dice is None:
            size = len(self._scaled)
            self._dice = Dice(size)
            self._whole, self._random = np.empty(size, dtype=np.float32), np.empty(size, dtype=np.float32)
        whole, random = self._whole[: len(scaled)], self._random[: len(scaled)]
        self._dice.draw(stream, offset, random)
        np.floor(scaled, out=whole)
        np.subtract(scaled, whole, out=scaled)
        # 1 where random < distance, else 0: a difference of floats has the right sign, however it is rounded.
        np.subtract(scaled, random, out=scaled)
        np.ceil(scaled, out=scaled)
        np.add(whole, scaled, out=scaled)

    def _leave(self, x: Float32Array, wide: Lanes, exponents: Exponents, offset: int, residual: Float32Array) -> None:
        """residual = x - (what the integers `wide` stand for)."""
        if not len(self._sent):
            self._sent = np.empty(len(self._scaled), dtype=self._unsigned)
        sent = self._sent[: len(x)]
        np.subtract(wide, self._bias, out=sent)
        np.copyto(residual, sent.view(self._integer), casting="unsafe")
        self._scale(residual, self._down, exponents, offset, residual)
        np.subtract(x, residual, out=residual)
        finite = np.isfinite(residual)
        if not finite.all():
            self._leave_odd(x, sent.view(self._integer), exponents, offset, residual, np.flatnonzero(~finite))

    def _leave_odd(
        self,
        x: Float32Array,
        sent: npt.NDArray[np.signedinteger[Any]],
        exponents: Exponents,
        offset: int,
        residual: Float32Array,
        where: npt.NDArray[np.int64],
    ) -> None:
        """Residuals of what is not finite, and of what was rounded to 2^128, which only float64 holds."""
        levels = exponents[(offset + where) // self.fmt.block].astype(np.int32)
        scale = np.ldexp(1.0, np.maximum(levels, 1) - 126 - self.fmt.precision)
        left = x[where].astype(np.float64) - sent[where] * scale
        left[(levels == NOT_FINITE) | ~np.isfinite(left)] = 0.0
        residual[where] = left

    def _scale(
        self, source: Float32Array, table: _ScaleTable, exponents: Exponents, offset: int, out: Float32Array
    ) -> None:
        """out = source * scale of each element's block."""
        for part, levels in _spans(len(source), offset, exponents, self.fmt.block):
            target = out[part].reshape(len(levels), -1)
            np.multiply(source[part].reshape(len(levels), -1), table.first[levels][:, np.newaxis], out=target)
            if table.two_steps[levels].any():
                np.multiply(target, table.second[levels][:, np.newaxis], out=target)

    def _clear_not_finite(self, scaled: Float32Array, exponents: Exponents, offset: int) -> None:
        for part, levels in _spans(len(scaled), offset, exponents, self.fmt.block):
            bad = levels == NOT_FINITE
            if bad.any():
                scaled[part].reshape(len(levels), -1)[bad] = 0.0

    def _require(self, exponents: Exponents, lanes: Lanes, count: int, offset: int) -> None:
        if lanes.dtype != self.fmt.lane_type or lanes.ndim != 1 or len(lanes) < count:
            raise UsageError(
                f"{count} elements need a vector of as many {np.dtype(self.fmt.lane_type).name} lanes, "
                f"not {lanes.dtype} of shape {lanes.shape}"
            )
        needed = self.fmt.blocks(offset + count)
        if exponents.dtype != np.uint8 or exponents.ndim != 1 or len(exponents) < needed:
            raise UsageError(f"{needed} uint8 block exponents needed, not {exponents.dtype} of shape {exponents.shape}")


@dataclass(frozen=True, slots=True)
class _ScaleTable:
    """Powers of two for every exponent field as the product of two float32, because one has not the range."""

    first: Float32Array
    second: Float32Array
    two_steps: npt.NDArray[np.bool_]


@functools.cache
def _scales(precision: int) -> tuple[_ScaleTable, _ScaleTable]:
    """Scales of quantization, 2^(p-e), and back, 2^(e-p).

    Both steps are exact where it matters. Up, nothing overflows, because |x| < 2^e, and whatever the first step lifts
    out of the subnormal range stays out; going down to integers, only what rounds to zero anyway loses bits. Back,
    the integers start at 1, so the first step stays normal. The result is then representable, too: every number is a
    multiple of 2^-149, so where 2^(e-p) is smaller, every q, and with it the sum, is a multiple of the difference.
    """
    level = np.arange(256)
    power = precision - (np.maximum(level, 1) - 126)
    up, down = _split(power), _split(-power)
    # Infinity times zero would be NaN: such blocks are overwritten after scaling, and come back as NaN.
    up.first[NOT_FINITE] = 0.0
    down.first[NOT_FINITE] = np.nan
    for table in (up, down):
        table.second[NOT_FINITE] = 1.0
        table.two_steps[NOT_FINITE] = False
    return up, down


def _split(power: npt.NDArray[np.int64]) -> _ScaleTable:
    first = np.clip(power, -126, 127)
    second = power - first
    one = np.ones(len(power), dtype=np.float32)
    return _ScaleTable(np.ldexp(one, first), np.ldexp(one, second), second != 0)


def _spans(count: int, offset: int, exponents: Exponents, block: int) -> Iterator[tuple[slice, Exponents]]:
    """Cut elements `offset` .. offset + count - 1 of a bucket into at most three runs of blocks of one length.

    Yields (slice of the count elements, exponents of its blocks): a block begun before, whole blocks, a block's start.
    """
    start = 0
    while start < count:
        inside = (offset + start) % block
        whole = (count - start) // block if inside == 0 else 0
        stop = start + (whole * block if whole else min(block - inside, count - start))
        first = (offset + start) // block
        yield slice(start, stop), exponents[first : first + max(whole, 1)]
        start = stop


def _vector(x: Float32Array, name: str) -> Float32Array:
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise UsageError(f"{name} must be a contiguous float32 vector, not {x.dtype} of shape {x.shape}")
    return x
