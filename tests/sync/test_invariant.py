"""The invariant: `theta - agreed` is exactly the work that was done and that the agreed state does not contain.

All values are whole numbers, so that fp32 is exact and so is the comparison. The account of the test knows nothing of
the protocol's: it looks into the tree of all states which contributions lie on the way to the present one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sync_harness import SIZES, digest, genesis, make_workshop, vector

from spesd.sync import packet
from spesd.sync.codec import Fp32, Values
from spesd.sync.effects import Adopt, Commit, Encode
from spesd.sync.ledger import Chain, Contributor, Entry, Head
from spesd.sync.rebase import shift
from spesd.sync.simulation import RUN
from spesd.sync.toys import MemoryBlobs
from spesd.sync.work import OwnWork

UNIT, ME, KEEP = "expert-0", "me", 100
whole = st.lists(st.integers(-8, 8), min_size=SIZES[UNIT], max_size=SIZES[UNIT])


@dataclass
class State:
    """A node in the tree of agreed states: its values, the way to it, and which of my contributions it contains."""

    values: Values
    way: tuple[Entry, ...] = ()
    mine: frozenset[str] = frozenset()
    offered: list[str] = field(default_factory=list)


class OnePeer(RuleBasedStateMachine):
    """A peer that trains, contributes, and is led through a forking swarm."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs = MemoryBlobs()
        self.shop = make_workshop(self.blobs)
        self.work = OwnWork(ME, KEEP)
        self.chain = Chain([genesis(UNIT)])
        zero = np.zeros(SIZES[UNIT], np.float32)
        self.states = {genesis(UNIT): State(zero)}
        self.theta, self.done = zero.copy(), zero.astype(np.float64)
        self.deltas: dict[str, Values] = {}
        self.round = itertools.count(1)

    @property
    def head(self) -> Head:
        assert self.chain.head is not None
        return self.chain.head

    def discard(self, blobs: list[str]) -> None:
        for blob in blobs:
            self.blobs.data.pop(blob, None)

    # What happens to the peer ----------------------------------------------------------------------------------------

    @rule(step=whole)
    def trains(self, step: list[int]) -> None:
        self.theta += vector(*step)
        self.done += step

    @rule()
    def contributes(self) -> None:
        blob = self.shop.encode(Encode(next(self.round), digest("roster"), UNIT, self.head), self.theta.copy())
        assert blob is not None
        self.deltas[blob] = self.shop.contribution(UNIT, blob)
        self.states[self.head].offered.append(blob)
        self.discard(self.work.offered(UNIT, blob))

    @rule(data=st.data(), theirs=whole)
    def somewhere_a_round_ends(self, data: st.DataObject, theirs: list[int]) -> None:
        """Any state gets a successor, with a contribution of mine that was made for it, or without."""
        base = data.draw(st.sampled_from(list(self.states)))
        mine = data.draw(st.sampled_from([None, *self.states[base].offered]))
        self.extend(base, mine, vector(*theirs))

    @rule(data=st.data(), mine=st.booleans(), theirs=whole)
    def a_round_ends(self, data: st.DataObject, mine: bool, theirs: list[int]) -> None:
        """The ordinary case: a successor of my own state."""
        offered = self.states[self.head].offered
        self.extend(self.head, data.draw(st.sampled_from(offered)) if mine and offered else None, vector(*theirs))

    def extend(self, base: Head, mine: str | None, theirs: Values) -> None:
        round_, before = next(self.round), self.states[base]
        names = [Contributor("other", 4, digest(f"{round_}"))] + ([Contributor(ME, 4, mine)] if mine else [])
        # a mean of two whole numbers, and of their means, stays exact
        update = (theirs + self.deltas[mine]) / np.float32(2) if mine else theirs
        values = before.values + update
        after = Head(round_, digest_of(values), base.weight + 4 * len(names))
        header = packet.Header(
            packet.Kind.PACKET,
            RUN,
            1,
            base.version,
            round_,
            theirs.size,
            digest("r"),
            base.hash,
            after.hash,
            tuple(names),
        )
        data = packet.write(header, Fp32(), update.tobytes())
        self.blobs.put(values.tobytes())
        entry = Entry(UNIT, base, after, self.blobs.put(data), len(data), tuple(names))
        self.states[after] = State(values, (*before.way, entry), before.mine | ({mine} if mine else set()))

    def successors(self) -> list[Entry]:
        depth = len(self.states[self.head].way)
        ways = [state.way for state in self.states.values() if len(state.way) == depth + 1]
        return [way[-1] for way in ways if way[-1].before == self.head]

    @precondition(lambda self: self.successors())
    @rule(data=st.data())
    def commits(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.successors()))
        accepted = self.work.accepted_by(entry)
        self.theta += self.shop.commit(Commit(entry, accepted, anchor=False))
        self.chain.append(entry)
        self.discard(self.work.committed(entry, accepted))

    def forks(self) -> list[tuple[Head, Head]]:
        """(target, newest state of our history on the way to it) for all that part from our chain."""
        rows = []
        for target, state in self.states.items():
            way = [genesis(UNIT), *(entry.after for entry in state.way)]
            common = [head for head in self.chain.history() if head in way]
            if common and target not in self.chain.history():
                rows.append((target, common[-1]))
        return rows

    @precondition(lambda self: self.forks())
    @rule(data=st.data())
    def loses_a_fork_or_jumps_ahead(self, data: st.DataObject) -> None:
        target, common = data.draw(st.sampled_from(self.forks()))
        entries = [entry for entry in self.states[target].way if entry.after.version > common.version]
        accepted, returned = self.work.moved(UNIT, common, entries)
        self.theta += self.shop.adopt(Adopt(UNIT, target, accepted, returned))
        self.chain.reset(target)
        self.discard(self.work.adopted(UNIT, target.version, accepted, returned))

    @rule()
    def loses_its_trainer(self) -> None:
        self.discard(self.work.clear([UNIT]))
        self.theta = self.shop.agreed[UNIT].copy()
        # from now on only what is done after this counts, and nothing that is accepted is ours
        self.done[:] = 0
        for state in self.states.values():
            state.mine, state.offered = frozenset(), []

    # What must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_not_agreed_is_the_work_not_accepted(self) -> None:
        accepted = sum((self.deltas[blob].astype(np.float64) for blob in self.states[self.head].mine), np.float64(0))
        np.testing.assert_array_equal(self.theta.astype(np.float64) - self.shop.agreed[UNIT], self.done - accepted)

    @invariant()
    def what_may_be_accepted_or_returned_is_kept(self) -> None:
        offered = {blob for head in self.chain.history() for blob in self.states[head].offered}
        assert offered <= self.blobs.data.keys()


