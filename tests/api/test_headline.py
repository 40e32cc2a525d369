"""Line one of `spesd status`."""

import pytest

from spesd.api.headline import headline, ready_line
from spesd.api.schema import Reason, RoundStatus, State, Status, UnitOutcome, UnitResult, Waiting

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def line(state, **fields):
    return headline(Status(state=state, version="0", pid=1, uptime_s=0.0, **fields))


def current(**fields):
    return RoundStatus(number=12, committed=11, total=12, **fields)


@pytest.mark.parametrize(
    ("text", "state", "fields"),
    [
        ("starting", State.STARTING, {}),
        ("training · no round yet", State.TRAINING, {}),
        ("training · round 12 committed 11 of 12 units", State.TRAINING, {"round": current()}),
        (
            "joining · waiting for bootstrap (/ip4/10.0.0.1/tcp/1 refused, again in 4 s)",
            State.JOINING,
            {"reason": Reason.WAITING_FOR_BOOTSTRAP, "detail": "/ip4/10.0.0.1/tcp/1 refused, again in 4 s"},
        ),
        (
            "training · trainer restarting · round 12 committed 11 of 12 units",
            State.TRAINING,
            {"reason": Reason.TRAINER_RESTARTING, "round": current()},
        ),
        (
            "training · round 12 committed 11 of 12 units (expert 5: waiting for QmYyQSo1…, 3 s left)",
            State.TRAINING,
            {"round": current(waiting_for=[Waiting(unit="expert-5", peer=PEER, seconds_left=3.2)])},
        ),
        (
            "training · round 12 committed 11 of 12 units (waiting for peers, 9 s left; 1 more)",
            State.TRAINING,
            {"round": current(waiting_for=[Waiting(unit="shared-0", seconds_left=-1), Waiting(seconds_left=9)])},
        ),
        (
            "training · round 12 committed 11 of 12 units (expert 5: unchanged, no owner; 1 more)",
            State.TRAINING,
            {
                "round": current(
                    results={
                        "expert-4": UnitOutcome(result=UnitResult.COMMITTED),
                        "expert-5": UnitOutcome(result=UnitResult.UNCHANGED, detail="no owner"),
                        "expert-6": UnitOutcome(result=UnitResult.PARTIAL, missing=[PEER]),
                    }
                )
            },
        ),
        (
            "training · round 12 committed 11 of 12 units (expert 6: without QmYyQSo1…)",
            State.TRAINING,
            {"round": current(results={"expert-6": UnitOutcome(result=UnitResult.PARTIAL, missing=[PEER])})},
        ),
    ],
)
def test_headline(text, state, fields):
    assert line(state, **fields) == text


def test_ready_line():
    ready = Status(
        state=State.TRAINING,
        version="0",
        pid=7,
        uptime_s=0,
        run="abcdef0123",
        run_name="demo",
        peer=PEER,
        join="spesd start --join X",
    )
    assert (
        ready_line(ready)
        == "ready · run demo abcdef01 · peer QmYyQSo1… · pid 7 · others join with: spesd start --join X"
    )
