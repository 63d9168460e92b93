# SPDX-License-Identifier: Apache-2.0
"""What is trained: a character model on Python's own help pages, and a small CNN on drawn digits.

A task gives each of n workers its share of every batch and returns the workers' gradients, one flat vector each, in
the order in which DistributedDataParallel would fill a bucket (last parameter first).
"""

from __future__ import annotations

import functools
from typing import Protocol

import digits
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from p4reduce.demo import corpus
from p4reduce.demo.model import CharacterModel, ModelConfig

Vector = npt.NDArray[np.float32]


class Task(Protocol):
    """A model in training."""

    name: str

    def gradients(self, step: int) -> list[Vector]:
        """Every worker's gradient at the present parameters, on its share of the step's batch."""

    def apply(self, gradient: Vector) -> None:
        """One step of the optimizer."""

    def loss(self) -> float:
        """Loss on data that are not trained on; the same for every run of a task."""


class _Training:
    """What both tasks share: parameters as one vector, and the optimizer."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer], **settings: float) -> None:
        self._parameters = list(reversed(list(model.parameters())))
        self._optimizer = optimizer(self._parameters, **settings)

    def _flat_gradient(self, loss: torch.Tensor) -> Vector:
        found = torch.autograd.grad(loss, self._parameters)
        flat: Vector = torch.cat([one.reshape(-1) for one in found]).numpy()
        return flat

    def apply(self, gradient: Vector) -> None:
        sizes = [one.numel() for one in self._parameters]
        for parameter, part in zip(self._parameters, torch.from_numpy(gradient.copy()).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()

    def follow(self, other: _Training) -> None:
        """Take over the parameters of the same task, be it with another number of workers."""
        with torch.no_grad():
            for ours, theirs in zip(self._parameters, other._parameters, strict=True):
                ours.copy_(theirs)


class Characters(_Training):
    """Next character, Adam; loss in nats per character."""

    name = "characters"
    batch, context = 32, 32

    def __init__(self, seed: int, workers: int) -> None:
        torch.manual_seed(seed)
        text = _text()
        self._model = CharacterModel(ModelConfig(text.symbols, self.context, width=48, heads=4, layers=1))
        super().__init__(self._model, torch.optim.Adam, lr=3e-3)
        self._batches = [text.batches(seed, rank, workers, self.batch, self.context) for rank in range(workers)]

    def gradients(self, step: int) -> list[Vector]:  # noqa: ARG002
        found = []
        for batches in self._batches:
            one = next(batches)
            found.append(self._flat_gradient(self._model(one[:, :-1], one[:, 1:])))
        return found

    def loss(self) -> float:
        windows = _text().examination(128, self.context)
        with torch.no_grad():
            return float(self._model(windows[:, :-1], windows[:, 1:]))


class Digits(_Training):
    """Ten digits, SGD with momentum; loss is the cross-entropy in nats."""

    name = "digits"
    batch = 64

    def __init__(self, seed: int, workers: int) -> None:
        torch.manual_seed(seed)
        side = digits.SIDE // 4
        self._model = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(24 * side * side, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        super().__init__(self._model, torch.optim.SGD, lr=0.05, momentum=0.9)
        self._order = np.random.default_rng([seed, 11])
        self._workers = workers

    def gradients(self, step: int) -> list[Vector]:  # noqa: ARG002
        pictures, labels = _digits(3072, 1)
        chosen = self._order.integers(0, len(labels), self.batch)
        return [
            self._flat_gradient(functional.cross_entropy(self._model(pictures[share]), labels[share]))
            for share in np.array_split(chosen, self._workers)
        ]

    def loss(self) -> float:
        pictures, labels = _digits(1024, 2)
        with torch.no_grad():
            return float(functional.cross_entropy(self._model(pictures), labels))


TASKS: dict[str, type[Characters] | type[Digits]] = {"characters": Characters, "digits": Digits}


@functools.cache
def _text() -> corpus.Corpus:
    return corpus.load()


@functools.cache
def _digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    pictures, labels = digits.draw(count, seed)
    return torch.from_numpy(pictures), torch.from_numpy(labels)
