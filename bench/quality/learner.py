"""A peer's learning without its daemon: the real model, optimizer and sampler, stepped by hand in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from bench.quality.text import Text
from spesd.config.manifest import Draft
from spesd.data.sampler import Sampler, held_out_blocks
from spesd.model.flat import FlatWeights
from spesd.model.transformer import Transformer
from spesd.model.units import UnitLayout
from spesd.train.optim import UnitAdamW, balance_factor, clip_gradient

Moments = Mapping[str, Mapping[str, torch.Tensor]]

BATCH = 16
"""Sequences that are evaluated at once."""


class Learner:
    """Trains `owned` experts and the shared parameters. `values` is float32 [layout.total_size].

    With several samplers a step takes one micro-batch from each, as a data centre does with its workers.
    """

    def __init__(
        self,
        draft: Draft,
        texts: Sequence[Text],
        run: str,
        names: Sequence[str],
        owned: Iterable[str],
        values: np.ndarray,
    ) -> None:
        self.draft = draft
        self.layout = UnitLayout(draft.model, draft.sync.shared_shards)
        self.weights = FlatWeights(self.layout, owned)
        self.set_all(values)
        self.model = Transformer(self.weights, draft.data.sequence_length)
        self.optimizer = UnitAdamW(self.weights, draft.optimizer)
        length = draft.data.sequence_length
        self._samplers = [Sampler([text.train], run, name, length) for text, name in zip(texts, names, strict=True)]
        self.tokens = 0
        self.round = 0

    def set_all(self, values: np.ndarray) -> None:
        """Take these values of all units."""
        for unit, at in self.layout.offsets.items():
            size = self.layout.by_id[unit].size
            self.weights.values(unit).copy_(torch.from_numpy(values[at : at + size]))

    def all_values(self) -> np.ndarray:
        """Copy of all units, float32 [layout.total_size]."""
        return np.concatenate([self.weights.values(unit).numpy() for unit in self.layout.offsets])

    def own(self, experts: Iterable[str]) -> None:
        """Train other experts from now on; kept ones keep their moments."""
        self.weights = self.weights.with_owned(experts)
        self.model.bind(self.weights)
        self.optimizer.rebind(self.weights)

    def moments(self) -> Moments:
        """Copy of the optimizer's moments of every trained unit, as a checkpoint keeps them."""
        return {
            unit.id: {name: value.clone() for name, value in self.optimizer.state(unit.id).items()}
            for unit in self.weights.trained
        }

    def restore(self, moments: Moments) -> None:
        """Take the moments of those units that are still trained here."""
        for unit, kept in moments.items():
            if self.weights.is_trained(unit):
                for name, value in self.optimizer.state(unit).items():
                    value.copy_(kept[name])
                self.optimizer.resume(unit, float(kept["step"]))

    def step(self) -> None:
        """One optimizer step at the learning rate of the present round."""
        config = self.draft.optimizer
        self.weights.grad.zero_()
        balances = self.model.balances(balance_factor(config, self.round))
        for sampler in self._samplers:
            blocks = torch.from_numpy(sampler.batch(config.sequences))
            loss = self.model.loss(blocks, balances).total / len(self._samplers)
            torch.autograd.backward(loss)
            self.tokens += blocks[:, 1:].numel()
        clip_gradient(self.weights.grad, config.clip_norm)
        self.optimizer.step(self.round)


class Evaluator:
    """Held-out loss of whole states on the same blocks every time: nats per token, mean over the domains."""

    def __init__(self, draft: Draft, texts: Mapping[str, Text]) -> None:
        layout = UnitLayout(draft.model, draft.sync.shared_shards)
        self._learner = Learner(draft, (), "", (), (), np.zeros(layout.total_size, np.float32))
        data = draft.data
        self._blocks = [
            held_out_blocks([text.held_out], data.held_out_sequences, data.sequence_length) for text in texts.values()
        ]

    def loss(self, values: np.ndarray) -> float:
        """Cross-entropy of float32 [layout.total_size] on the held-out text."""
        self._learner.set_all(values)
        with torch.inference_mode():
            return float(np.mean([self._domain(blocks) for blocks in self._blocks]))

    def _domain(self, blocks: np.ndarray) -> float:
        batches = [torch.from_numpy(blocks[at : at + BATCH]) for at in range(0, len(blocks), BATCH)]
        return sum(self._learner.model.loss(b).cross_entropy.item() * len(b) for b in batches) / len(blocks)
