"""The outer step: what the swarm makes of the mean of a round's contributions.

`average` takes it as it is (SPES, arXiv 2602.11543). `nesterov` treats it as a gradient with momentum, as DiLoCo does
(arXiv 2311.08105, section 2): m = mu m + d, and the agreed state moves by lr (d + mu m). A contribution is a change and
not a gradient, so the sign is that of the change.

Momentum is nobody's secret: a packet tells how far the state moved, and from that and the momentum before follows the
momentum after. So whoever has a unit's packets has its momentum, and it is handed over with them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spesd.config.manifest import OuterConfig
from spesd.sync.codec import Values


class OuterStep:
    """The outer step of one run; every peer that trains a unit follows its momentum, float32 [size]."""

    def __init__(self, config: OuterConfig) -> None:
        self._rate, self._decay = np.float32(config.learning_rate), np.float32(config.momentum)
        self.has_momentum = config.method == "nesterov"

    def move(self, mean: Values, momentum: Values) -> Values:
        """How far the agreed state goes, float32 [size], for the mean of the contributions."""
        if not self.has_momentum:
            return mean
        return self._rate * (mean + self._decay * (self._decay * momentum + mean))

    def follow(self, moved: Values, momentum: Values) -> Values:
        """The momentum after the agreed state has moved so far, which was `momentum` before."""
        one, decay = np.float32(1), self._decay
        mean = (moved / self._rate - decay * decay * momentum) / (one + decay)
        return np.asarray(decay * momentum + mean, np.float32)

    def replay(self, moves: Iterable[Values], size: int) -> Values:
        """The momentum after these moves; what was before them has faded."""
        momentum = np.zeros(size, np.float32)
        for moved in moves:
            momentum = self.follow(moved, momentum)
        return momentum
