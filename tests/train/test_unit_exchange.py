"""The memory-mapped files between daemon and trainer."""

import numpy as np
import pytest

from spesd.config.manifest import ModelConfig
from spesd.model.units import UnitLayout
from spesd.train.exchange import ExchangeError, UnitFile

LAYOUT = UnitLayout(
    ModelConfig(layers=1, width=64, heads=2, expert_width=64, experts=3, top_k=1, vocabulary=64), shared_shards=3
)


def test_both_sides_see_the_same_units(tmp_path):
    writer = UnitFile.create(tmp_path / "x", LAYOUT)
    reader = UnitFile(tmp_path / "x", LAYOUT)
    for number, unit in enumerate(LAYOUT.units):
        writer.values(unit.id)[:] = number
    for number, unit in enumerate(LAYOUT.units):
        assert (reader.values(unit.id) == number).all()
        reader.release(unit.id)
        assert (reader.values(unit.id) == number).all()
    assert (np.fromfile(tmp_path / "x", dtype="<f4")[-LAYOUT.expert_size :] == len(LAYOUT.units) - 1).all()


def test_releasing_a_written_unit_loses_nothing(tmp_path):
    file = UnitFile.create(tmp_path / "x", LAYOUT)
    for unit in LAYOUT.units:
        file.values(unit.id)[:] = 5
        file.release(unit.id)
    assert (np.fromfile(tmp_path / "x", dtype="<f4") == 5).all()


def test_the_file_is_private_sparse_and_grows_where_reserved(tmp_path):
    file = UnitFile.create(tmp_path / "x", LAYOUT)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.stat().st_blocks == 0
    file.reserve(["expert-1"])
    assert 512 * file.path.stat().st_blocks >= 4 * LAYOUT.expert_size
    assert file.path.stat().st_size == 4 * LAYOUT.total_size


def test_a_missing_or_wrong_file_is_named(tmp_path):
    with pytest.raises(ExchangeError, match="no such file"):
        UnitFile(tmp_path / "x", LAYOUT)
    (tmp_path / "x").write_bytes(bytes(12))
    with pytest.raises(ExchangeError, match="12 bytes"):
        UnitFile(tmp_path / "x", LAYOUT)


def test_an_unknown_unit_is_refused(tmp_path):
    with pytest.raises(KeyError):
        UnitFile.create(tmp_path / "x", LAYOUT).values("expert-9")
