"""What status says first, for every way in which a peer may be less than well."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spesd.api.schema import Reason, State
from spesd.daemon.situation import situation
from spesd.daemon.trainer import TrainerState


def make(**changes: object) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A volunteer and its transport, all well but for `changes`."""
    facts = {
        "up": True, "disk": "", "trainer": TrainerState.TRAINING, "failure": "", "complete": True, "behind": [],
        "live": {"other"},
    } | changes  # fmt: skip
    ledger = SimpleNamespace(complete=facts["complete"], heads=lambda: {"shared-0": None})
    peer = SimpleNamespace(
        ledger=ledger,
        context=SimpleNamespace(live=facts["live"], sizes={"shared-0": 1, "expert-0": 1}),
        catchup=SimpleNamespace(behind=lambda: facts["behind"]),
        trained={"shared-0", "expert-0"},
        idle=True,
    )
    trainer = SimpleNamespace(state=facts["trainer"], failure=facts["failure"])
    conductor = SimpleNamespace(disk_error=facts["disk"])
    volunteer = SimpleNamespace(state=State.TRAINING, trainer=trainer, peer=peer, conductor=conductor)
    return volunteer, SimpleNamespace(is_up=facts["up"])


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({}, Reason.NONE, ""),
        ({"live": set()}, Reason.ALONE, ""),
        ({"behind": ["expert-0", "expert-7"]}, Reason.CATCHING_UP, "expert 0"),
        ({"behind": ["expert-7"]}, Reason.NONE, ""),
        ({"trainer": TrainerState.STARTING}, Reason.STARTING_TRAINER, ""),
        ({"complete": False}, Reason.FETCHING_STATES, "1 of 2 units"),
        ({"trainer": TrainerState.RESTARTING, "failure": "ended with code -9"}, Reason.TRAINER_RESTARTING, "-9"),
        ({"trainer": TrainerState.RESTARTING, "failure": "out_of_memory: cuda"}, Reason.NO_MEMORY, "cuda"),
        ({"disk": "No space left on device"}, Reason.DISK_FULL, "No space"),
        ({"up": False}, Reason.NETWORK_RESTARTING, ""),
    ],
)
def test_the_reason_names_what_is_wrong(changes: dict[str, object], reason: Reason, detail: str) -> None:
    state, got, text = situation(*make(**changes))  # type: ignore[arg-type]
    assert (state, got) == (State.TRAINING, reason)
    assert detail in text
