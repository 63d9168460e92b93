#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Allreduce of numpy arrays in one process: switch, controller and two workers, for notebooks and tests.

python examples/numpy_local.py
"""

import numpy as np

import p4reduce


def main() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=100_000).astype(np.float32) for _ in range(2))
    with p4reduce.local(world_size=2) as (first, second):
        # Both must call before either has its result, so the calls do not wait.
        futures = [first.allreduce_async(x, op="mean"), second.allreduce_async(y, op="mean")]
        a, b = (future.result() for future in futures)
    exact = (x.astype(np.float64) + y) / 2
    print("equal on both workers, bit for bit:", a.tobytes() == b.tobytes())
    print(f"largest error against the exact mean: {np.abs(a - exact).max():.2e}")


if __name__ == "__main__":
    main()
