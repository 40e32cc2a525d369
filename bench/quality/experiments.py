"""One experiment: a way to train (a row of the table), a seed, a number of steps; what it learns and what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from bench.quality.learner import Evaluator, Learner, Moments
from bench.quality.text import Text, load_text
from spesd.config.manifest import DataConfig, Draft, MergeConfig, ModelConfig, OptimizerConfig, OuterConfig, SyncConfig
from spesd.daemon.budget import FROZEN_BYTES, TRAINED_BYTES
from spesd.model.genesis import initial_state
from spesd.model.units import UnitLayout
from spesd.sync.codec import Values
from spesd.sync.effects import RoundEnded
from spesd.sync.ledger import UnitId
from spesd.sync.merge import Merging
from spesd.sync.simulation import Conditions, Node, World
from spesd.sync.toys import Move

PEERS = 4
MODEL = {"layers": 3, "width": 96, "heads": 4, "expert_width": 96, "experts": 8, "top_k": 2, "vocabulary": 256}
CURVE_POINTS = 12
WARMUP_STEPS = 20
FP32 = 4

MERGED_SHARE = 2 / 3
"""Share of the steps after which merging has faded out, as in the first measurements."""


@dataclass(frozen=True)
class Row:
    """A way to train. `every` is the number of local steps in a round, `owned` the experts that a peer trains."""

    name: str
    kind: Literal["centralised", "alone", "diloco", "server", "swarm"]
    every: int = 5
    owned: int = 2
    model: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)
    merge: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    delay: tuple[float, float] = (0.01, 0.05)
    speeds: tuple[float, ...] = (1.0,) * PEERS
    churn: bool = False
    split_domains: bool = False


class Point(NamedTuple):
    """One point of a learning curve: steps of a peer, tokens of all, bytes per peer (up), held-out loss."""

    steps: int
    tokens: int
    bytes: float
    loss: float


class Outcome(NamedTuple):
    """What a row learnt with one seed. `memory` is static bytes of one peer's trainer."""

    curve: list[Point]
    memory: int


class Setting(NamedTuple):
    """What all rows share. `sequences` of 128 tokens make one peer's step."""

    steps: int
    domains: tuple[str, ...] = ("stdlib", "sotu")
    sequences: int = 8


FULL = Setting(900)
REDUCED = Setting(120, sequences=4)
"""Every row with three seeds in a few minutes; the differences are those of the first steps."""


