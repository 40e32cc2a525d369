"""What the local API shows: answers built from the daemon's parts, without changing any."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from spesd.api.schema import (
    Expert,
    HeldOut,
    Line,
    Neighbour,
    Peer,
    Phase,
    RoundRecord,
    RoundStatus,
    State,
    TrainerStatus,
    UnitOutcome,
    UnitResult,
    UnitStatus,
    UnitVersion,
    Waiting,
)
from spesd.daemon.trainer import Trainer
from spesd.swarm.rate import BYTES_PER_MBIT
from spesd.swarm.records import PeerRecord
from spesd.swarm.transport import Transport
from spesd.sync.effects import Outcome, RoundEnded, UnitReport
from spesd.sync.ledger import PeerId, UnitId
from spesd.sync.peer import SyncPeer
from spesd.sync.round import Round
from spesd.train import link

HISTORY = 32


def owners_of(records: Mapping[PeerId, PeerRecord], peer: SyncPeer) -> dict[UnitId, list[PeerId]]:
    """Live owners of every unit: of a shared shard all that train, of an expert those that claim it."""
    owners: dict[UnitId, list[PeerId]] = {unit: [] for unit in peer.context.sizes}
    claims = {name: set(record.owned) for name, record in records.items() if name != peer.context.me}
    if peer.training:
        claims[peer.context.me] = set(peer.context.owned)
    for name in sorted(claims):
        for unit in owners:
            if unit in claims[name] or (unit.startswith("shared") and claims[name]):
                owners[unit].append(name)
    return owners


def unit_statuses(records: Mapping[PeerId, PeerRecord], peer: SyncPeer) -> tuple[UnitStatus, ...]:
    """The agreed state of every unit that is known here."""
    owners, trained = owners_of(records, peer), peer.trained
    rows = []
    for unit, head in peer.ledger.heads().items():
        history = peer.ledger[unit].history()[-HISTORY:]
        rows.append(
            UnitStatus(
                unit=unit,
                version=head.version,
                hash=head.hash,
                owners=tuple(owners[unit]),
                mine=peer.training and unit in trained,
                history=tuple(UnitVersion(version=old.version, hash=old.hash) for old in history),
            )
        )
    return tuple(rows)


def neighbour(peer: PeerId, transport: Transport) -> Neighbour:
    """The line to a peer."""
    relayed, rtt = transport.lines.relayed.get(peer), transport.lines.rtt(peer)
    up, down = transport.traffic.per_second(peer)
    return Neighbour(
        peer=peer,
        line=Line.NONE if relayed is None else Line.RELAYED if relayed else Line.DIRECT,
        rtt_ms=round(1000 * rtt, 1) if rtt is not None else None,
        up_mbit=round(up / BYTES_PER_MBIT, 3),
        down_mbit=round(down / BYTES_PER_MBIT, 3),
    )


def peer(record: PeerRecord, me: PeerId, transport: Transport) -> Peer:
    """A peer as its record tells, and the line to it."""
    return Peer(
        **neighbour(record.peer, transport).model_dump(),
        me=record.peer == me,
        state=State(record.state) if record.state in set(State) else State.STARTING,
        round=record.round,
        owned=record.owned,
        addresses=record.addresses,
        version=record.version,
        age_s=max(0.0, time.time() - record.issued),
    )


def experts(records: Mapping[PeerId, PeerRecord], peer: SyncPeer) -> tuple[Expert, ...]:
    """The experts among the units."""
    return tuple(
        Expert(
            expert=int(row.unit.removeprefix("expert-")),
            owners=row.owners,
            version=row.version,
            hash=row.hash,
            mine=row.mine,
        )
        for row in unit_statuses(records, peer)
        if row.unit.startswith("expert-")
    )


def round_status(peer: SyncPeer, ended: Iterable[RoundEnded], now: float) -> RoundStatus:
    """The open round, or the last one that ended."""
    status = _newest_round(peer, ended, now)
    return status.model_copy(update={"local_steps": peer.member.pace.needed})


def _newest_round(peer: SyncPeer, ended: Iterable[RoundEnded], now: float) -> RoundStatus:
    current = peer.current_round()
    if current is not None:
        results = {unit: state.report for unit, state in current.units.items()}
        waiting = [Waiting(unit=u, peer=p, seconds_left=s) for u, p, s in current.waiting_for(now)]
        return _round(current.number, _phase(current), results, waiting)
    waited = peer.member.waiting_for()
    waiting = [Waiting(peer=waited[0], seconds_left=max(0.0, waited[1] - now))] if waited else []
    phase = Phase.GATHERING if waited else Phase.IDLE
    last = max(ended, key=lambda report: report.round, default=None)
    if last is None:
        return RoundStatus(number=peer.context.newest_round, total=len(peer.context.sizes), waiting_for=tuple(waiting))
    return _round(last.round, phase, last.units, waiting)


def _phase(current: Round) -> Phase:
    open_units = [state for state in current.units.values() if state.open]
    if all(state.entry is not None for state in open_units):
        return Phase.COMMITTING
    return Phase.REDUCING if any(state.reducing for state in open_units) else Phase.CONTRIBUTING


def _round(number: int, phase: Phase, results: Mapping[UnitId, UnitReport], waiting: Iterable[Waiting]) -> RoundStatus:
    committed = [r for r in results.values() if r.outcome in (Outcome.COMMITTED, Outcome.PARTIAL)]
    return RoundStatus(
        number=number,
        phase=phase,
        committed=len(committed),
        total=len(results),
        waiting_for=tuple(waiting),
        results=outcomes(results),
    )


def outcomes(results: Mapping[UnitId, UnitReport]) -> dict[str, UnitOutcome]:
    """Unit reports as the API names them."""
    return {
        unit: UnitOutcome(
            result=UnitResult(report.outcome),
            detail=report.why,
            missing=report.missing,
            seconds=round(report.seconds, 3),
        )
        for unit, report in results.items()
    }


def round_record(ended: RoundEnded) -> RoundRecord:
    """A round that is over."""
    return RoundRecord(
        number=ended.round,
        coordinator=ended.coordinator,
        members=ended.members,
        results=outcomes(ended.units),
        own_seconds=round(ended.own_ended - ended.started, 3),
        seconds=round(ended.ended - ended.started, 3),
    )


def trainer_status(trainer: Trainer) -> TrainerStatus:
    """The trainer process, from what it last said."""
    last = trainer.last
    seconds = last.seconds + last.snapshot_seconds + last.load_seconds + last.evaluate_seconds if last else 0.0
    return TrainerStatus(
        state=trainer.state,
        pid=trainer.pid,
        device=trainer.device,
        step=last.step if last else 0,
        tokens=trainer.tokens,
        tokens_per_second=last.tokens_per_second if last else 0.0,
        loss=last.loss if last else None,
        held_out=_held_out(trainer.held_out),
        first_held_out=_held_out(trainer.first_held_out),
        snapshot_share=last.snapshot_seconds / seconds if last and seconds else 0.0,
        load_share=last.load_seconds / seconds if last and seconds else 0.0,
        stalled_seconds=last.snapshot_seconds + last.load_seconds if last else 0.0,
        restarts=trainer.restarts,
    )


def _held_out(evaluated: link.Evaluated | None) -> HeldOut | None:
    return HeldOut(round=evaluated.round, loss=evaluated.loss) if evaluated is not None else None
