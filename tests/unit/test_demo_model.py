# SPDX-License-Identifier: Apache-2.0
"""The demo's text and model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from p4reduce.demo import corpus, train
from p4reduce.demo.model import CharacterModel, ModelConfig


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load()


def test_the_text_is_real_and_split(text: corpus.Corpus) -> None:
    assert 50 < text.symbols < 1000
    assert len(text.training) > 300_000
    assert 0.04 < len(text.held_out) / (len(text.held_out) + len(text.training)) < 0.06
    assert int(text.training.max()) < text.symbols
    assert torch.equal(corpus.load().training, text.training)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_together_see_one_batch(text: corpus.Corpus, world_size: int) -> None:
    def batches(ranks: int) -> list[torch.Tensor]:
        each = [itertools.islice(text.batches(7, rank, ranks, 8, 16), 3) for rank in range(ranks)]
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    whole = batches(1)
    assert whole[0].shape == (8, 17)
    assert not torch.equal(whole[0], whole[1])
    assert all(torch.equal(a, b) for a, b in zip(whole, batches(world_size), strict=True))


def test_another_seed_sees_other_text(text: corpus.Corpus) -> None:
    first, second = (next(text.batches(seed, 0, 1, 8, 16)) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_the_examination_is_always_the_same_and_held_out(text: corpus.Corpus) -> None:
    windows = text.examination(5, 16)
    assert windows.shape == (5, 17)
    assert torch.equal(windows, text.examination(5, 16))
    assert torch.equal(windows[0], text.held_out[:17])
    assert torch.equal(windows[-1], text.held_out[-17:])


def test_the_model_starts_at_chance_and_learns(text: corpus.Corpus) -> None:
    torch.manual_seed(0)
    model = CharacterModel(ModelConfig(text.symbols))
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 400_000
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for window in itertools.islice(text.batches(0, 0, 1, 8, 32), 25):
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(text.symbols)) < 0.5
    assert losses[-1] < losses[0] - 1.0


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = CharacterModel(ModelConfig(10, context=8, width=16, heads=2, layers=2))
    a = torch.zeros(1, 8, dtype=torch.int64)
    b = a.clone()
    b[0, -1] = 5
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        model(a, a)
        model(b, a)
    assert torch.equal(seen[0][0, :-1], seen[1][0, :-1])
    assert not torch.equal(seen[0][0, -1], seen[1][0, -1])


def test_the_digest_sees_one_bit() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    before = train.digest(model)
    assert before == train.digest(model)
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(9.0))
    assert before != train.digest(model)
