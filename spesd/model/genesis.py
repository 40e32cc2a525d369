"""The first state of a run: a pure function of the manifest, bit-identical on every platform.

Values are uniform with standard deviation `init_std`, not normal: a normal transform needs log and cos, whose last bit
differs between maths libraries, while this one is an exact integer times one correctly rounded fp32 product. Norms are
ones, and what experts have in common is zero.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np

from spesd.model.units import UnitLayout

_BITS = 24
_CHUNK = 1 << 20


def initial_state(layout: UnitLayout) -> np.ndarray:
    """Values of all units in layout order: float32 [layout.total_size]."""
    state = np.empty(layout.total_size, dtype=np.float32)
    _fill_uniform(state[: layout.shared_size], layout, stream=0)
    for unit in layout.units:
        if unit.kind == "expert":
            at = layout.offsets[unit.id]
            _fill_uniform(state[at : at + unit.size], layout, stream=1 + unit.index)
    at = 0
    for name, shape in layout.shared_shapes.items():
        size = prod(shape)
        if name.endswith("norm"):
            state[at : at + size] = 1.0
        elif name.endswith("common"):
            state[at : at + size] = 0.0
        at += size
    return state


def _fill_uniform(out: np.ndarray, layout: UnitLayout, stream: int) -> None:
    """Fill fp32 [size] with odd integers in (-2^24, 2^24) times a scale, from Philox keyed by (seed, stream)."""
    raw = np.random.Philox(key=np.array([layout.model.seed, stream], dtype=np.uint64))
    scale = np.float32(layout.model.init_std * sqrt(3.0) / (1 << _BITS))
    for at in range(0, out.size, _CHUNK):
        part = out[at : at + _CHUNK]
        integers = (raw.random_raw(part.size) >> np.uint64(64 - _BITS)).astype(np.int64)
        part[:] = (2 * integers + 1 - (1 << _BITS)).astype(np.float32) * scale
