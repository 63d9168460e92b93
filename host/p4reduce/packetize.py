# SPDX-License-Identifier: Apache-2.0
"""Buckets to payloads and back, whole arrays at a time (docs/design.md, section 3).

A word of 256 bytes is 32 groups of 64 bits, big-endian. Lanes are numbered from the least significant bits of each
group, so on a little-endian host lanes of every width become a payload by swapping the bytes of 64-bit integers.

Payloads of ADD frames are covered by a check that is linear: the sum of every group times a fixed odd weight, modulo
2^64. Lanes never carry, so the switch adds groups, and the checks of all contributions add up to the check of the
sum. An odd weight has an inverse, so a change of any single group changes the check.
"""

from __future__ import annotations

import functools
import sys

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.errors import ConfigError, UsageError
from p4reduce.quantize import PIECE, Exponents, Float32Array, LaneFormat, Lanes, Quantizer
from p4reduce.rounding import Stochastic
from p4reduce.splitmix import mix as mix
from p4reduce.splitmix import splitmix64 as splitmix64
from p4reduce.wire import IP_UDP_BYTES, MAX_BUCKET, Profile

Rows = npt.NDArray[np.uint8]
"""Payloads as they stand on the wire: one row of payload bytes per chunk."""
Groups = npt.NDArray[np.uint64]
"""64-bit groups in the host's byte order."""

WEIGHT_SEED = int.from_bytes(b"p4reduce", "big")
GROUP_BYTES = 8
GROUPS_PER_WORD = constants.WORD_BYTES // GROUP_BYTES
FIELD_BYTES = 32
"""A thermometer: 256 bits, of which the lowest v are set."""


@functools.cache
def weights(count: int) -> Groups:
    """Weights of the first `count` groups of a payload, uint64, all odd; read-only."""
    values: Groups = splitmix64(WEIGHT_SEED, count) | np.uint64(1)
    values.flags.writeable = False
    return values


def check(groups: Groups, out: Groups | None = None) -> Groups:
    """Linear check of every row: uint64 of shape (k,) for native groups of shape (k, groups)."""
    # einsum: its inner loop is vectorised for integers, unlike that of dot and matmul.
    result: Groups = np.einsum("ij,j->i", groups, weights(groups.shape[1]), out=out)
    return result


def to_wire(groups: Groups, rows: Rows) -> None:
    """Write native groups of shape (k, g) into rows of shape (k, 8 g) as big-endian bytes."""
    np.copyto(rows.view(">u8"), groups)


