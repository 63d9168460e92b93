# SPDX-License-Identifier: Apache-2.0
"""A bucket's share of a stream: the payloads it sends there, where the results go, and both for the ring path later."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from p4reduce import constants
from p4reduce.core.bucket import Bucket, IntegerReduction, Reduction
from p4reduce.core.buffers import Buffers
from p4reduce.integers import IntegerCodec
from p4reduce.packetize import FIELD_BYTES, BucketCodec, ChunkCodec, Groups, Rows, from_thermometers, from_wire
from p4reduce.quantize import Exponents, Lanes, block_exponents
from p4reduce.rounding import Stochastic
from p4reduce.wire import Op, Profile, pack_tag

Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ENCODE_ELEMENTS = 1 << 16
"""Elements encoded or decoded at a time: enough to hide the cost per call, few enough to stay in a core's cache."""


class Part(Protocol):
    """What a stream knows of a bucket. Chunks are numbered within the bucket, from 0."""

    op: Op
    bucket: Bucket
    chunks: int
    unsent: int
    """Chunks that have never been sent; the stream counts them down."""
    missing: int
    """Chunks without a result; the part counts them down."""
    tag: int
    """Tag of chunk 0; chunk i's has i more in the chunk's bits."""
    end: int
    """Number of the stream's chunk after the last one of this part; the stream sets it."""
    rows: Rows
    sizes: Index
    """Payload bytes of every chunk."""
    checks: Groups
    """This worker's check of every chunk, native byte order."""

    def prepare(self, last: int) -> None:
        """See to it that rows and checks of the chunks up to `last`, included, are there."""

    def store(self, payload: Rows, checks: Groups, index: Index) -> Mask:
        """Take results of the chunks `index`, no chunk twice; returns which of them were sound.

        `checks` are the results' checks less the signatures of all ranks, native byte order.
        """


class _EmptyPart:
    """One OR chunk with nothing set."""

    op = Op.OR

    def __init__(self, bucket: Bucket, profile: Profile, digest: int) -> None:
        self.bucket = bucket
        self.chunks = self.unsent = self.missing = 1
        self.end = 0
        self.tag = pack_tag(bucket.number, 0, digest)
        self.rows: Rows = np.zeros((1, profile.payload_bytes), dtype=np.uint8)
        self.sizes: Index = np.full(1, constants.WORD_BYTES, dtype=np.int64)
        self.checks: Groups = np.zeros(1, dtype=np.uint64)

    def prepare(self, last: int) -> None:
        """Nothing to do."""

    def store(self, payload: Rows, checks: Groups, index: Index) -> Mask:  # noqa: ARG002
        """Sound is a result with nothing set."""
        sound: Mask = np.logical_not(payload[:, : constants.WORD_BYTES].any(axis=1)) & (checks == 0)
        self.missing -= int(np.count_nonzero(sound))
        return sound


class BarrierPart(_EmptyPart):
    """All of a barrier, and of a reduction of no elements."""


class AnnouncePart(_EmptyPart):
    """What goes before the ADD chunks of integers: they have no exponents, but the ranks must want the same."""

    def __init__(self, bucket: IntegerReduction, codec: IntegerCodec, digest: int) -> None:
        super().__init__(bucket, codec.profile, digest)
        self.reduction = bucket
        self.digest = digest
        self.codec = codec


