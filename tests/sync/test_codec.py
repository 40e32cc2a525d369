"""Codecs: what comes back, how large it is, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spesd.sync.codec import CODECS, FP16_MAX, Codec, Values
from spesd.sync.packet import codec_of

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = hnp.arrays(np.float32, st.integers(0, 40), elements=finite)
codecs = st.sampled_from(list(CODECS.values()))


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
    codec = codec_of("fp32")
    assert codec.decode(codec.encode(values), values.size).tobytes() == values.tobytes()


@given(vectors)
def test_fp16_is_within_half_a_unit_in_the_last_place_and_saturates(values: Values) -> None:
    codec = codec_of("fp16")
    decoded = codec.decode(codec.encode(values), values.size).astype(np.float64)
    bounded = np.clip(values.astype(np.float64), -FP16_MAX, FP16_MAX)
    assert (np.abs(decoded - bounded) <= np.maximum(np.abs(bounded) * 2.0**-11, 2.0**-25)).all()


@given(vectors, codecs)
def test_what_was_decoded_once_encodes_to_the_same_bytes(values: Values, codec: Codec) -> None:
    payload = codec.encode(values)
    assert codec.encode(codec.decode(payload, values.size)) == payload


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0.0), (2.0**-24, 2.0**-24), (2.0**-26, 0.0), (1e30, FP16_MAX), (-1e30, -FP16_MAX), (1e-45, 0.0)],
    ids=["zero", "smallest subnormal", "underflow", "huge", "huge negative", "fp32 subnormal"],
)
def test_fp16_at_the_ends_of_its_range(value: float, expected: float) -> None:
    codec = codec_of("fp16")
    assert codec.decode(codec.encode(np.array([value], np.float32)), 1)[0] == expected


@given(codecs, st.binary(max_size=64), st.integers(0, 16))
def test_a_payload_of_another_size_is_refused(codec: Codec, payload: bytes, count: int) -> None:
    if len(payload) == codec.payload_size(count):
        assert codec.decode(payload, count).shape == (count,)
    else:
        with pytest.raises(ValueError, match=f"{len(payload)} bytes for {count} values"):
            codec.decode(payload, count)


def test_decoded_values_may_be_written_to() -> None:
    for codec in CODECS.values():
        codec.decode(codec.encode(np.ones(3, np.float32)), 3)[0] = 2


def test_an_unknown_codec_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'zip' is unknown; known are fp32, fp16"):
        codec_of("zip")
