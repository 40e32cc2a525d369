"""Messages: everything from outside is checked, and everything of ours fits the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync_harness import digest, entry, head, links

from spesd.swarm.wire import MAX_HEADER_BYTES, pack, unpack
from spesd.sync.ledger import Head
from spesd.sync.messages import (
    KINDS,
    Announce,
    Call,
    EntryInfo,
    HeadInfo,
    Heads,
    Join,
    Message,
    Ready,
    Roster,
    RosterUnit,
    SignedRoster,
    Trail,
    TrailRequest,
    parse,
)

HEAD = HeadInfo.of(head(3, 30))
ROSTER = Roster(
    round=4,
    attempt=1,
    coordinator="QmA",
    tokens={"QmA": 10, "QmB": 20},
    units={"shared-0": RosterUnit(head=HEAD, contributors=["QmA", "QmB"])},
)
MESSAGES: list[Message] = [
    Ready(round=5),
    Call(round=5, attempt=2, seconds=3.5),
    Join(round=5, attempt=2, tokens=100, units={"expert-7": HEAD}),
    SignedRoster(roster=ROSTER, signature=b"\x00\xff"),
    Announce(entries=[EntryInfo.of(entry(head(0, 0), "a", "b"))]),
    Heads(round=4, heads={"shared-0": HEAD}, reply=True),
    TrailRequest(units={"shared-0": [HEAD], "expert-0": []}),
    Trail(unit="expert-0", common=None, anchor=HEAD, entries=[EntryInfo.of(row) for row in links(head(3, 30), 2)]),
]


def over_the_wire(message: Message) -> Message:
    body = pack({"kind": type(message).__name__, "message": message.model_dump()})
    read = unpack(body, MAX_HEADER_BYTES)
    return parse(read["kind"], read["message"])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert over_the_wire(message) == message


def test_every_kind_is_tried_above() -> None:
    assert {type(message).__name__ for message in MESSAGES} == set(KINDS)


def test_an_entry_and_a_head_come_back_as_they_were() -> None:
    row = entry(head(0, 0), "a", "b")
    assert EntryInfo.of(row).entry() == row
    assert HEAD.head() == head(3, 30)


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("Unheard", {}, "Unheard"),
        ("Message", {}, "Message"),
        ("Ready", {}, "round"),
        ("Ready", {"round": 1, "extra": 1}, "extra"),
        ("Ready", {"round": "1"}, "round"),
        ("Ready", {"round": 1.0}, "round"),
        ("Ready", {"round": True}, "round"),
        ("Ready", {"round": None}, "round"),
        ("Ready", {"round": -1}, "round"),
        ("Ready", {"round": 1 << 41}, "round"),
        ("Call", {"round": 1, "attempt": 1, "seconds": float("nan")}, "seconds"),
        ("Call", {"round": 1, "attempt": 1, "seconds": float("inf")}, "seconds"),
        ("Call", {"round": 1, "attempt": 1, "seconds": 0.0}, "seconds"),
        ("Call", {"round": 1, "attempt": 1, "seconds": 3601.0}, "seconds"),
        ("Join", {"round": 1, "attempt": 1, "tokens": -1, "units": {}}, "tokens"),
        ("Join", {"round": 1, "attempt": 1, "tokens": (1 << 28) + 1, "units": {}}, "tokens"),
        ("Join", {"round": 1, "attempt": 1, "tokens": 1, "units": {"weights": HEAD.model_dump()}}, "weights"),
        ("Join", {"round": 1, "attempt": 1, "tokens": 1, "units": {"expert-123456": HEAD.model_dump()}}, "expert-1"),
        ("Join", {"round": 1, "attempt": 1, "tokens": 1, "units": []}, "units"),
        ("Heads", {"round": 1, "heads": {"shared-0": {"version": 1, "hash": "0" * 64}}, "reply": False}, "weight"),
        ("Heads", {"round": 1, "heads": {}, "reply": 1}, "reply"),
        ("SignedRoster", {"roster": ROSTER.model_dump(), "signature": b"x" * 4097}, "signature"),
        ("SignedRoster", {"roster": ROSTER.model_dump() | {"tokens": {}}, "signature": b""}, "tokens"),
        ("Announce", {"entries": []}, "entries"),
        ("TrailRequest", {"units": {}}, "units"),
        ("TrailRequest", {"units": {"shared-0": [HEAD.model_dump()] * 257}}, "shared-0"),
        ("Trail", {"unit": "shared-0", "common": None, "anchor": None}, "entries"),
    ],
)
def test_what_is_wrong_is_refused_and_named(kind: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse(kind, body)


@pytest.mark.parametrize(
    "text", ["0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", "0" * 64 + "\n", "g" * 64, 0, b"0" * 64]
)
def test_what_is_no_hash_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="hash"):
        HeadInfo.model_validate({"version": 1, "hash": text, "weight": 1})


@pytest.mark.parametrize("peer", ["", "a" * 97, "a b", "../x", "a\n", "é"])
def test_what_is_no_peer_is_refused(peer: str) -> None:
    with pytest.raises(ValueError, match="tokens"):
        Roster.model_validate(ROSTER.model_dump() | {"tokens": {peer: 1}, "units": {}})


@pytest.mark.parametrize("contributors", [["QmA", "QmA"], ["QmA", "QmStranger"]], ids=["twice", "no member"])
def test_a_roster_whose_contributors_are_not_its_members_is_refused(contributors: list[str]) -> None:
    units = {"shared-0": {"head": HEAD.model_dump(), "contributors": contributors}}
    with pytest.raises(ValueError, match="shared-0"):
        parse("SignedRoster", {"roster": ROSTER.model_dump() | {"units": units}, "signature": b""})


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_values_give_a_message_or_a_value_error(kind: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(KINDS[kind].model_fields)) | st.text(max_size=5)
    body = data.draw(st.dictionaries(names, plain, max_size=5))
    try:
        parse(kind, body)
    except ValueError:
        return


def test_an_entry_that_contradicts_itself_is_a_value_error() -> None:
    fields = EntryInfo.of(entry(head(0, 0))).model_dump()
    with pytest.raises(ValueError, match="weight"):
        EntryInfo.model_validate(fields | {"after": fields["after"] | {"weight": 99}}).entry()


def peer_id(index: int) -> str:
    return f"Qm{digest(str(index))[:44]}"


def test_the_heads_of_a_thousand_units_fit_the_wire() -> None:
    big = HeadInfo.of(Head(1 << 24, digest("x"), 1 << 62))
    message = Heads(round=1 << 24, heads={f"expert-{index:05d}": big for index in range(1000)}, reply=False)
    assert over_the_wire(message) == message


def test_a_roster_of_fifty_peers_fits_the_wire() -> None:
    members = [peer_id(index) for index in range(50)]
    units = {f"shared-{index}": RosterUnit(head=HEAD, contributors=members) for index in range(16)}
    units |= {f"expert-{index}": RosterUnit(head=HEAD, contributors=members[:4]) for index in range(128)}
    roster = Roster(round=1, attempt=1, coordinator=members[0], tokens=dict.fromkeys(members, 1 << 28), units=units)
    message = SignedRoster(roster=roster, signature=b"x" * 512)
    assert over_the_wire(message) == message


def test_a_trail_of_a_shared_unit_of_fifty_peers_fits_the_wire() -> None:
    """Two anchors apart, eight rounds each, and all peers contribute to every one of them."""
    members = [peer_id(index) for index in range(50)]
    rows = [entry(head(0, 0), *members, unit="shared-0", weight=1 << 30)]
    while len(rows) < 16:
        rows.append(entry(rows[-1].after, *members, unit="shared-0", weight=1 << 30))
    message = Trail(unit="shared-0", common=HEAD, anchor=HEAD, entries=[EntryInfo.of(row) for row in rows])
    assert over_the_wire(message) == message
