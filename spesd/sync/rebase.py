"""The shift that takes a trainer's parameters to a new agreed state without losing a step.

The invariant on which everything rests: `theta - agreed` is exactly the work that the swarm has not accepted yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spesd.sync.codec import Values


def shift(old: Values, new: Values, accepted: Iterable[Values] = (), returned: Iterable[Values] = ()) -> Values:
    """What to add to `theta` [n] when the agreed state [n] goes from `old` to `new`.

    `accepted` are this peer's own contributions that went into `new` and not into `old`; `returned` are those that
    are part of `old` and not of `new` (a fork was lost), which become unaccepted work again.
    """
    change = np.subtract(new, old)
    for values in accepted:
        change -= values
    for values in returned:
        change += values
    return change
