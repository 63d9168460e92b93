# SPDX-License-Identifier: Apache-2.0
"""The default path gives the bits it gave when lanes had 32 bits and nothing else.

The digests were recorded from the code before 16 and 8 bits, stochastic rounding and integers were added. A change
here is a change of the wire format, or of every result: ranks of two versions would not agree.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from p4reduce.core.bucket import Barrier, Bucket, Reduction
from p4reduce.packetize import BucketCodec, splitmix64
from p4reduce.quantize import LaneFormat, block_exponents
from p4reduce.sim.byhand import finish
from p4reduce.sim.network import Datagram, Faults
from p4reduce.sim.runner import Scenario, Simulation
from p4reduce.wire import PROFILES

Vector = npt.NDArray[np.float32]

ARRAYS = {
    (32, 1, "w5"): "5978234e00fbd89e914fec8d39e467bb",
    (32, 2, "w5"): "5c1d000576ec4cf80c20e61afa00d6d7",
    (32, 3, "w34"): "d23bdd6354b88ed15853cb677e68177a",
    (32, 64, "w34"): "bc8508df757cfdd6cf7cd7d723ecabb0",
    (16, 2, "w5"): "507cc2ae72a59ccfdc22f04017f80af8",
    (8, 5, "w34"): "01e0ca9ddfa584a2415dd46531e1f3c3",
    (64, 4, "w5"): "9673983ded131853c8335b262e29d6a2",
}
FRAMES = {
    "clean": "9993ac12f0111256594876ab2afede55",
    "lossy": "c158e24ca14f5dd0cf904e298730a67a",
    "in place": "9993ac12f0111256594876ab2afede55",
}


def vector(count: int, seed: int) -> Vector:
    """Floats of many magnitudes, some blocks wild, from integers alone: no library's generator may change them."""
    bits = splitmix64(seed, count)
    x = ((bits >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32)
    scale = (bits[::256] & np.uint64(31)).astype(np.int32) - 16
    x = np.ldexp(x, np.repeat(scale, 256)[:count])
    if count > 3000:
        x[700] = np.nan
        x[1100] = np.inf
        x[1300:1400] = np.float32(3e38)
        x[2000:2300] = np.float32(1e-44)
        x[2560:2816] = -0.0
    return x


@pytest.mark.parametrize(("lane_bits", "workers", "profile"), ARRAYS)
def test_arrays_are_as_recorded(lane_bits: int, workers: int, profile: str) -> None:
    """Exponents, rows, checks, sums and means of buckets of several sizes."""
    fmt = LaneFormat(lane_bits, workers, 256)
    found = hashlib.sha256()
    for count in (1, 64, 320, 5000, 70_001):
        codec = BucketCodec(PROFILES[profile], fmt, count)
        data = [vector(count, 1000 * count + rank) for rank in range(min(workers, 3))]
        agreed = np.max([block_exponents(x) for x in data], axis=0)
        sums = np.zeros((codec.add_chunks, codec.groups), dtype=np.uint64)
        found.update(agreed.tobytes() + codec.encode_exponents(agreed).tobytes())
        for rank in range(workers):
            rows = np.zeros((codec.add_chunks, codec.payload_bytes), dtype=np.uint8)
            checks = np.zeros(codec.add_chunks, dtype=np.uint64)
            codec.encode(data[rank % 3], agreed, 0, codec.add_chunks, rows, checks)
            sums += rows.view(">u8").astype(np.uint64)
            if rank < 3:
                found.update(rows.tobytes() + checks.tobytes())
        for mean in (False, True):
            out = np.zeros(count, dtype=np.float32)
            codec.decode(sums, agreed, out, mean)
            # A NaN has many bit patterns, and which of them comes out is not promised.
            found.update(np.isnan(out).tobytes() + np.nan_to_num(out, nan=0.0, posinf=1.0, neginf=-1.0).tobytes())
    assert found.hexdigest()[:32] == ARRAYS[lane_bits, workers, profile]


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_of_a_job_are_as_recorded(kind: str) -> None:
    """Every frame that the cores of a job send and get, in order, and every result."""
    faults = Faults(loss=0.05, duplicate=0.02, reorder=0.2) if kind == "lossy" else Faults()
    simulation = Simulation(Scenario(3, up=faults, down=faults, seed=11))
    found = hashlib.sha256()

    def tap(_: float, rank: int, upwards: bool, datagram: Datagram) -> None:
        found.update(bytes([rank, upwards]) + datagram.data)

    simulation.tap = tap
    made: list[Bucket] = []
    for place, count in enumerate((1000, 0, 64, 9000, 1, 321)):
        for rank in range(3):
            data = vector(count, 77 * place + rank)
            out = data if kind == "in place" else np.zeros_like(data)
            made += [Reduction(data, out, place % 2 == 1), Barrier()]
            simulation.submit(rank, made[-2])
            simulation.submit(rank, made[-1])
    finish(simulation)
    for bucket in made:
        if isinstance(bucket, Reduction):
            found.update(np.isnan(bucket.out).tobytes() + np.nan_to_num(bucket.out, nan=0.0).tobytes())
    assert found.hexdigest()[:32] == FRAMES[kind]
