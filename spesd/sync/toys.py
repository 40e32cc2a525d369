"""What stands for a volunteer's machine in a simulated swarm: blobs in memory, toy signatures, a trainer that walks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spesd.sync import effects as fx
from spesd.sync.codec import Values
from spesd.sync.ledger import PeerId, UnitId


class MemoryBlobs:
    """Blobs in a dictionary."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def get(self, hash: str) -> bytes:
        return self.data[hash]

    def put(self, data: bytes, *, durable: bool = False) -> str:
        name = blake3(data).hexdigest()
        self.data[name] = data
        return name


class ToySigner:
    """Stands for the identity keys: a signature is a hash over the signer's name."""

    def __init__(self, me: PeerId) -> None:
        self._me = me

    def sign(self, data: bytes) -> bytes:
        return blake3(self._me.encode() + data).digest()

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return blake3(peer.encode() + data).digest() == signature


@dataclass(frozen=True, slots=True)
class Move:
    """What a trainer learns when the agreed state of a unit moves: the shift, and of whose work it takes account."""

    shift: Values
    agreed: Values
    accepted: tuple[Values, ...] = ()
    returned: tuple[Values, ...] = ()


class SimulatedTrainer(Protocol):
    """What a node needs of its trainer. Commands given between two steps take effect, in order, at the next."""

    tokens_per_step: int

    def own(self, agreed: Mapping[UnitId, Values], trained: Set[UnitId]) -> None:
        """Train exactly these units; those that are new, or all at the first call, start from their agreed states."""
        ...

    def step(self) -> None: ...

    def take_snapshot(self, round_: int, taken: Callable[[], None]) -> None: ...

    def snapshot_of(self, round_: int, unit: UnitId) -> Values | None: ...

    def moved(self, unit: UnitId, move: Move, round_: int) -> None: ...

    def round_ended(self, report: fx.RoundEnded) -> None: ...


@dataclass(slots=True)
class ToyTrainer:
    """Walks at random instead of learning. `unaccepted` keeps an independent account of the protocol's invariant."""

    generator: np.random.Generator
    tokens_per_step: int = 100
    theta: dict[UnitId, Values] = field(default_factory=dict)
    unaccepted: dict[UnitId, NDArray[np.float64]] = field(default_factory=dict)
    snapshot: dict[UnitId, Values] = field(default_factory=dict)
    snapshot_round: int = -1
    commands: list[Callable[[], None]] = field(default_factory=list)

    def own(self, agreed: Mapping[UnitId, Values], trained: Set[UnitId]) -> None:
        self.obey()  # what was asked for before belongs to the units trained before
        for unit in sorted(self.theta.keys() - trained):
            del self.theta[unit], self.unaccepted[unit]
        for unit in sorted(trained - self.theta.keys()):
            self.theta[unit] = agreed[unit].copy()
            self.unaccepted[unit] = np.zeros(agreed[unit].shape)

    def take_snapshot(self, round_: int, taken: Callable[[], None]) -> None:
        def copy() -> None:
            self.snapshot = {unit: values.copy() for unit, values in self.theta.items()}
            self.snapshot_round = round_
            taken()

        self.commands.append(copy)

    def snapshot_of(self, round_: int, unit: UnitId) -> Values | None:
        return self.snapshot.get(unit) if round_ == self.snapshot_round else None

    def moved(self, unit: UnitId, move: Move, round_: int) -> None:
        def apply() -> None:
            if unit in self.theta:
                self.theta[unit] += move.shift
                self.unaccepted[unit] += sum(move.returned, np.float64(0)) - sum(move.accepted, np.float64(0))

        if unit in self.theta:
            self.commands.append(apply)

    def round_ended(self, report: fx.RoundEnded) -> None:
        pass

    def obey(self) -> None:
        """Carry out what was asked for since the last step."""
        commands, self.commands = self.commands, []
        for command in commands:
            command()

    def step(self) -> None:
        """One local step: obey commands, then move every trained unit."""
        self.obey()
        for unit, values in self.theta.items():
            before = values.astype(np.float64)
            values += (1e-3 * self.generator.standard_normal(values.size)).astype(np.float32)  # noqa: PLW2901
            self.unaccepted[unit] += values - before
