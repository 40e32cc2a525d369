"""One prepared data set for all end-to-end tests, and swarms that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_harness import Swarm

from spesd.data.prepare import prepare

SENTENCE = "The {0} peer of a swarm trains its own experts, number {1}, and averages what all of them share.\n"


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards: prepared once, learnt quickly."""
    texts, folder = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("shards")
    for number in range(20):
        lines = (SENTENCE.format(("first", "second", "third")[line % 3], number * line) for line in range(200))
        (texts / f"{number}.txt").write_text("".join(lines))
    prepare([texts], folder, held_out_share=0.1)
    return folder


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A swarm without peers, shared by the tests of a module; whatever still runs at the end is killed."""
    swarm = Swarm(tmp_path_factory.mktemp("swarm"))
    yield swarm
    swarm.close()