def from_wire(rows: Rows, out: Groups | None = None) -> Groups:
    """Native groups of shape (k, g) from payload rows of shape (k, 8 g)."""
    if out is None:
        out = np.empty((rows.shape[0], rows.shape[1] // GROUP_BYTES), dtype=np.uint64)
    np.copyto(out, rows.view(">u8"))
    return out


@functools.cache
def _thermometer_table() -> tuple[Groups, npt.NDArray[np.int64]]:
    """Thermometers of 0..255 as native groups of shape (256, 4), and the number of bits set in every byte value."""
    values = [((1 << level) - 1) >> (64 * i) & (2**64 - 1) for level in range(256) for i in range(4)]
    bits = np.array([bin(value).count("1") for value in range(256)], dtype=np.int64)
    return np.array(values, dtype=np.uint64).reshape(256, 4), bits


def thermometers(exponents: Exponents) -> Groups:
    """Thermometer of every level as native groups of shape (m, 4), the lowest 64 bits first."""
    table: Groups = _thermometer_table()[0][exponents]
    return table


def from_thermometers(fields: Groups) -> tuple[Exponents, npt.NDArray[np.bool_]]:
    """Levels of thermometers (m, 4), and which of them are thermometers at all: uint8 and bool of shape (m,)."""
    table, bits = _thermometer_table()
    fields = np.ascontiguousarray(fields, dtype=np.uint64)
    level = bits[fields.view(np.uint8)].reshape(len(fields), FIELD_BYTES).sum(axis=1)
    # All 256 bits set wrap to level 0, which they are not.
    levels = level.astype(np.uint8)
    return levels, (table[levels] == fields).all(axis=1)


class ChunkCodec:
    """How buckets of `count` elements are cut into chunks, whatever the elements are.

    Nothing is kept from call to call but scratch memory: one codec serves every bucket of its size, in any order,
    on one thread. The last chunk of a stream is short, one word, when its content fits; whatever a row holds behind
    its size is neither sent nor read. A bucket without elements has one OR chunk (nothing set) and no ADD chunk.
    """

    def __init__(self, profile: Profile, fmt: LaneFormat, count: int, blocks: int) -> None:
        """`blocks`: exponents that the OR chunks carry. UsageError for more chunks than a tag can number."""
        if sys.byteorder != "little":
            raise ConfigError("p4reduce needs a little-endian host: lanes are packed by swapping bytes")
        if count < 0:
            raise UsageError(f"a bucket cannot have {count} elements")
        self.profile = profile
        self.fmt = fmt
        self.count = count
        self.blocks = blocks
        self.lanes = profile.lanes(fmt.lane_bits)
        """Elements of a full frame."""
        self.payload_bytes = profile.payload_bytes
        self.groups = self.payload_bytes // GROUP_BYTES
        self._or_sizes = _chunk_sizes(profile, self.blocks * FIELD_BYTES, least=1)
        self._add_sizes = _chunk_sizes(profile, count * fmt.lane_bits // 8, least=0)
        self.or_chunks = len(self._or_sizes)
        self.add_chunks = len(self._add_sizes)
        self._short = self.add_chunks > 0 and int(self._add_sizes[-1]) < self.payload_bytes
        self._step = max(PIECE // self.lanes, 1)
        self._native = np.empty((min(self._step, max(self.add_chunks, 1)), self.groups), dtype=np.uint64)

    def or_sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of every OR chunk, int64 of shape (or_chunks,); read-only."""
        return self._or_sizes

    def add_sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of every ADD chunk, int64 of shape (add_chunks,); read-only."""
        return self._add_sizes

    def native_lanes(self, rows: Rows, chunks: int, lanes: Lanes) -> int:
        """Undo the packing of the first `chunks` rows that encode() has filled; returns how many elements these are.

        `lanes`: native, of shape (count,); what follows the elements is left alone. Uses no scratch memory.
        """
        self._require_rows(rows[:chunks], chunks)
        if lanes.dtype != self.fmt.lane_type or lanes.shape != (self.count,) or not lanes.flags.c_contiguous:
            raise UsageError(f"{self.count} contiguous {np.dtype(self.fmt.lane_type).name} lanes needed")
        full = min(chunks, self.count // self.lanes)
        begin, end = full * self.lanes, min(chunks * self.lanes, self.count)
        from_wire(rows[:full], out=lanes[:begin].view(np.uint64).reshape(full, self.groups))
        if begin < end:
            last = from_wire(rows[full : full + 1])
            lanes[begin:end] = last.reshape(-1).view(self.fmt.lane_type)[: end - begin]
        return end

    def verify_and_store(
        self, payload: Rows, checks: Groups, chunk: npt.NDArray[np.int64], sums: Groups
    ) -> npt.NDArray[np.bool_]:
        """Check results and put the sound ones into sums[chunk]; returns which these are, bool of shape (k,).

        `payload`: uint8 of shape (k, payload_bytes); `checks`: the checks that came with them, uint64 of shape (k,),
        any byte order; `chunk`: which chunk each is; `sums`: uint64 of shape (add_chunks, groups), native.
        """
        self._require_rows(payload, len(chunk))
        sound = np.zeros(len(chunk), dtype=np.bool_)
        for start in range(0, len(chunk), self._step):
            stop = min(start + self._step, len(chunk))
            self._verify_piece(payload[start:stop], checks[start:stop], chunk[start:stop], sums, sound[start:stop])
        return sound

    def _verify_piece(
        self,
        payload: Rows,
        checks: Groups,
        chunk: npt.NDArray[np.int64],
        sums: Groups,
        sound: npt.NDArray[np.bool_],
    ) -> None:
        # More results than chunks can come at once, when some are repeated.
        if len(chunk) > len(self._native):
            self._native = np.empty((len(chunk), self.groups), dtype=np.uint64)
        native = from_wire(payload, out=self._native[: len(chunk)])
        np.equal(check(native), checks, out=sound)
        if self._short:
            # What follows the one word of a short frame was left there by another frame.
            for row in np.flatnonzero(chunk == self.add_chunks - 1):
                word = native[row : row + 1, :GROUPS_PER_WORD]
                sound[row] = check(word)[0] == checks[row]
                native[row, GROUPS_PER_WORD:] = 0
        if sound.all():
            sums[chunk] = native
        else:
            sums[chunk[sound]] = native[sound]

    def _pack(self, native: Groups, start: int, stop: int, rows: Rows, checks: Groups) -> None:
        """Rows and checks of chunks `start` .. `stop` - 1 from their groups."""
        to_wire(native, rows[start:stop])
        check(native, out=checks[start:stop])
        if self._short and stop == self.add_chunks:
            checks[stop - 1] = check(native[-1:, :GROUPS_PER_WORD])[0]

    def _pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        if not 0 <= first <= last <= self.add_chunks:
            raise UsageError(f"chunks {first} to {last} asked for, the bucket has {self.add_chunks}")
        return [(start, min(start + self._step, last)) for start in range(first, last, self._step)]

    def _require_rows(self, rows: Rows, count: int) -> None:
        if rows.dtype != np.uint8 or rows.shape != (count, self.payload_bytes):
            raise UsageError(
                f"uint8 rows of shape {(count, self.payload_bytes)} needed, not {rows.dtype} of shape {rows.shape}"
            )


class BucketCodec(ChunkCodec):
    """Turns buckets of `count` float32 into payload rows and back."""

    def __init__(self, profile: Profile, fmt: LaneFormat, count: int) -> None:
        """`count`: elements. Raises UsageError when the bucket has more chunks than a tag can number."""
        super().__init__(profile, fmt, count, fmt.blocks(max(count, 0)))
        self._quantizer = Quantizer(fmt, largest=min(count, len(self._native) * self.lanes) or 1)

    def encode_exponents(self, local: Exponents) -> Rows:
        """Payloads of all OR chunks for this worker's block exponents: uint8 of shape (or_chunks, payload_bytes)."""
        self._require_exponents(local)
        rows = np.zeros((self.or_chunks, self.payload_bytes), dtype=np.uint8)
        fields = rows.reshape(-1)[: self.blocks * FIELD_BYTES].reshape(self.blocks, FIELD_BYTES)
        to_wire(thermometers(local), fields)
        return rows

    def decode_exponents(self, rows: Rows, local: Exponents | None = None) -> Exponents:
        """Agreed block exponents from the results of all OR chunks, uint8 of shape (blocks,).

        Raises ValueError when a field is no thermometer, when one beyond the last block is not empty, or when an
        exponent is below this worker's own (`local`, if given): OR frames carry no check, so their form is all that
        shows damage.
        """
        used = (self.or_chunks - 1) * self.payload_bytes + int(self._or_sizes[-1])
        fields = from_wire(np.ascontiguousarray(rows).reshape(-1)[:used].reshape(-1, FIELD_BYTES))
        levels, valid = from_thermometers(fields)
        if not valid.all():
            raise ValueError(f"exponent of block {int(np.argmin(valid))} is damaged: not a thermometer")
        levels, rest = levels[: self.blocks], levels[self.blocks :]
        if rest.any():
            raise ValueError("exponents are damaged: one is set for a block that does not exist")
        if local is not None and (levels < local).any():
            block = int(np.argmax(levels < local))
            raise ValueError(f"exponent of block {block} is damaged: {levels[block]}, this worker's is {local[block]}")
        return levels

    def encode(
        self,
        x: Float32Array,
        exponents: Exponents,
        first: int,
        last: int,
        rows: Rows,
        checks: Groups,
        *,
        stream: Stochastic | None = None,
        residual: Float32Array | None = None,
    ) -> None:
        """Fill rows[first:last] and checks[first:last] with this worker's contribution, chunks `first` .. `last` - 1.

        `x`: the whole bucket, float32 of shape (count,); `exponents`: the agreed ones of all its blocks;
        `rows`: uint8 of shape (add_chunks, payload_bytes); `checks`: uint64 of shape (add_chunks,), native;
        `stream`, `residual` (the whole bucket's, too): see quantize().
        """
        self._require_exponents(exponents)
        self._require_rows(rows, self.add_chunks)
        if len(x) != self.count or (residual is not None and len(residual) != self.count):
            raise UsageError(f"this codec is for {self.count} elements, not {len(x)}")
        for start, stop in self._pieces(first, last):
            native = self._native[: stop - start]
            begin, end = start * self.lanes, stop * self.lanes
            left = residual[begin:end] if residual is not None else None
            lanes = native.reshape(-1).view(self.fmt.lane_type)
            self._quantizer.quantize(x[begin:end], exponents, lanes, begin, stream=stream, residual=left)
            self._pack(native, start, stop, rows, checks)

    def decode(
        self,
        sums: Groups,
        exponents: Exponents,
        out: Float32Array,
        mean: bool,
        first_chunk: int = 0,
        last_chunk: int | None = None,
    ) -> None:
        """Turn the sums of chunks `first_chunk` .. `last_chunk` - 1 (default: all) into their elements of `out`.

        `sums`: uint64 of shape (add_chunks, groups), C-contiguous; `out`: the whole bucket, float32 of shape (count,).
        """
        self._require_exponents(exponents)
        if len(out) != self.count or sums.shape != (self.add_chunks, self.groups) or not sums.flags.c_contiguous:
            raise UsageError(f"this codec is for {self.count} elements, sums of {(self.add_chunks, self.groups)}")
        begin = first_chunk * self.lanes
        end = self.count if last_chunk is None else min(last_chunk * self.lanes, self.count)
        if begin < end:
            lanes = sums.reshape(-1).view(self.fmt.lane_type)[begin:end]
            self._quantizer.dequantize(lanes, exponents, out[begin:end], mean, begin)

    def _require_exponents(self, exponents: Exponents) -> None:
        if exponents.dtype != np.uint8 or exponents.shape != (self.blocks,):
            raise UsageError(f"{self.blocks} uint8 block exponents needed, not {exponents.dtype} of {exponents.shape}")


def wire_bytes(codec: ChunkCodec) -> int:
    """Bytes that a worker sends for a bucket, and gets, when nothing is lost: IPv4, UDP and frame headers included."""
    frames = codec.or_chunks + codec.add_chunks
    payload = int(codec.or_sizes().sum()) + int(codec.add_sizes().sum())
    return payload + frames * (constants.HEADER_BYTES + IP_UDP_BYTES)


def _chunk_sizes(profile: Profile, content: int, least: int) -> npt.NDArray[np.int64]:
    """Payload bytes of every chunk of a stream that carries `content` bytes: all full, the last one word if it fits."""
    chunks = max(-(-content // profile.payload_bytes), least)
    if chunks > MAX_BUCKET:
        raise UsageError(f"a bucket of this size needs {chunks} frames, a tag can number {MAX_BUCKET}")
    sizes = np.full(chunks, profile.payload_bytes, dtype=np.int64)
    if chunks and content - (chunks - 1) * profile.payload_bytes <= constants.WORD_BYTES:
        sizes[-1] = constants.WORD_BYTES
    sizes.flags.writeable = False
    return sizes
