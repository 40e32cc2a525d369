"""The file format of token shards."""

import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spesd.config.manifest import Shard
from spesd.data.shards import DataError, open_shard, write_shard


@pytest.mark.parametrize(("vocabulary", "dtype"), [(256, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_tokens_come_back(tmp_path, vocabulary, dtype):
    tokens = np.array([0, 1, vocabulary - 1, 7])
    shard = write_shard(tmp_path, tokens, vocabulary)
    path = tmp_path / f"{shard.hash}.shard"
    assert shard == Shard(hash=blake3(path.read_bytes()).hexdigest(), bytes=path.stat().st_size, tokens=4)
    read = open_shard(path, shard)
    assert read.dtype == np.dtype(dtype)
    assert read.tolist() == tokens.tolist()
    assert not read.flags.writeable
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def header(magic=b"SPESTOKN", version=1, code=1, reserved=0, count=3):
    return struct.pack("<8sHHIQ", magic, version, code, reserved, count)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "shorter than the header"),
        (header()[:20], "shorter than the header"),
        (header(magic=b"GARBAGE!") + bytes(6), "magic"),
        (header(version=2) + bytes(6), "format version 2"),
        (header(code=9) + bytes(6), "dtype code 9"),
        (header(reserved=1) + bytes(6), "reserved field 1"),
        (header() + bytes(5), "token count 3"),
        (header() + bytes(7), "token count 3"),
        (header(code=2) + bytes(6), "token count 3"),
        (header(count=0), "token count 0"),
        (header(count=2**63) + bytes(6), "token count"),
    ],
)
def test_each_wrong_field_is_named(tmp_path, content, complaint):
    path = tmp_path / "x.shard"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as error:
        open_shard(path)
    assert str(path) in str(error.value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64))
def test_no_bytes_do_worse_than_a_clear_error(tmp_path, content):
    path = tmp_path / "x.shard"
    path.write_bytes(content)
    with pytest.raises(DataError):
        open_shard(path)


def test_a_missing_file_and_another_shard_are_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        open_shard(tmp_path / "none.shard")
    one = write_shard(tmp_path, np.arange(5), 256)
    two = write_shard(tmp_path, np.arange(6), 256)
    with pytest.raises(DataError, match="the manifest says"):
        open_shard(tmp_path / f"{one.hash}.shard", two)