class ExponentPart:
    """OR chunks of a reduction: thermometers of its block exponents.

    OR frames carry no linear check, only the ranks' signatures: every rank was counted once. Sound is a result of
    thermometers only, none for blocks that do not exist and none below this worker's own; for the only worker of a
    job, none above it, either. Damage that this does not find shows in the digest of the ADD frames, which covers
    the agreed exponents.
    """

    op = Op.OR

    def __init__(self, bucket: Reduction, codec: BucketCodec, digest: int) -> None:
        self.bucket: Bucket = bucket
        self.reduction = bucket
        self.digest = digest
        self.codec = codec
        self.chunks = self.unsent = self.missing = codec.or_chunks
        self.end = 0
        self.tag = pack_tag(bucket.number, 0, digest)
        self.sizes: Index = codec.or_sizes()
        self.checks: Groups = np.zeros(self.chunks, dtype=np.uint64)
        self.rows: Rows = np.empty((0, codec.payload_bytes), dtype=np.uint8)
        self._local: Exponents = np.empty(0, dtype=np.uint8)
        self.agreed: Exponents = np.zeros(codec.blocks, dtype=np.uint8)
        """Complete once nothing is missing."""

    @property
    def local(self) -> Exponents | None:
        """This worker's own exponents, None until the first chunk is sent."""
        return self._local if len(self.rows) else None

    def prepare(self, last: int) -> None:  # noqa: ARG002
        """Find the exponents of the whole bucket the first time."""
        if len(self.rows) == 0:
            self._local = block_exponents(self.reduction.data, self.codec.fmt.block)
            self.rows = self.codec.encode_exponents(self._local)

    def store(self, payload: Rows, checks: Groups, index: Index) -> Mask:
        """Decode results of OR chunks into `agreed`."""
        sound = np.zeros(len(index), dtype=np.bool_)
        per_chunk = self.codec.payload_bytes // FIELD_BYTES
        for position, chunk in enumerate(index.tolist()):
            fields = from_wire(payload[position, : self.sizes[chunk]].reshape(-1, FIELD_BYTES))
            levels, valid = from_thermometers(fields)
            begin = chunk * per_chunk
            own = self._local[begin : begin + per_chunk]
            blocks, rest = levels[: len(own)], levels[len(own) :]
            fits = (blocks == own) if self.codec.fmt.workers == 1 else (blocks >= own)
            if checks[position] == 0 and valid.all() and fits.all() and not rest.any():
                self.agreed[begin : begin + len(own)] = blocks
                sound[position] = True
        self.missing -= int(np.count_nonzero(sound))
        return sound


