"""The rows of the table."""

from __future__ import annotations

from bench.quality.experiments import Row

MERGING = {"interval": 1, "alpha": 0.2, "top_k": 4}
"""Strong merging at every round; `decay_rounds` is set from the number of steps."""

REFERENCES = (
    Row("centralised", "centralised"),
    Row("alone", "alone"),
    Row("diloco", "diloco", every=20),
    Row("diloco_5", "diloco", every=5),
    Row("spes_server", "server", every=20),
)
"""What a swarm is held against; `diloco_5` is the one at the swarm's own frequency."""

DEFAULT = Row("spesd", "swarm", every=5, merge=MERGING)
"""The defaults of this project."""

LEVERS = (
    Row("common", "swarm", every=5, merge=MERGING, model={"common_expert": True}),
    Row("diloco_5_common", "diloco", every=5, model={"common_expert": True}),
    Row("plain_5", "swarm", every=5),
    Row("plain_20", "swarm", every=20),
    Row("plain_100", "swarm", every=100),
    Row("merging_20", "swarm", every=20, merge=MERGING),
    Row("merging_long", "swarm", every=5, merge=MERGING | {"decay_rounds": 10**6}),
    Row("merging_all", "swarm", every=5, merge=MERGING | {"top_k": 7}),
    Row("nesterov", "swarm", every=5, outer={"method": "nesterov"}),
    Row("balance_decay", "swarm", every=5, merge=MERGING, optimizer={"balance_start": 0.7}),
    Row("expert_rate_2", "swarm", every=5, merge=MERGING, optimizer={"expert_rate": 2.0}),
    Row("expert_rate_half", "swarm", every=5, merge=MERGING, optimizer={"expert_rate": 0.5}),
    Row("refresh_4", "swarm", every=5, merge=MERGING, sync={"refresh_every": 4}),
    Row("two_owners", "swarm", every=5, owned=4, merge=MERGING),
    Row("fp16", "swarm", every=5, merge=MERGING, sync={"codec": "fp16"}),
    Row("int8", "swarm", every=5, merge=MERGING, sync={"codec": "int8"}),
    Row("int4", "swarm", every=5, merge=MERGING, sync={"codec": "int4"}),
    Row("topk_5", "swarm", every=5, merge=MERGING, sync={"codec": "topk", "top_share": 0.05}),
    Row("topk_1", "swarm", every=5, merge=MERGING, sync={"codec": "topk", "top_share": 0.01}),
    Row("delayed", "swarm", every=5, merge=MERGING, delay=(0.5, 1.5)),
    Row("speeds_1_2_4", "swarm", every=5, merge=MERGING, speeds=(1.0, 2.0, 4.0, 1.0)),
    Row("churn", "swarm", every=5, merge=MERGING, churn=True),
    Row("split_domains", "swarm", every=5, merge=MERGING, split_domains=True),
)
"""The defaults with one thing changed."""

ROWS = {row.name: row for row in (*REFERENCES, DEFAULT, *LEVERS)}
