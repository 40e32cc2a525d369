"""Text to shards."""

import numpy as np
import pytest
from blake3 import blake3

from spesd.data.prepare import INDEX, PreparedData, prepare, stdlib_documents
from spesd.data.shards import DataError, open_shard
from spesd.data.tokenizer import ByteTokenizer


def texts_of(folder, shards):
    tokens = np.concatenate([open_shard(folder / f"{shard.hash}.shard", shard) for shard in shards])
    return [ByteTokenizer().decode(part) for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1) if part.size]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} żółw " * (i + 1))
    (folder / "deep" / "copy.txt").write_text((folder / "07.txt").read_text())
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "nul").write_bytes(b"a\0b")
    (folder / "empty").touch()
    return folder


def test_each_document_lands_whole_on_one_side(tmp_path, source):
    out = tmp_path / "out"
    data = prepare([source], out, held_out_share=0.2, tokens_per_shard=1000)
    train, held_out = texts_of(out, data.train), texts_of(out, data.held_out)
    wanted = sorted(path.read_text() + "\0" for path in source.rglob("*.txt"))
    assert sorted(train + held_out) == wanted
    assert not set(train) & set(held_out)
    assert (data.documents, data.held_out_documents, data.skipped) == (41, len(held_out), 3)
    assert data.bytes == sum(path.stat().st_size for path in source.rglob("*.txt"))
    assert data.tokens == data.bytes + 41
    assert len(data.train) > 1
    assert all(shard.tokens <= 1000 for shard in data.train)


def test_held_out_follows_from_the_text_alone(tmp_path, source):
    data = prepare([source], tmp_path / "out", held_out_share=0.2)
    for text in texts_of(tmp_path / "out", data.held_out):
        assert int.from_bytes(blake3(text.rstrip("\0").encode()).digest()[:8]) < 0.2 * 2**64


def test_the_same_text_gives_the_same_shards_and_the_index_tells_them(tmp_path, source):
    one, two = (prepare([source], tmp_path / name, held_out_share=0.1) for name in ("one", "two"))
    assert one == two == PreparedData.load(tmp_path / "one")


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_each_side_gets_a_document_however_small_its_share(tmp_path, source, share):
    data = prepare([source / "01.txt", source / "02.txt"], tmp_path / "out", share)
    assert len(texts_of(tmp_path / "out", data.train)) == len(texts_of(tmp_path / "out", data.held_out)) == 1


def test_too_little_text_a_missing_source_and_a_bad_share_are_refused(tmp_path, source):
    with pytest.raises(DataError, match="at least two"):
        prepare([source / "01.txt", source / "empty"], tmp_path, 0.1)
    with pytest.raises(DataError, match="no such file"):
        prepare([source / "none"], tmp_path, 0.1)
    with pytest.raises(DataError, match=r"held_out_share 1\.5"):
        prepare([source], tmp_path, 1.5)


def test_a_folder_without_a_good_index_is_refused(tmp_path):
    with pytest.raises(DataError, match="spesd data prepare"):
        PreparedData.load(tmp_path)
    (tmp_path / INDEX).write_text('{"train": []}')
    with pytest.raises(DataError, match="train"):
        PreparedData.load(tmp_path)


def test_standard_library_is_found_without_installed_packages():
    documents = stdlib_documents()
    assert len(documents) > 300
    assert documents == sorted(documents)
    assert any(path.name == "argparse.py" for path in documents)
    assert not any("site-packages" in path.parts for path in documents)