class SumPart:
    """ADD chunks of a reduction: its integers. Memory is taken when the first chunk is sent."""

    op = Op.ADD

    def __init__(self, bucket: Bucket, codec: ChunkCodec, digest: int, pool: Buffers) -> None:
        self.bucket = bucket
        self._chunks = codec
        self._pool = pool
        self.chunks = self.unsent = self.missing = codec.add_chunks
        self.end = 0
        self.tag = pack_tag(bucket.number, 0, digest)
        self.sizes: Index = codec.add_sizes()
        self.checks: Groups = np.empty(self.chunks, dtype=np.uint64)
        self.rows: Rows = np.empty((0, codec.payload_bytes), dtype=np.uint8)
        self._sums: Groups = np.empty((0, codec.groups), dtype=np.uint64)
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._done: Mask = np.zeros(self.chunks, dtype=np.bool_)
        self._piece = max(ENCODE_ELEMENTS // codec.lanes, 1)
        self._encoded = 0
        self._decoded = 0

    def _encode(self, first: int, last: int) -> None:
        """Fill rows and checks of chunks `first` .. `last` - 1."""
        raise NotImplementedError

    def _deliver(self) -> None:
        """Write what the sums allow to `out`; there are new ones."""
        raise NotImplementedError

    def prepare(self, last: int) -> None:
        """Encode piece by piece, up to the one that holds chunk `last`."""
        if not self._memory:
            size = self.chunks * self._chunks.payload_bytes
            self._memory = [self._pool.take(size), self._pool.take(size)]
            self.rows = self._memory[0][:size].reshape(self.chunks, -1)
            self._sums = self._memory[1][:size].view(np.uint64).reshape(self.chunks, -1)
        while self._encoded <= last:
            stop = min(self._encoded + self._piece, self.chunks)
            self._encode(self._encoded, stop)
            self._encoded = stop

    def store(self, payload: Rows, checks: Groups, index: Index) -> Mask:
        """Check results and keep the sound ones; decode what can be.

        `out` may be `data`: every chunk that is done has been encoded, so its elements are needed no more.
        """
        sound = self._chunks.verify_and_store(payload, checks, index, self._sums)
        good = index if np.count_nonzero(sound) == len(index) else index[sound]
        self._done[good] = True
        self.missing -= len(good)
        self._deliver()
        return sound

    @property
    def memory_bytes(self) -> int:
        """Memory held for contributions and sums."""
        return sum(buffer.size for buffer in self._memory)

    @property
    def written_over(self) -> bool:
        """Whether results stand where data were."""
        return False

    def uses(self, exponents: Exponents) -> bool:  # noqa: ARG002
        """Whether these are the exponents that contributions and sums were made with."""
        return True

    def contribution(self, lanes: Lanes) -> int:
        """Write this worker's integers into `lanes`, as far as they have been encoded; returns how many."""
        return self._chunks.native_lanes(self.rows, self._encoded, lanes)

    def agrees(self, sums: Lanes) -> bool:
        """Whether all results that have come are equal to these sums of the whole bucket."""
        if not self._memory:
            return True
        lanes = self._sums.reshape(-1).view(sums.dtype)[: len(sums)]
        edges = np.flatnonzero(np.diff(self._done, prepend=False, append=False)) * self._chunks.lanes
        return all(np.array_equal(lanes[start:stop], sums[start:stop]) for start, stop in edges.reshape(-1, 2).tolist())

    def release(self) -> None:
        """Give the memory back: none of its frames will be sent again, and no rank needs it any more."""
        for buffer in self._memory:
            self._pool.give(buffer)
        self.drop()

    def drop(self) -> None:
        """Let the memory go for good: it was handed over, and the pool belongs to the core's thread."""
        self._memory = []
        self.rows = self.rows[:0]
        self._sums = self._sums[:0]


class FloatPart(SumPart):
    """Numbers, quantized piece by piece, and residuals with them; results are written piece by piece, too."""

    def __init__(
        self,
        bucket: Reduction,
        codec: BucketCodec,
        exponents: Exponents,
        stream: Stochastic | None,
        digest: int,
        pool: Buffers,
    ) -> None:
        """`exponents`: the agreed ones. `stream`: this rank's random numbers, if it is to round with such."""
        super().__init__(bucket, codec, digest, pool)
        self._codec = codec
        self._data = bucket.data
        self._out = bucket.out
        self._mean = bucket.mean
        self._residual = bucket.residual
        self._exponents = exponents
        self._stream = stream

    def _encode(self, first: int, last: int) -> None:
        self._codec.encode(
            self._data,
            self._exponents,
            first,
            last,
            self.rows,
            self.checks,
            stream=self._stream,
            residual=self._residual,
        )

    def _deliver(self) -> None:
        """Decode whatever piece has become whole."""
        while self._decoded < self.chunks:
            stop = min(self._decoded + self._piece, self.chunks)
            if np.count_nonzero(self._done[self._decoded : stop]) < stop - self._decoded:
                break
            self._codec.decode(self._sums, self._exponents, self._out, self._mean, self._decoded, stop)
            self._decoded = stop

    @property
    def written_over(self) -> bool:
        """Whether results stand where data were."""
        return self._decoded > 0 and self._out.ctypes.data == self._data.ctypes.data

    def uses(self, exponents: Exponents) -> bool:
        """Whether these are the exponents that contributions and sums were made with."""
        return np.array_equal(self._exponents, exponents)


class IntegerPart(SumPart):
    """int32, exactly. Nothing is written before all sums have come and are known to fit."""

    def __init__(self, bucket: IntegerReduction, codec: IntegerCodec, digest: int, pool: Buffers) -> None:
        super().__init__(bucket, codec, digest, pool)
        self._reduction = bucket
        self._codec = codec

    def _encode(self, first: int, last: int) -> None:
        self._codec.encode(self._reduction.data, first, last, self.rows, self.checks)

    def _deliver(self) -> None:
        if self.missing == 0:
            self._reduction.error = self._codec.decode(self._sums, self._reduction.out)
            self._decoded = self.chunks
