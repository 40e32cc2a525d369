"""Four peers on home links: the swarm is cut in two and finds itself again, and a line collapses."""

from __future__ import annotations

import os
import time

import pytest
from e2e_harness import is_shared
from wan_harness import HOME, WanPeer, WanSwarm, some_text, wan_draft

from spesd.api.schema import UnitResult

pytestmark = pytest.mark.timeout(240)

CUT_SECONDS = float(os.environ.get("SPESD_TEST_CUT_SECONDS", "20"))
"""From the cut to healing; every record of the other half has expired by then."""

ROUND_SECONDS = float(os.environ.get("SPESD_TEST_ROUND_SECONDS", "1"))
"""Least time from one round to the next."""

MODEL = {"layers": 2, "width": 96, "heads": 2, "expert_width": 96, "experts": 8, "top_k": 2, "common_expert": False}
"""About a megabyte up for each peer and round: half a second at full rate, more than four at 2 Mbit/s."""

SLOW_MBIT = 2.0
FULL_ROUNDS, SLOW_ROUNDS = 4, 6
"""Rounds that are compared, at full rate and with one slow line."""

LATE_ROUNDS = 12
"""By so many rounds of a second or two the halves have found each other, after a cut that was so short."""


@pytest.fixture(scope="module")
def four(swarm: WanSwarm) -> list[WanPeer]:
    """Four peers that train."""
    sync = {"min_round_seconds": ROUND_SECONDS}
    draft = wan_draft(swarm.folder / "draft.toml", some_text(swarm.folder), model=MODEL, sync=sync)
    peers = swarm.together(draft, ("a", "b", "c", "d"), train_experts=2, max_tokens_per_second=32.0)
    swarm.links(HOME)
    return peers


def test_two_halves_become_one_swarm_again(swarm: WanSwarm, four: list[WanPeer]) -> None:
    swarm.until_agreed(1)
    cut = time.monotonic()
    swarm.rig.partition(*({peer.node for peer in half} for half in (four[:2], four[2:])))
    swarm.until("each half is alone", lambda: all(peer.status.peers_live == 2 for peer in four), 60)
    before, patience = {peer.name: peer.reached for peer in four}, 60 + 3 * ROUND_SECONDS
    swarm.until("each half goes on", lambda: all(peer.reached > before[peer.name] + 1 for peer in four), patience)
    assert any(is_shared(line.split()[0]) for line in swarm.disagreements(four)), "the halves have not gone apart"
    swarm.until("the cut is over", lambda: time.monotonic() - cut > CUT_SECONDS, CUT_SECONDS + 1)

    swarm.rig.heal()
    healed, reached = time.monotonic(), max(peer.reached for peer in four)
    swarm.until("a round of all four ends", lambda: bool(common_rounds(four, reached)), 90)
    first, together = min(common_rounds(four, reached)), time.monotonic() - healed
    swarm.until("the forks are settled", lambda: is_agreed(swarm, four, first), 60)
    rounds = common_rounds(four, reached)
    print(
        f"\ncut for {healed - cut:.0f} s; the first round of all four has ended {together:.1f} s after healing, "
        f"{first - reached} rounds on; all agree after {time.monotonic() - healed:.1f} s and {len(rounds)} of these"
    )
    assert len(rounds) <= 2, swarm.report()
    assert first <= reached + LATE_ROUNDS or CUT_SECONDS > 30, swarm.report()


def common_rounds(peers: list[WanPeer], after: int) -> set[int]:
    """Rounds later than `after` that have ended everywhere with everybody in them."""
    ended = ({round_.number for round_ in peer.rounds() if len(round_.members) == len(peers)} for peer in peers)
    return {number for number in set.intersection(*ended) if number > after}


def is_agreed(swarm: WanSwarm, peers: list[WanPeer], since: int) -> bool:
    """Whether all show the same states: of every unit that moves one not older than round `since`."""
    for unit in (status.unit for status in peers[0].status.units):
        heads = {(peer.versions[unit], peer.track.versions[unit].get(peer.versions[unit])) for peer in peers}
        common = set.intersection(*(set(peer.track.versions[unit].items()) for peer in peers))
        if len(heads) > 1 and max(common, default=(0, ""))[0] < since:
            return False
    return not swarm.disagreements(peers)


def test_a_line_that_collapses_costs_the_others_one_deadline(swarm: WanSwarm, four: list[WanPeer]) -> None:
    *fast, slow = four
    healed = max(peer.reached for peer in four)
    swarm.until("rounds of all end", lambda: len(common_rounds(four, healed)) >= FULL_ROUNDS, 60)
    usual = [seconds_of(fast, number) for number in common_rounds(four, healed)]
    collapsed, since = max(peer.reached for peer in four), time.monotonic()
    swarm.links(HOME.model_copy(update={"up": SLOW_MBIT}), slow)

    # three stages of ten seconds in each of these rounds would take three times as long
    swarm.until("the others go on", lambda: len(ended_rounds(fast, collapsed)) >= SLOW_ROUNDS, 60)
    took, numbers = time.monotonic() - since, sorted(ended_rounds(fast, collapsed))
    swarm.until("the slow peer contributes", lambda: bool(accepted_from(slow, fast, collapsed)), 60)
    print(
        f"\nthe others could go on after {min(usual):.1f} to {max(usual):.1f} s; with one at {SLOW_MBIT:g} Mbit/s "
        f"after {[round(seconds_of(fast, number), 1) for number in numbers]}, {took:.0f} s for "
        f"{max(numbers) - collapsed} rounds; it contributed to {accepted_from(slow, fast, collapsed)}"
    )
    swarm.links(HOME, slow)
    swarm.until_agreed(1)


def ended_rounds(peers: list[WanPeer], after: int) -> set[int]:
    """Rounds later than `after` that have ended at all of these peers."""
    return set.intersection(*({round_.number for round_ in peer.rounds() if round_.number > after} for peer in peers))


def seconds_of(peers: list[WanPeer], number: int) -> float:
    """How long it took until all of these peers that were in a round could go on to the next."""
    return max(round_.own_seconds for peer in peers for round_ in peer.rounds() if round_.number == number)


def accepted_from(peer: WanPeer, others: list[WanPeer], after: int) -> list[int]:
    """Rounds later than `after` in which the others committed a shared unit with this peer's work in it."""
    name, done = peer.status.peer, (UnitResult.COMMITTED, UnitResult.PARTIAL)
    return sorted(
        {
            round_.number
            for other in others
            for round_ in other.rounds()
            if round_.number > after and name in round_.members
            for unit, outcome in round_.results.items()
            if is_shared(unit) and outcome.result in done and name not in outcome.missing
        }
    )