def draft_for(row: Row, setting: Setting, seed: int) -> Draft:
    """The toy model of the measurements in `docs/learning.md`, with the row's changes."""
    optimizer: dict[str, Any] = {
        "learning_rate": 2e-3,
        "warmup_rounds": max(1, WARMUP_STEPS // row.every),
        "total_rounds": max(1, setting.steps // row.every),
        "sequences": setting.sequences,
    }
    merge: dict[str, Any] = {"decay_rounds": max(1, round(MERGED_SHARE * setting.steps / row.every))}
    sync: dict[str, Any] = {"local_steps": row.every, "codec": "fp32", "shared_shards": PEERS, "gather_seconds": 2.5}
    return Draft(
        name="quality",
        model=ModelConfig(**MODEL | {"seed": seed} | dict(row.model)),
        optimizer=OptimizerConfig(**optimizer | dict(row.optimizer)),
        data=DataConfig(sequence_length=128, held_out_sequences=64),
        sync=SyncConfig(**sync | dict(row.sync)),
        merge=MergeConfig(**merge | dict(row.merge)),
        outer=OuterConfig(**row.outer),
    )


def run(row: Row, setting: Setting, seed: int) -> Outcome:
    """Train one row with one seed."""
    torch.set_num_threads(1)
    # The experts of one layer lie far apart in theta on purpose; see spesd.model.flat.
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    experiment = Experiment(row, setting, seed)
    match row.kind:
        case "swarm":
            curve = swarm(experiment)
        case "centralised" | "alone":
            curve = single(experiment)
        case "diloco" | "server":
            curve = averaging(experiment)
    return Outcome(curve, experiment.memory)


class Experiment:
    """Model, texts and names of one row and seed."""

    def __init__(self, row: Row, setting: Setting, seed: int) -> None:
        self.row, self.setting, self.seed = row, setting, seed
        self.draft = draft_for(row, setting, seed)
        self.layout = UnitLayout(self.draft.model, self.draft.sync.shared_shards)
        self.texts = {name: load_text(name) for name in setting.domains}
        self.genesis = initial_state(self.layout)
        self.evaluator = Evaluator(self.draft, self.texts)
        self.names = [f"peer{index}" for index in range(PEERS)]
        self.experts = [unit.id for unit in self.layout.units if unit.kind == "expert"]
        self.run_name = f"quality-{seed}"
        self.checkpoints: dict[str, Moments] = {}
        self.tokens_per_step = self.draft.optimizer.sequences * self.draft.data.sequence_length

    def owned(self, peer: int) -> frozenset[UnitId]:
        """Experts of a peer: consecutive ones, as many as the row says; all where every peer trains everything."""
        if self.row.kind in ("centralised", "alone", "diloco"):
            return frozenset(self.experts)
        start = peer * len(self.experts) // PEERS
        return frozenset(self.experts[(start + i) % len(self.experts)] for i in range(self.row.owned))

    def text_of(self, peer: int) -> Text:
        """The domain on which a peer trains."""
        texts = list(self.texts.values())
        if self.row.split_domains:
            return texts[peer % len(texts)]
        return Text(np.concatenate([t.train for t in texts]), np.concatenate([t.held_out for t in texts]))

    def learner(self, peers: list[int], values: np.ndarray) -> Learner:
        """A learner that takes one micro-batch a step for each of `peers`."""
        texts, names = [self.text_of(peer) for peer in peers], [self.names[peer] for peer in peers]
        return Learner(self.draft, texts, self.run_name, names, self.owned(peers[0]), values)

    @property
    def memory(self) -> int:
        trained = self.layout.shared_size + len(self.owned(0)) * self.layout.expert_size
        return TRAINED_BYTES * trained + FROZEN_BYTES * (self.layout.total_size - trained)

    def due(self, step: int) -> bool:
        """Whether the curve gets a point after this step."""
        return step % max(1, self.setting.steps // CURVE_POINTS) == 0 or step == self.setting.steps


def single(experiment: Experiment) -> list[Point]:
    """One learner: with everybody's micro-batch in each step (a data centre), or with its own alone."""
    peers = list(range(PEERS)) if experiment.row.kind == "centralised" else [0]
    learner = experiment.learner(peers, experiment.genesis)
    curve = []
    for step in range(1, experiment.setting.steps + 1):
        learner.round = (step - 1) // experiment.row.every
        learner.step()
        if experiment.due(step):
            curve.append(Point(step, learner.tokens, 0.0, experiment.evaluator.loss(learner.all_values())))
    return curve


def averaging(experiment: Experiment) -> list[Point]:
    """All wait for all every few steps: DiLoCo with plain averaging, or the authors' server for SPES."""
    row, layout = experiment.row, experiment.layout
    learners = [experiment.learner([peer], experiment.genesis) for peer in range(PEERS)]
    values, curve, sent = experiment.genesis, [], 0.0
    owners = {e: [p for p in range(PEERS) if e in experiment.owned(p)] for e in experiment.experts}
    for step in range(1, experiment.setting.steps + 1):
        for learner in learners:
            learner.round = (step - 1) // row.every
            learner.step()
        if step % row.every == 0 or step == experiment.setting.steps:
            every = range(PEERS)
            values = np.concatenate(
                [
                    np.mean([learners[p].weights.values(unit.id).numpy() for p in owners.get(unit.id, every)], axis=0)
                    for unit in layout.units
                ]
            )
            sent += FP32 * (layout.shared_size + len(experiment.owned(0)) * layout.expert_size)
            for learner in learners:
                learner.set_all(values)
        if experiment.due(step):
            tokens = sum(learner.tokens for learner in learners)
            mean = np.mean([learner.all_values() for learner in learners], axis=0)
            curve.append(Point(step, tokens, sent, experiment.evaluator.loss(mean if row.kind == "diloco" else values)))
    return curve


class ModelTrainer:
    """The trainer of a simulated peer, with the real model (`spesd.sync.toys.SimulatedTrainer`)."""

    def __init__(self, experiment: Experiment, node: Node) -> None:
        self._experiment, self._node = experiment, node
        self._peer = experiment.names.index(node.name)
        self._learner: Learner | None = None
        self._commands: list[Callable[[], None]] = []
        self._snapshot: dict[UnitId, Values] = {}
        self._snapshot_round = -1
        self.tokens_per_step = experiment.tokens_per_step

    def own(self, agreed: Mapping[UnitId, Values], trained: Set[UnitId]) -> None:
        experts = [unit for unit in trained if unit in self._experiment.experts]
        fresh = self._learner is None
        if self._learner is None:
            values = np.concatenate([agreed[unit] for unit in self._experiment.layout.offsets])
            self._learner = self._experiment.learner([self._peer], values)
        self._learner.own(experts)
        if fresh:
            self._learner.restore(self._experiment.checkpoints.get(self._node.name, {}))
        for unit in set(self._experiment.experts) - set(experts):
            self._learner.weights.values(unit).copy_(torch.from_numpy(agreed[unit]))

    def step(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        assert self._learner is not None
        # by steps, not by rounds: a row with more or fewer rounds must not have another learning rate
        share = self._node.world.tokens / (PEERS * self.tokens_per_step)
        self._learner.round = int(share / self._experiment.row.every)
        self._learner.step()

    def take_snapshot(self, round_: int, taken: Callable[[], None]) -> None:
        def copy() -> None:
            assert self._learner is not None
            weights = self._learner.weights
            self._snapshot = {unit.id: weights.values(unit.id).numpy().copy() for unit in weights.trained}
            self._snapshot_round = round_
            taken()

        self._commands.append(copy)

    def snapshot_of(self, round_: int, unit: UnitId) -> Values | None:
        return self._snapshot.get(unit) if round_ == self._snapshot_round else None

    def moved(self, unit: UnitId, move: Move, round_: int) -> None:
        def apply() -> None:
            assert self._learner is not None
            values = self._learner.weights.values(unit)
            if self._learner.weights.is_trained(unit):
                values.add_(torch.from_numpy(move.shift))
            else:
                values.copy_(torch.from_numpy(move.agreed))

        self._commands.append(apply)

    def round_ended(self, report: RoundEnded) -> None:
        """As the daemon does, keep the moments now and then: a killed peer comes back with them."""
        if self._learner is not None and report.round % self._experiment.draft.sync.anchor_rounds == 0:
            self._experiment.checkpoints[self._node.name] = self._learner.moments()


def swarm(experiment: Experiment) -> list[Point]:
    """The real protocol over a simulated network; the loss is that of the agreed states."""
    row, layout, steps = experiment.row, experiment.layout, experiment.setting.steps
    sizes = {unit.id: unit.size for unit in layout.units}
    conditions = Conditions(delay=row.delay, step_seconds=(1.0, 1.0))
    world = World(
        sizes,
        experiment.draft.sync,
        conditions,
        experiment.seed,
        lambda node: ModelTrainer(experiment, node),
        Merging(
            experiment.draft.merge, experiment.experts, experiment.draft.model.layers, experiment.draft.sync.stagger
        ),
        experiment.draft.outer,
    )
    genesis = {unit: experiment.genesis[at : at + sizes[unit]] for unit, at in layout.offsets.items()}
    for peer, name in enumerate(experiment.names):
        world.place(name, row.owned, genesis, experiment.owned(peer)).step_seconds = 1.0 / row.speeds[peer]
    total = PEERS * steps * experiment.tokens_per_step
    point = total / CURVE_POINTS
    curve: list[Point] = []
    while world.tokens < total:
        world.run(1.0)
        if row.churn:
            _churn(world)
        if world.tokens >= min(total, point * (len(curve) + 1)):
            node = world.alive[0]
            values = np.concatenate([node.workshop.agreed[unit] for unit in layout.offsets])
            up = sum(line.up_bytes for line in world.network.lines.values()) / PEERS
            done = round(world.tokens / PEERS / experiment.tokens_per_step)
            curve.append(Point(done, world.tokens, up, experiment.evaluator.loss(values)))
    return curve


CHURN_SECONDS, AWAY_SECONDS = 60, 15
"""With churn one peer is killed every so many steps, and comes back after that many."""


def _churn(world: World) -> None:
    """Call once a second."""
    second = round(world.now) % CHURN_SECONDS
    if second == 0:
        world.kill(world.random.choice([node.name for node in world.alive]))
    elif second == AWAY_SECONDS:
        for node in list(world.nodes.values()):
            if not node.alive:
                world.restart(node.name)
