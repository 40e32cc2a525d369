"""Generating text from a state: a plain loop, for looking at a model, not for serving it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from spesd.model.flat import FlatWeights
from spesd.model.transformer import Transformer
from spesd.model.units import UnitLayout


def generate(
    layout: UnitLayout,
    states: Mapping[str, np.ndarray],
    prompt: np.ndarray,
    *,
    context: int,
    count: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """Yield `count` tokens that follow `prompt` (integers [n], n at least 1).

    `states` has float32 [unit.size] of every unit. The model sees the last `context` tokens. Temperature 0 takes the
    most likely token each time; the same seed gives the same text.
    """
    weights = FlatWeights(layout, ())
    for unit in layout.units:
        weights.values(unit.id).copy_(torch.from_numpy(states[unit.id]))
    model = Transformer(weights, context)
    random = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(prompt.astype(np.int64))
    for _ in range(count):
        with torch.inference_mode():
            logits, _ = model(tokens[None, -context:])
            last = logits[0, -1]
            if temperature == 0:
                token = last.argmax()[None]
            else:
                token = torch.multinomial((last / temperature).softmax(-1), 1, generator=random)
        yield int(token)
        tokens = torch.cat([tokens, token])
