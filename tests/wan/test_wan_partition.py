"""A swarm is cut in two and finds itself again."""

from __future__ import annotations

import os
import time

import pytest
from e2e_harness import is_shared
from wan_harness import HOME, WanPeer, WanSwarm, some_text, wan_draft

pytestmark = pytest.mark.timeout(240)

CUT_SECONDS = float(os.environ.get("SPESD_TEST_CUT_SECONDS", "20"))
"""From the cut to healing; every record of the other half has expired by then."""

LATE_ROUNDS = 12
"""By so many rounds of a second or two the halves have found each other, after a cut that was so short."""


@pytest.fixture(scope="module")
def four(swarm: WanSwarm) -> list[WanPeer]:
    """Four peers that train."""
    draft = wan_draft(swarm.folder / "draft.toml", some_text(swarm.folder))
    peers = swarm.together(draft, ("a", "b", "c", "d"), train_experts=2, max_tokens_per_second=32.0)
    swarm.links(HOME)
    return peers


def test_two_halves_become_one_swarm_again(swarm: WanSwarm, four: list[WanPeer]) -> None:
    swarm.until_agreed(1)
    cut = time.monotonic()
    swarm.rig.partition(*({peer.node for peer in half} for half in (four[:2], four[2:])))
    swarm.until("each half is alone", lambda: all(peer.status.peers_live == 2 for peer in four), 60)
    before = {peer.name: peer.reached for peer in four}
    swarm.until("each half goes on", lambda: all(peer.reached > before[peer.name] + 1 for peer in four), 60)
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
