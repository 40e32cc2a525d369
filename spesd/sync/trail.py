"""Trails: of the ways that somebody tells from our state of a unit to his, the one of fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from spesd.sync.ledger import Chain, Entry, Head, shortest_way
from spesd.sync.messages import Trail
from spesd.sync.pipeline import Step, TakeState


def plan(trail: Trail, head: Head | None, state_bytes: int, lazy: bool = False) -> tuple[list[Step], Head]:
    """The steps from `head` along `trail`, and the state to which they lead. Raises ValueError if it has a gap.

    Packets are replayed unless a full state of `state_bytes` and the packets after it are fewer bytes. A unit that is
    followed lazily is taken to its last refresh, by the fewest packets. No steps if our head is on the trail no more.
    """
    entries = _checked(trail)
    anchor = trail.anchor.head() if trail.anchor else None
    packets = _packets(entries, head, lazy)
    if anchor is None:
        if not entries:
            raise ValueError("neither a state nor a packet")
        return list(packets), (packets or entries)[-1].after
    account = _account(trail, entries, anchor)
    replay = _replay(entries, anchor)
    if lazy:
        replay = to_last_refresh(replay, anchor)
    if packets and _size(packets) <= state_bytes + _size(replay):
        return list(packets), packets[-1].after
    common = trail.common.head() if trail.common else None
    return [TakeState(anchor, common, account), *replay], replay[-1].after if replay else anchor


def to_last_refresh(entries: Sequence[Entry], start: Head) -> list[Entry]:
    """The shortest way from `start` to the last refresh among `entries`; empty if there is none."""
    last = max((at for at, entry in enumerate(entries) if entry.base is not None), default=-1)
    return shortest_way(entries[: last + 1], start)


def _checked(trail: Trail) -> list[Entry]:
    entries = [info.entry() for info in trail.entries]
    for before, after in pairwise(entries):
        if not after.follows(before.after):
            raise ValueError(f"gap between versions {before.after.version} and {after.before.version}")
    if any(entry.unit != trail.unit for entry in entries):
        raise ValueError("entries of another unit")
    return entries


def _packets(entries: list[Entry], head: Head | None, lazy: bool) -> list[Entry]:
    """The way from `head` by packets alone; empty if there is none."""
    after = Chain(entries=entries).after(head) if head is not None else None
    if not after:
        return []
    assert head is not None
    return (to_last_refresh(after, head) or after) if lazy else after


def _account(trail: Trail, entries: list[Entry], anchor: Head) -> tuple[Entry, ...]:
    """Everything that was accepted between the newest common state and the anchor: our work may be in it."""
    common = trail.common.head() if trail.common else None
    floor = common.version if common else -1
    starts = {entries[0].before, entries[0].start, *(entry.after for entry in entries)} if entries else {anchor}
    if common is not None and common.version < anchor.version and common not in starts:
        raise ValueError(f"no account of what follows version {common.version}")
    return tuple(e for e in entries if floor < e.after.version <= anchor.version)


def _replay(entries: list[Entry], anchor: Head) -> list[Entry]:
    for at, entry in enumerate(entries):
        if entry.follows(anchor):
            return entries[at:]
    if entries and entries[-1].after != anchor:
        raise ValueError(f"entries do not pass through the anchor of version {anchor.version}")
    return []


def _size(entries: Sequence[Entry]) -> int:
    return sum(entry.size for entry in entries)
