# SPDX-License-Identifier: Apache-2.0
"""Digits drawn by hand, so to speak: strokes that are shifted, turned, stretched and blurred, on noisy paper.

No data set to download: every picture is computed from a seed.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

SIDE = 14
"""Height and width of a picture."""
_ROUND = [(0.5 + 0.35 * np.sin(t), 0.5 - 0.45 * np.cos(t)) for t in np.linspace(0, 2 * np.pi, 9)]
_STROKES: list[list[list[tuple[float, float]]]] = [
    [_ROUND],
    [[(0.3, 0.25), (0.55, 0.05), (0.55, 0.95)]],
    [[(0.15, 0.25), (0.35, 0.05), (0.7, 0.1), (0.8, 0.35), (0.15, 0.95), (0.85, 0.95)]],
    [[(0.15, 0.1), (0.7, 0.05), (0.8, 0.3), (0.45, 0.48), (0.85, 0.7), (0.65, 0.95), (0.15, 0.9)]],
    [[(0.65, 0.95), (0.65, 0.05), (0.1, 0.65), (0.9, 0.65)]],
    [[(0.8, 0.05), (0.25, 0.05), (0.2, 0.45), (0.7, 0.45), (0.85, 0.7), (0.65, 0.95), (0.15, 0.9)]],
    [[(0.75, 0.05), (0.3, 0.3), (0.15, 0.7), (0.45, 0.95), (0.8, 0.8), (0.7, 0.5), (0.2, 0.6)]],
    [[(0.1, 0.05), (0.9, 0.05), (0.4, 0.95)]],
    [
        [(0.5, 0.48), (0.2, 0.3), (0.5, 0.05), (0.8, 0.3), (0.5, 0.48)],
        [(0.5, 0.48), (0.12, 0.72), (0.5, 0.95), (0.88, 0.72), (0.5, 0.48)],
    ],
    [[(0.8, 0.35), (0.5, 0.5), (0.2, 0.3), (0.5, 0.05), (0.8, 0.25), (0.75, 0.95)]],
]


def _segments(digit: int) -> npt.NDArray[np.float64]:
    """Straight pieces of a digit in the unit square, shape (k, 2, 2)."""
    pieces = [(a, b) for stroke in _STROKES[digit] for a, b in itertools.pairwise(stroke)]
    return np.array(pieces) - 0.5


def draw(count: int, seed: int, noise: float = 0.35) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """`count` pictures (count, 1, SIDE, SIDE), about 0 and 1, and what they show."""
    rng = np.random.default_rng([seed, 10])
    labels = rng.integers(0, 10, count)
    axis = (np.arange(SIDE) + 0.5) / SIDE - 0.5
    points = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 1, 2)
    pictures = np.empty((count, SIDE * SIDE), dtype=np.float32)
    for picture, digit in zip(pictures, labels, strict=True):
        turn, slant = rng.normal(0, 0.18), rng.normal(0, 0.2)
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        shape = rotation @ np.array([[1, slant], [0, 1]]) @ np.diag(rng.uniform(0.5, 0.85, 2))
        lines = _segments(digit) @ shape.T + rng.normal(0, 0.06, 2)
        start, along = lines[:, 0], lines[:, 1] - lines[:, 0]
        place = ((points - start) * along).sum(-1) / (along**2).sum(-1)
        nearest = start + np.clip(place, 0, 1)[..., None] * along
        distance = np.sqrt(((points - nearest) ** 2).sum(-1)).min(axis=1)
        picture[:] = np.exp(-((distance / rng.uniform(0.035, 0.07)) ** 2))
    pictures += rng.normal(0, noise, pictures.shape).astype(np.float32)
    return pictures.reshape(count, 1, SIDE, SIDE), labels
