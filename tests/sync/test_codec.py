"""Codecs: what comes back, how large it is, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spesd.config.manifest import SyncConfig
from spesd.sync import codecs as module
from spesd.sync.codec import FP16_MAX, Codec, Fp16, Fp32, Values
from spesd.sync.codec_blocks import CHUNK, LARGEST, SMALLEST_SCALE, TOP_BLOCK, BlockCodec, Int4, Int8, TopK
from spesd.sync.codecs import PAYLOADS, EncoderBroken, codec_named, codecs_of, self_test

SETTINGS = SyncConfig(local_steps=1)
ALL = [Fp32(), Fp16(), Int8(16), Int8(128), Int4(16), Int4(128), TopK(0.05), TopK(0.01), TopK(0.5)]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 600), elements=finite, fill=st.just(np.float32(0)))
codecs = st.sampled_from(ALL)


@given(vectors, codecs)
def test_the_payload_has_the_size_that_was_told_before(values: Values, codec: Codec) -> None:
    payload = codec.encode(values)
    decoded = codec.decode(payload, values.size)
    assert len(payload) == codec.payload_size(values.size)
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    assert np.isfinite(decoded).all()


@given(vectors)
def test_fp32_is_exact_to_the_bit(values: Values) -> None:
    codec = Fp32()
    assert codec.decode(codec.encode(values), values.size).tobytes() == values.tobytes()


@given(vectors)
def test_fp16_is_within_half_a_unit_in_the_last_place_and_saturates(values: Values) -> None:
    codec = Fp16()
    decoded = codec.decode(codec.encode(values), values.size).astype(np.float64)
    bounded = np.clip(values.astype(np.float64), -FP16_MAX, FP16_MAX)
    assert (np.abs(decoded - bounded) <= np.maximum(np.abs(bounded) * 2.0**-11, 2.0**-25)).all()


def blocks_of(values: Values, block: int) -> list[np.ndarray]:
    return [values[at : at + block].astype(np.float64) for at in range(0, values.size, block)]


@given(vectors, st.sampled_from([Int8(16), Int8(128), Int4(16), Int4(128)]))
def test_quantised_values_are_within_half_a_level_of_their_block(values: Values, codec: Int8 | Int4) -> None:
    bounded = np.clip(values, -LARGEST, LARGEST)
    decoded = codec.decode(codec.encode(values), values.size)
    for before, after in zip(blocks_of(bounded, codec.block), blocks_of(decoded, codec.block), strict=True):
        level = np.abs(before).max() / codec.levels
        bound = level / 2 * (1 + 2**-7) * (1 + 1e-6) if level >= SMALLEST_SCALE else np.abs(before).max()
        assert (np.abs(before - after) <= bound).all()
        assert (np.abs(after) <= codec.growth * np.abs(before) * (1 + 1e-6)).all()


@given(vectors, st.sampled_from([TopK(0.05), TopK(0.01)]))
def test_topk_keeps_the_largest_of_each_block_and_nothing_else(values: Values, codec: TopK) -> None:
    bounded = np.clip(values, -LARGEST, LARGEST)
    decoded = codec.decode(codec.encode(values), values.size)
    for before, after in zip(blocks_of(bounded, TOP_BLOCK), blocks_of(decoded, TOP_BLOCK), strict=True):
        kept = np.flatnonzero(after)
        level = np.abs(before).max() / codec.levels
        assert len(kept) <= codec.kept
        assert (np.abs(before - after)[kept] <= level / 2 * 1.01 + 1e-45).all()
        if level >= SMALLEST_SCALE:
            left = np.abs(np.delete(before, kept))
            smallest_kept = np.sort(np.abs(before))[::-1][: codec.kept][-1]
            assert (left <= max(smallest_kept, 0.51 * level)).all()


def test_of_equal_values_topk_keeps_the_first_on_every_processor() -> None:
    codec, random = TopK(0.05), np.random.default_rng(0)
    rows = random.integers(-3, 4, (50, TOP_BLOCK)).astype(np.float32)
    decoded = codec.decode(codec.encode(rows.reshape(-1)), rows.size).reshape(rows.shape)
    for before, after in zip(rows, decoded, strict=True):
        assert np.flatnonzero(after).tolist() == sorted(np.argsort(-np.abs(before), kind="stable")[: codec.kept])


@pytest.mark.parametrize("codec", ALL, ids=lambda codec: f"{codec.name}/{codec.block}")
@pytest.mark.parametrize(
    "values",
    [np.zeros(300), [5.0], [1e-45, 0, -1e-45], [3e38, -3e38, 1.0], [0.0] * 299 + [-1.0], []],
    ids=["zeros", "one", "denormal", "huge", "last", "none"],
)
def test_the_corners(codec: Codec, values: list[float]) -> None:
    vector = np.array(values, np.float32)
    decoded = codec.decode(codec.encode(vector), vector.size)
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(vector) >= 0).all()
    if vector.size and np.abs(vector).max() == 1.0:
        assert decoded.argmin() == vector.argmin()


def test_exact_sizes() -> None:
    sizes = {codec_named(name, SETTINGS).payload_size(1000): name for name in PAYLOADS}
    # eight blocks of 128 and two bytes of scale each; four blocks of 256 with thirteen pairs of bytes
    assert sizes == {4000: "fp32", 2000: "fp16", 1016: "int8", 516: "int4", 112: "topk"}


@pytest.mark.parametrize("codec", [Int8(128), Int4(128), TopK(0.05)], ids=lambda codec: codec.name)
def test_chunks_make_no_difference(codec: BlockCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    whole = codec.encode(values)
    monkeypatch.setattr("spesd.sync.codec_blocks.CHUNK", 512)
    assert codec.encode(values) == whole
    chunked = codec.decode(whole, values.size)
    monkeypatch.setattr("spesd.sync.codec_blocks.CHUNK", CHUNK)
    np.testing.assert_array_equal(chunked, codec.decode(whole, values.size))


@given(vectors, codecs)
def test_what_was_decoded_once_is_coded_again_without_loss(values: Values, codec: Codec) -> None:
    once = codec.decode(codec.encode(values), values.size)
    assert codec.decode(codec.encode(once), values.size).tobytes() == once.tobytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0.0), (2.0**-24, 2.0**-24), (2.0**-26, 0.0), (1e30, FP16_MAX), (-1e30, -FP16_MAX), (1e-45, 0.0)],
    ids=["zero", "smallest subnormal", "underflow", "huge", "huge negative", "fp32 subnormal"],
)
def test_fp16_at_the_ends_of_its_range(value: float, expected: float) -> None:
    codec = Fp16()
    assert codec.decode(codec.encode(np.array([value], np.float32)), 1)[0] == expected


# Hostile bytes -------------------------------------------------------------------------------------------------------


@given(codecs, st.binary(max_size=64), st.integers(0, 16))
def test_a_payload_of_another_size_is_refused(codec: Codec, payload: bytes, count: int) -> None:
    if len(payload) != codec.payload_size(count):
        with pytest.raises(ValueError, match=f"{len(payload)} bytes for {count} values"):
            codec.decode(payload, count)


@given(codecs, st.integers(0, 300), st.randoms())
def test_any_bytes_of_the_right_size_decode_to_that_many_values_or_are_refused(
    codec: Codec, count: int, random: object
) -> None:
    payload = random.randbytes(codec.payload_size(count))  # type: ignore[attr-defined]
    try:
        decoded = codec.decode(payload, count)
    except ValueError as error:
        assert "scale" in str(error) or "places" in str(error)
    else:
        assert decoded.shape == (count,)
        assert np.isfinite(decoded).all() or not codec.block


@pytest.mark.parametrize("codec", [Int8(16), Int4(16), TopK(0.01)], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "scale", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xbf", b"\x7f\x7f"], ids=["nan", "inf", "-1", "huge"]
)
def test_a_scale_that_no_encoder_writes_is_refused(codec: BlockCodec, scale: bytes) -> None:
    rest = b"\x01" * (codec.payload_size(10) - len(scale))
    with pytest.raises(ValueError, match="scale 0x"):
        codec.decode(scale + rest, 10)


@pytest.mark.parametrize("codec", [Int8(16), Int4(16), TopK(1 / TOP_BLOCK)], ids=lambda codec: codec.name)
@pytest.mark.parametrize("level", [0, 1, 127, 128, 129, 255])
def test_the_largest_scale_that_is_accepted_decodes_to_finite_values(codec: BlockCodec, level: int) -> None:
    payload = codec.encode(np.full(codec.block, -3e38, np.float32))
    decoded = codec.decode(payload[:2] + bytes([level]) * (len(payload) - 2), codec.block)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("places", [[3, 3, 4], [5, 4, 6]], ids=["twice", "falling"])
def test_topk_refuses_a_place_that_comes_twice_or_out_of_order(places: list[int]) -> None:
    codec = TopK(3 / TOP_BLOCK)
    payload = b"\x80\x3f" + bytes(places) + bytes([1, 1, 1])
    with pytest.raises(ValueError, match="do not rise"):
        codec.decode(payload, 10)


def test_decoded_values_may_be_written_to() -> None:
    for codec in ALL:
        codec.decode(codec.encode(np.ones(3, np.float32)), 3)[0] = 2


# Choosing and testing ------------------------------------------------------------------------------------------------


def test_an_unknown_codec_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'zip' is unknown; known are fp32, fp16, int8, int4, topk"):
        codec_named("zip", SETTINGS)


def test_packets_that_topk_would_spoil_are_written_densely() -> None:
    codecs = codecs_of(SyncConfig(local_steps=1, codec="topk", dense_codec="int4"))
    assert (codecs.of_packet(False).name, codecs.of_packet(True).name) == ("topk", "int4")
    assert codecs.largest_payload(1000) == Int4(128).payload_size(1000)
    codecs = codecs_of(SyncConfig(local_steps=1, codec="int8"))
    assert codecs.of_packet(True).name == "int8"


def test_a_block_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of 2 such as 128"):
        SyncConfig(local_steps=1, block=100)


def test_every_encoder_writes_the_bytes_that_every_other_peer_expects() -> None:
    self_test()


def test_an_encoder_that_writes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAYLOADS", {**PAYLOADS, "int4": "0" * 64})
    with pytest.raises(EncoderBroken, match=r"codec int4 writes .* where 000000000000 is right"):
        self_test()
