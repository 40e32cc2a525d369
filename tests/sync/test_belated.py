"""Contributions that miss their packet: taken up by a later one, once, and only while nothing else was accepted."""

from __future__ import annotations

import numpy as np
from sync_harness import chain_of, digest, entry, genesis, head, links, make_workshop, vector

from spesd.sync.belated import Belated
from spesd.sync.effects import Encode, Origin, Reduce
from spesd.sync.ledger import Contributor, Ledger
from spesd.sync.toys import MemoryBlobs

UNIT = "expert-0"
AGE = 4


def belated_after(*rounds: tuple[str, ...]) -> tuple[Belated, Ledger, Origin]:
    """A ledger in which each round accepts these peers, and the origin of a contribution made before all of them."""
    ledger, start = Ledger([UNIT]), head(0, 0)
    entries = []
    for peers in rounds:
        entries.append(entry(entries[-1].after if entries else start, *peers))
    ledger.chains[UNIT] = chain_of(start, entries)
    return Belated(ledger, AGE), ledger, Origin(1, digest("roster"), start)


def test_what_missed_its_packet_may_go_into_the_next() -> None:
    belated, _, origin = belated_after(("a",))
    assert belated.keep(UNIT, "b", origin, digest("b")) == []
    assert {peer: kept.blob for peer, kept in belated.usable(UNIT, ["a", "b"]).items()} == {"b": digest("b")}
    assert belated.usable(UNIT, ["a"]) == {}, "only of those who contribute to the round"
    assert belated.forget(newest=1 + AGE) == []


def test_nothing_is_usable_once_work_of_its_peer_was_accepted() -> None:
    belated, ledger, origin = belated_after(("a",), ("a", "b"))
    belated.keep(UNIT, "b", origin, digest("b"))
    assert belated.usable(UNIT, ["b"]) == {}
    assert belated.forget(newest=2) == [digest("b")]
    # made from a state since which nothing of it was accepted
    belated.keep(UNIT, "b", Origin(3, digest("roster"), ledger[UNIT].entries[-1].after), digest("later"))
    assert belated.usable(UNIT, ["b"]).keys() == {"b"}


def test_a_base_that_is_not_on_our_chain_is_not_built_on() -> None:
    belated, _, _ = belated_after(("a",))
    fork = links(head(0, 0), 1, salt="fork")[0].after
    belated.keep(UNIT, "b", Origin(1, digest("roster"), fork), digest("b"))
    assert belated.usable(UNIT, ["b"]) == {}
    assert belated.forget(newest=1) == [digest("b")]


def test_the_newest_counts_and_what_is_too_old_goes() -> None:
    belated, ledger, first = belated_after(("a",))
    second = Origin(2, digest("roster"), ledger[UNIT].entries[-1].after)
    assert belated.keep(UNIT, "b", first, digest("first")) == []
    assert belated.keep(UNIT, "b", second, digest("second")) == [digest("first")]
    assert belated.keep(UNIT, "b", first, digest("first")) == [digest("first")]
    assert belated.usable(UNIT, ["b"])["b"].origin == second
    assert belated.forget(newest=2 + AGE) == []
    assert belated.forget(newest=3 + AGE) == [digest("second")]


def test_a_packet_takes_it_only_as_made_for_the_round_it_was_made_for() -> None:
    shop, base, roster = make_workshop(), genesis(UNIT), digest("old roster")
    blob = shop.encode(Encode(1, roster, UNIT, base), vector(1, 2, 3, 4))
    assert blob is not None
    rows = (Contributor("b", 10, blob),)
    made = shop.reduce(Reduce(2, digest("roster"), UNIT, base, rows, belated={"b": Origin(1, roster, base)}))
    assert made.entry is not None and not made.refused
    for belated in ({}, {"b": Origin(1, digest("another"), base)}, {"b": Origin(1, roster, head(1, 1))}):
        refused = shop.reduce(Reduce(3, digest("roster"), UNIT, base, rows, belated=belated))
        assert refused.entry is None and "another round, roster or base" in refused.refused["b"]
    assert not np.any(shop.agreed[UNIT])


def test_one_that_is_gone_is_nobodys_fault_and_one_that_is_malformed_is_its_senders() -> None:
    blobs = MemoryBlobs()
    shop, base, roster = make_workshop(blobs), genesis(UNIT), digest("roster")
    good = shop.encode(Encode(2, roster, UNIT, base), vector(1, 2, 3, 4))
    assert good is not None
    rows = (
        Contributor("a", 10, good),
        Contributor("b", 10, digest("gone")),
        Contributor("c", 10, blobs.put(b"garbage")),
    )
    origin = Origin(1, digest("old roster"), base)
    made = shop.reduce(Reduce(2, roster, UNIT, base, rows, belated={"b": origin, "c": origin}))
    assert made.entry is not None and [c.peer for c in made.entry.contributors] == ["a"]
    assert made.refused.keys() == {"c"}
