"""State, reason and particulars of a peer that takes part: the first thing that a volunteer wants to know."""

from __future__ import annotations

from spesd.api.headline import unit_name
from spesd.api.schema import Reason, State
from spesd.daemon.trainer import TrainerState
from spesd.daemon.volunteer import Volunteer
from spesd.swarm.transport import Transport
from spesd.train.link import FailureReason

Situation = tuple[State, Reason, str]


def situation(volunteer: Volunteer, transport: Transport) -> Situation:
    """The most pressing reason first; `NONE` if all is as it should be."""
    state, trainer, peer = volunteer.state, volunteer.trainer, volunteer.peer
    if not transport.is_up:
        return state, Reason.NETWORK_RESTARTING, ""
    if volunteer.conductor.disk_error:
        return state, Reason.DISK_FULL, volunteer.conductor.disk_error
    if trainer.state is TrainerState.RESTARTING:
        out_of_memory = trainer.failure.startswith(FailureReason.OUT_OF_MEMORY)
        return state, Reason.NO_MEMORY if out_of_memory else Reason.TRAINER_RESTARTING, trainer.failure
    if not peer.ledger.complete:
        return state, Reason.FETCHING_STATES, f"{len(peer.ledger.heads())} of {len(peer.context.sizes)} units"
    if trainer.state is not TrainerState.TRAINING:
        return state, Reason.STARTING_TRAINER, ""
    behind = sorted(set(peer.catchup.behind()) & peer.trained)
    if behind and peer.idle:
        more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
        return state, Reason.CATCHING_UP, f"{unit_name(behind[0])}{more}"
    if not peer.context.live:
        return state, Reason.ALONE, ""
    return state, Reason.NONE, ""
