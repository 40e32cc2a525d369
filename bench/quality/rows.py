"""The rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.quality.experiments import Row

MERGING = {"interval": 1, "alpha": 0.2, "top_k": 4}
"""Strong merging at every round; `decay_rounds` is set from the number of steps."""

REFERENCES = (
    Row("centralised", "centralised"),
    Row("alone", "alone"),
    Row("diloco", "diloco", every=20),
    Row("diloco_5", "diloco", every=5),
    Row("diloco_2", "diloco", every=2),
    Row("spes_server", "server", every=20),
)
"""What a swarm is held against; `diloco_5` is the one at the swarm's own frequency."""

RARER = {"interval": 4, "alpha": 0.5}
"""About as strong in the long run: for topk, whose merging packets are dense and should be few."""

DEFAULT = Row("spesd", "swarm", every=5, merge=MERGING, model={"common_expert": True}, sync={"codec": "int8"})
"""The defaults of this project."""


def changed(name: str, **changes: Any) -> Row:
    """The defaults with one thing changed; a mapping adds to the defaults' own."""
    merged: dict[str, Any] = {
        field: {**getattr(DEFAULT, field), **value} if isinstance(value, Mapping) and value else value
        for field, value in changes.items()
    }
    return replace(DEFAULT, name=name, **merged)


PLAIN: dict[str, Any] = {"merge": {}, "model": {}, "sync": {}}
"""SPES without merging, common matrices or codec."""

LEVERS = (
    changed("plain_2", every=2, **PLAIN),
    changed("plain_5", **PLAIN),
    changed("plain_20", every=20, **PLAIN),
    changed("plain_100", every=100, **PLAIN),
    changed("merging", model={}, sync={"codec": "fp32"}),
    changed("common", sync={"codec": "fp32"}),
    changed("every_2", every=2, merge={"alpha": 0.08}),
    changed("every_2_topk", every=2, sync={"codec": "topk", "top_share": 0.05}, merge={"interval": 10, "alpha": 0.5}),
    changed("every_20", every=20),
    changed("two_owners", owned=4),
    changed("fp16", sync={"codec": "fp16"}),
    changed("int4", sync={"codec": "int4"}),
    changed("topk_5", sync={"codec": "topk", "top_share": 0.05}, merge=RARER),
    changed("topk_1", sync={"codec": "topk", "top_share": 0.01}, merge=RARER),
    changed("refresh_4", sync={"refresh_every": 4}),
    changed("stagger_5", every=1, sync={"stagger": 5}),
    changed("delayed", delay=(0.5, 1.5), sync={"gather_seconds": 8.0}),
    changed("speeds_1_2_4", speeds=(1.0, 2.0, 4.0, 1.0)),
    changed("churn", churn=True),
    changed("split_domains", split_domains=True),
    changed("nesterov", merge={"interval": 0}, outer={"method": "nesterov"}),
    changed("balance_decay", optimizer={"balance_start": 0.7}),
    changed("expert_rate_2", optimizer={"expert_rate": 2.0}),
    changed("expert_rate_half", optimizer={"expert_rate": 0.5}),
)
"""The defaults with one thing changed, and plain SPES at several frequencies."""

LEFT_TO_FULL = {
    *("diloco_2", "plain_2", "every_2", "every_2_topk", "every_20", "common", "fp16", "topk_1"),
    *("refresh_4", "stagger_5", "nesterov", "balance_decay", "expert_rate_2", "expert_rate_half"),
}
"""Rows that the reduced setting leaves out."""

ROWS = {row.name: row for row in (*REFERENCES, DEFAULT, *LEVERS)}
