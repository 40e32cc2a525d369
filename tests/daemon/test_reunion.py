"""When absent peers are looked for again."""

from __future__ import annotations

import pytest

from spesd.daemon.reunion import LONGEST, SHORTEST, Reunion
from spesd.swarm.known_peers import KnownPeers


def test_peers_just_lost_are_looked_for_often_and_those_long_gone_now_and_then() -> None:
    reunion = Reunion(0.0)
    reunion.saw(0.0, ["me", "a", "b"])
    reunion.dialled(9000.0)
    assert reunion.seconds_left(9000.0) == LONGEST
    reunion.saw(9001.0, ["me", "a"])
    assert reunion.seconds_left(9001.0) <= SHORTEST, "a loss ends the long pause"
    reunion.dialled(9001.0)
    assert reunion.seconds_left(9002.0) == SHORTEST - 1
    reunion.dialled(9061.0)
    assert reunion.seconds_left(9061.0) == pytest.approx(6.0), "a split of a minute is found to be over within seconds"
    reunion.saw(9900.0, ["me", "a", "b"])
    reunion.dialled(9900.0)
    assert reunion.seconds_left(9900.0) == LONGEST, "who has come back is not looked for"


def test_a_restarted_peer_looks_for_those_it_knew_soon() -> None:
    assert Reunion(500.0).seconds_left(500.0) == SHORTEST


def test_the_half_that_is_here_does_not_hide_the_half_that_is_not(tmp_path) -> None:
    known = KnownPeers(tmp_path / "known_peers.json")
    names = [f"Qm{letter * 44}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghij"]
    known.update({name: [f"/ip4/10.0.0.1/tcp/1/p2p/{name}"] for name in names})
    here = names[4:]  # seen last, and more than are dialled at once
    known.update({name: [f"/ip4/10.0.0.2/tcp/1/p2p/{name}"] for name in here})
    assert not any(name in address for address in known.addresses() for name in names[:4])
    assert {address.rpartition("/")[2] for address in known.addresses(without=here)} == set(names[:4])
