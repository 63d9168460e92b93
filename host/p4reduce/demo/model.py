# SPDX-License-Identifier: Apache-2.0
"""A character-level transformer, small enough to learn something in a minute on one core."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Size of the model."""

    symbols: int
    """Size of the alphabet."""
    context: int = 64
    """Characters the model looks back at most."""
    width: int = 96
    heads: int = 4
    layers: int = 2


class Layer(nn.Module):
    """Causal self-attention and a feed-forward net, each behind a LayerNorm and with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.feed(self.norm_feed(x))
        return out


class CharacterModel(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.character = nn.Embedding(config.symbols, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.symbols)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per character of `following` given `text`, both int64 (batch, length)."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.layers(self.character(text) + self.position(places))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())
