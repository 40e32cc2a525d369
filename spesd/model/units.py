"""Units: the grain of synchronisation, and how parameters lie inside them.

A unit is one flat fp32 vector: one expert (its index across all layers), or one shard of the shared parameters. The
layout follows from the manifest alone, so that every peer cuts the model at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from spesd.config.manifest import ModelConfig

EXPERT_MATRICES = ("gate", "up", "down")
"""Order of an expert's matrices inside its unit, each [expert_width, width]; `down` is stored transposed."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit: `id` is `shared-3` or `expert-5`, `size` counts fp32 values."""

    id: str
    kind: Literal["shared", "expert"]
    index: int
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclass(frozen=True)
class UnitLayout:
    """All units of a model, shared shards first, then experts, in index order."""

    model: ModelConfig
    shared_shards: int

    @cached_property
    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shared parameters in the order in which they lie in the shared vector."""
        m = self.model
        shapes: dict[str, tuple[int, ...]] = {"embedding": (m.vocabulary, m.width)}
        for layer in range(m.layers):
            p = f"layers.{layer}."
            shapes |= {f"{p}attention_norm": (m.width,)}
            shapes |= {f"{p}attention.{name}": (m.width, m.width) for name in ("q", "k", "v", "o")}
            shapes |= {f"{p}attention.q_norm": (m.width,), f"{p}attention.k_norm": (m.width,)}
            shapes |= {f"{p}expert_norm": (m.width,), f"{p}router": (m.experts, m.width)}
        shapes |= {"final_norm": (m.width,), "head": (m.vocabulary, m.width)}
        if m.common_expert:  # at the end, so that all other values are where they are without
            common = (len(EXPERT_MATRICES) * m.expert_width, m.width)
            shapes |= {f"layers.{layer}.common": common for layer in range(m.layers)}
        return shapes

    @cached_property
    def shared_size(self) -> int:
        """Values in the whole shared vector."""
        return sum(prod(shape) for shape in self.shared_shapes.values())

    @cached_property
    def expert_size(self) -> int:
        """Values in one expert: layers x 3 matrices x [expert_width, width]."""
        return self.model.layers * len(EXPERT_MATRICES) * self.model.expert_width * self.model.width

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Every unit, in layout order. Shared shards differ in size by at most one value."""
        base, more = divmod(self.shared_size, self.shared_shards)
        shared = [Unit(f"shared-{i}", "shared", i, base + (i < more)) for i in range(self.shared_shards)]
        experts = [Unit(f"expert-{e}", "expert", e, self.expert_size) for e in range(self.model.experts)]
        return (*shared, *experts)

    @cached_property
    def by_id(self) -> dict[str, Unit]:
        return {unit.id: unit for unit in self.units}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each unit starts, in values, in the vector of all units."""
        offsets, at = {}, 0
        for unit in self.units:
            offsets[unit.id] = at
            at += unit.size
        return offsets

    @cached_property
    def total_size(self) -> int:
        """Values of the whole model."""
        return self.shared_size + self.model.experts * self.expert_size
