"""A rig of six nodes for each module, where the machine can make one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wan_harness import LAN, WanSwarm

from bench.wan.rig import CannotEmulate, Rig

NODES = 6


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Network namespaces joined by emulated links."""
    try:
        with Rig(dict.fromkeys(range(1, NODES + 1), LAN)) as rig:
            yield rig
    except CannotEmulate as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def swarm(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WanSwarm]:
    """A swarm without peers; whatever still runs at the end is killed."""
    swarm = WanSwarm(tmp_path_factory.mktemp("wan"), rig)
    yield swarm
    swarm.close()
