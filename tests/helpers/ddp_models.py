# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests of the DDP hook, their data, and a training loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class Model(torch.nn.Module):
    """Three layers, of which the last may stay unused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(10, 20, dtype=dtype)
        self.second = torch.nn.Linear(20, 20, dtype=dtype)
        self.third = torch.nn.Linear(20, 1, dtype=dtype)
        self.spare = torch.nn.Linear(20, 1, dtype=dtype)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        total: torch.Tensor = self.third(hidden) + (self.spare(hidden) if spare else 0)
        return total


class Convolutions(torch.nn.Module):
    """Images in channels_last memory format, as the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 3)
        self.layers = torch.nn.Sequential(*layers)
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.new_ones(x.shape[0], 3, 8, 8).to(memory_format=torch.channels_last) * x[:, :3, None, None]
        out: torch.Tensor = self.layers(images).mean(dim=(2, 3))
        return out


class Tied(torch.nn.Module):
    """One weight in two places, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = torch.nn.Linear(10, 10, bias=False)
        self.out = torch.nn.Linear(10, 10, bias=False)
        self.out.weight = self.into.weight
        self.never = torch.nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.into(x)))
        return out


class Wide(torch.nn.Module):
    """1.4 MiB in one layer: more than one bucket of the size that DDP begins with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Many(torch.nn.Module):
    """A thousand parameters of three elements each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts = torch.nn.ParameterList([torch.randn(3) for _ in range(1000)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.stack([*self.parts]).sum(dim=0) * x[:, :3]
        return total


class Motley(torch.nn.Module):
    """Parameters of every kind that DDP has buckets for: five dtypes, no elements at all, sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.of32 = torch.nn.Linear(10, 4)
        self.of64 = torch.nn.Linear(10, 4, dtype=torch.float64)
        self.ofb16 = torch.nn.Linear(10, 4, dtype=torch.bfloat16)
        self.of16 = torch.nn.Linear(10, 4, dtype=torch.float16)
        self.numbers = torch.nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.none = torch.nn.Parameter(torch.empty(0))
        self.table = torch.nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x[:, 0].abs().long().clamp(max=8))
        total: torch.Tensor = self.of32(x) + rows + self.numbers.abs().sum() + self.none.sum()
        return total + sum(part(x.to(part.weight.dtype)).to(x.dtype) for part in (self.of64, self.ofb16, self.of16))


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 10, generator=generator).to(dtype)


def arrays(tensors: Any) -> list[Array]:
    dense = [t.detach().to_dense() if t.is_sparse else t.detach() for t in tensors]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in dense]
    return [t.to(torch.float64).numpy().copy() for t in real]


def gradients(model: torch.nn.Module) -> list[Array]:
    return arrays(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def train(ddp: torch.nn.Module, rank: int, steps: int, dtype: torch.dtype = torch.float32, **call: Any) -> Any:
    """Train with SGD. Returns the gradients of every step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        (ddp(data(rank, step, dtype), **call) - 1.0).square().mean().backward()
        history.append(gradients(ddp))
        optimizer.step()
    return history
