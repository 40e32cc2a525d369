"""What is shown of the lines to other peers."""

from __future__ import annotations

from spesd.swarm.lines import KEPT_ANSWERS, MAX_PEERS, Lines
from spesd.swarm.traffic import WINDOW_SECONDS, Traffic

RELAY = "/ip4/203.0.113.7/tcp/4001/p2p/QmRelay/p2p-circuit"
DIRECT = "/ip4/203.0.113.8/tcp/4001"


def test_a_peer_is_relayed_when_every_connection_to_it_is() -> None:
    lines = Lines()
    lines.connected([("a", DIRECT), ("b", RELAY), ("c", RELAY), ("c", DIRECT)])
    assert lines.relayed == {"a": False, "b": True, "c": False}
    lines.connected([("a", RELAY)])
    assert lines.relayed == {"a": True}


def test_the_round_trip_is_the_quickest_of_the_last_answers() -> None:
    lines = Lines()
    assert lines.rtt("a") is None
    for seconds in (0.05, 0.2, 0.07):
        lines.answered("a", seconds)
    assert lines.rtt("a") == 0.05
    for _ in range(KEPT_ANSWERS):
        lines.answered("a", 0.3)
    assert lines.rtt("a") == 0.3
    for number in range(MAX_PEERS):
        lines.answered(f"peer {number}", 1.0)
    assert lines.rtt("a") is None


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = 100.0
    traffic = Traffic(clock=lambda: now)
    assert traffic.per_second("a") == (0.0, 0.0)
    for _ in range(20):
        traffic._add("a", 1000, 500)
        now += 1.0
    up, down = traffic.per_second("a")
    assert (up, down) == (1000.0, 500.0)
    now += 2 * WINDOW_SECONDS
    assert traffic.per_second("a") == (0.0, 0.0)
