"""What a daemon keeps on disk, and what it makes of damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spesd.config.manifest import SyncConfig
from spesd.daemon.state_dir import AlreadyRunning, StateDir
from spesd.daemon.store import ChainFile, Progress, Store, StoredBlobs
from spesd.sync.effects import Commit, Encode, Reduce
from spesd.sync.ledger import Chain, Contributor, Head
from spesd.sync.workshop import Workshop, state_hash

RUN, OTHER_RUN, UNIT, SIZE, ROSTER = "a" * 64, "b" * 64, "expert-0", 50, "c" * 64
SIZES = {UNIT: SIZE}


def make_workshop(store: Store) -> Workshop:
    return Workshop(RUN, SIZES, SyncConfig(local_steps=1), StoredBlobs(store.blobs))


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    folder = StateDir(tmp_path / "state")
    folder.acquire()
    return folder


@pytest.fixture
def chain(state_dir: StateDir) -> Chain:
    """Genesis and four rounds, with a second anchor after the second; on disk, as a daemon leaves it."""
    store = Store(state_dir, RUN)
    shop, random = make_workshop(store), np.random.default_rng(0)
    values = random.standard_normal(SIZE).astype(np.float32)
    chain = Chain([Head(0, state_hash(values), 0)])
    store.blobs.put(values.tobytes())
    shop.restore(UNIT, chain.anchors[0], values)
    for round_ in range(1, 5):
        base = chain.head
        assert base is not None
        moved = shop.agreed[UNIT] + np.float32(0.01) * random.standard_normal(SIZE).astype(np.float32)
        blob = shop.encode(Encode(round_, ROSTER, UNIT, base), moved)
        assert blob is not None
        entry = shop.reduce(Reduce(round_, ROSTER, UNIT, base, (Contributor("me", 10, blob),))).entry
        assert entry is not None
        shop.commit(Commit(entry, (), anchor=round_ == 2))
        chain.append(entry)
        if round_ == 2:
            chain.add_anchor()
    store.save_chain(UNIT, ChainFile.of(chain))
    return chain


def restore(state_dir: StateDir) -> tuple[dict[str, Chain], Workshop]:
    store = Store(state_dir, RUN)
    shop = make_workshop(store)
    return store.restore(SIZES, shop), shop


def damage(state_dir: StateDir, blob: str) -> None:
    path = Store(state_dir, RUN, owner=False).blobs.path(blob)
    path.write_bytes(b"x" + path.read_bytes()[1:])


def test_a_restart_finds_the_newest_state(state_dir: StateDir, chain: Chain) -> None:
    chains, shop = restore(state_dir)
    assert chains[UNIT] == chain
    assert shop.head(UNIT) == chain.head
    assert state_hash(shop.agreed[UNIT]) == chain.head.hash  # type: ignore[union-attr]


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_anchor_is_replaced_by_the_one_before(state_dir: StateDir, chain: Chain, which: int) -> None:
    damage(state_dir, chain.anchors[which].hash)
    chains, shop = restore(state_dir)
    assert shop.head(UNIT) == chains[UNIT].head == chain.head


def test_behind_a_damaged_packet_the_chain_is_cut(state_dir: StateDir, chain: Chain) -> None:
    damage(state_dir, chain.entries[-1].packet)
    chains, shop = restore(state_dir)
    assert chains[UNIT].head == shop.head(UNIT) == chain.entries[-1].before


def test_a_damaged_ledger_is_left_out(state_dir: StateDir, chain: Chain) -> None:
    (state_dir.ledger / f"{UNIT}.json").write_text('{"anchors": [')
    chains, shop = restore(state_dir)
    assert (chains, shop.head(UNIT)) == ({}, None)


def test_the_sweep_keeps_what_a_chain_needs(state_dir: StateDir, chain: Chain) -> None:
    store = Store(state_dir, RUN)
    stray = store.blobs.put(b"stray")
    kept = store.blobs.put(b"kept")
    chains, _ = restore(state_dir)
    assert store.sweep(chains, [kept]) >= 1
    assert store.blobs.has(kept) and not store.blobs.has(stray)
    assert restore(state_dir)[1].head(UNIT) == chain.head


def test_a_reader_beside_the_owner_removes_nothing(state_dir: StateDir, chain: Chain) -> None:
    unfinished = state_dir.blobs / "temporary" / "unfinished"
    unfinished.write_bytes(b"half")
    Store(state_dir, RUN, owner=False)
    assert unfinished.exists()


def test_unaccepted_work_is_taken_once(state_dir: StateDir) -> None:
    store, work = Store(state_dir, RUN), {UNIT: np.arange(SIZE, dtype=np.float32)}
    store.save_unaccepted(7, work)
    taken = store.take_unaccepted(newest_round=10, stale_rounds=20)
    np.testing.assert_array_equal(taken[UNIT], work[UNIT])
    assert store.take_unaccepted(newest_round=10, stale_rounds=20) == {}


@pytest.mark.parametrize(("run", "newest", "value"), [(RUN, 40, 1.0), (OTHER_RUN, 10, 1.0), (RUN, 10, np.nan)])
def test_stale_foreign_or_broken_work_is_dropped(state_dir: StateDir, run: str, newest: int, value: float) -> None:
    Store(state_dir, run).save_unaccepted(7, {UNIT: np.full(SIZE, value, np.float32)})
    assert Store(state_dir, RUN).take_unaccepted(newest, stale_rounds=20) == {}


def test_progress_of_another_run_is_not_taken_up(state_dir: StateDir) -> None:
    Store(state_dir, RUN).save_progress(Progress(run=RUN, owned=(UNIT,), position=8, tokens=1024))
    assert Store(state_dir, RUN).load_progress().position == 8
    assert Store(state_dir, OTHER_RUN).load_progress() == Progress(run=OTHER_RUN)


def test_a_state_dir_belongs_to_one_daemon(state_dir: StateDir) -> None:
    with pytest.raises(AlreadyRunning, match=r"pid \d+"):
        StateDir(state_dir.path).acquire()
    state_dir.release()
    StateDir(state_dir.path).acquire()