def digest_of(values: Values) -> str:
    return MemoryBlobs().put(values.tobytes())


OnePeer.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)
TestInvariant = OnePeer.TestCase


def test_the_shift_moves_theta_by_what_others_did() -> None:
    old, new, mine = vector(0, 0), vector(3, 5), vector(1, 1)
    np.testing.assert_array_equal(shift(old, new), vector(3, 5))
    np.testing.assert_array_equal(shift(old, new, accepted=[mine]), vector(2, 4))
    np.testing.assert_array_equal(shift(new, old, returned=[mine]), vector(-2, -4))


def offer_and_accept(work: OwnWork, count: int) -> list[str]:
    """Rounds in each of which our contribution is the only one."""
    before, blobs = genesis(UNIT), []
    for version in range(1, count + 1):
        blob = digest(f"blob {version}")
        after = Head(version, digest(f"state {version}"), before.weight + 1)
        entry = Entry(UNIT, before, after, digest(f"packet {version}"), 100, (Contributor(ME, 1, blob),))
        work.offered(UNIT, blob)
        work.committed(entry, work.accepted_by(entry))
        before = after
        blobs.append(blob)
    return blobs


def test_a_long_fork_returns_all_its_work_and_none_of_it_is_forgotten() -> None:
    """More rounds than may be on offer at a time: each may be accepted again when the lost chain wins after all."""
    work = OwnWork(ME, keep_rounds=20)
    blobs = offer_and_accept(work, 15)
    accepted, returned = work.moved(UNIT, genesis(UNIT), [])
    assert (accepted, set(returned)) == ((), set(blobs))
    assert work.adopted(UNIT, 16, accepted, returned) == []
    assert work.blobs() == set(blobs)


def test_old_work_is_forgotten_and_its_blobs_with_it() -> None:
    work = OwnWork(ME, keep_rounds=5)
    blobs = offer_and_accept(work, 12)
    assert work.blobs() == set(blobs[-6:])


def test_work_that_was_cleared_while_its_packet_was_applied_is_no_error() -> None:
    work = OwnWork(ME, keep_rounds=5)
    blob = digest("blob")
    work.offered(UNIT, blob)
    entry = Entry(UNIT, genesis(UNIT), Head(1, digest("s"), 1), digest("p"), 100, (Contributor(ME, 1, blob),))
    accepted = work.accepted_by(entry)
    assert accepted == (blob,)
    assert work.clear([UNIT]) == [blob]
    assert work.committed(entry, accepted) == []
    assert work.adopted(UNIT, 2, accepted, ()) == []
    assert work.blobs() == set()


def test_a_contribution_that_a_trail_lists_twice_is_accepted_once() -> None:
    work = OwnWork(ME, keep_rounds=5)
    blob = digest("blob")
    work.offered(UNIT, blob)
    first = Entry(UNIT, genesis(UNIT), Head(1, digest("s"), 1), digest("p"), 100, (Contributor(ME, 1, blob),))
    second = Entry(UNIT, first.after, Head(2, digest("t"), 2), digest("q"), 100, (Contributor(ME, 1, blob),))
    assert work.moved(UNIT, genesis(UNIT), [first, second]) == ((blob,), ())


def test_without_a_common_state_nothing_is_claimed() -> None:
    work = OwnWork(ME, keep_rounds=5)
    offer_and_accept(work, 3)
    assert work.moved(UNIT, None, []) == ((), ())
