"""Combining contributions: the checks that come first, and the token-weighted mean (SPES, arXiv 2602.11543, section 3).

The authors' server takes the plain mean of shared parameters and copies an expert from its single owner; with equal
weights, and with one owner, this is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spesd.sync.codec import Values
from spesd.sync.ledger import PeerId


class Refused(ValueError):
    """A contribution that must not touch a weight; the message says why."""


def rms(values: Values) -> float:
    """Root mean square of float32 [n]; inf or NaN if any value is not finite (one pass over the data)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.dot(values, values) / max(values.size, 1)))


def check(values: Values, count: int, max_rms: float) -> None:
    """Raise Refused unless `values` is float32 [count], finite, and of a root mean square of at most `max_rms`."""
    if values.shape != (count,) or values.dtype != np.float32:
        raise Refused(f"shape {values.shape} of {values.dtype}, expected ({count},) of float32")
    size = rms(values)
    if not np.isfinite(size):
        raise Refused("values are not finite")
    if size > max_rms:
        raise Refused(f"root mean square {size:.3g} is above max_delta_rms {max_rms:.3g}")


def clip(values: Values, max_rms: float) -> Values:
    """Scale `values` down to `max_rms` if they exceed it. What is cut off stays in the sender's `theta - agreed`."""
    size = rms(values)
    if not np.isfinite(size):
        raise Refused("values are not finite")
    # a hair below the limit, so that rounding in the codec cannot carry it over
    return values if size <= max_rms else values * np.float32(0.999 * max_rms / size)


def capped_weights(tokens: Mapping[PeerId, int], cap: float) -> dict[PeerId, int]:
    """Weights of the contributors of one unit: their tokens, at most `cap` times the lower median, at least 1.

    The lower median, so that of two contributors the larger claim is the one that is bounded.
    """
    ordered = sorted(tokens.values())
    limit = int(cap * ordered[(len(ordered) - 1) // 2])
    return {peer: max(1, min(count, limit)) for peer, count in tokens.items()}


def weighted_mean(contributions: Sequence[tuple[Values, int]]) -> Values:
    """Mean of float32 [n] vectors by integer weights; needs at least one. Sums in fp32, in the order given."""
    total = sum(weight for _, weight in contributions)
    mean = np.zeros_like(contributions[0][0])
    for values, weight in contributions:
        mean += values * np.float32(weight / total)
    return mean
