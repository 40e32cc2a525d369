"""Which codec writes what in a run, and a test of the encoders before the first byte goes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from blake3 import blake3

from spesd.config.errors import ExpectedError
from spesd.config.manifest import SyncConfig
from spesd.sync.codec import Codec, Fp16, Fp32, Values
from spesd.sync.codec_blocks import Int4, Int8, TopK

PAYLOADS: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "ba2de27231df549407e21c8f5f2f3718e5259097b4e85cd400987f15dbcc6d71",
        "fp16": "71c75714e3448a47bd16bd3a83d5d108a2c797a46c1d72976eed3046fe13031d",
        "int8": "5cb73ba60d0b74254ef4985a8b487806db54114abfa2c6f22eb45fc608382095",
        "int4": "428973974051906710342b19051c5d7613a754446b1ef021cb201f9a0b049091",
        "topk": "8e3a86b6354d10a7039938e6bce81a483950f8c45728727d1745d52eaecab988",
    }
)
"""Blake3 hash of the payload of `probe()`, by codec with the default settings."""

PROBE_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Codecs:
    """`usual` writes contributions and most packets; `dense` those packets to which a sparse codec would do harm."""

    usual: Codec
    dense: Codec

    def of_packet(self, dense: bool) -> Codec:
        """The codec of a packet: `dense` says that it holds a merging move, or many rounds."""
        return self.dense if dense else self.usual

    def largest_payload(self, count: int) -> int:
        """Most bytes that `count` values may take in a packet."""
        return max(self.usual.payload_size(count), self.dense.payload_size(count))


def codec_named(name: str, settings: SyncConfig) -> Codec:
    """The codec of that name with a run's settings. Raises ValueError with the known names."""
    match name:
        case "fp32":
            return Fp32()
        case "fp16":
            return Fp16()
        case "int8":
            return Int8(settings.block)
        case "int4":
            return Int4(settings.block)
        case "topk":
            return TopK(settings.top_share)
    raise ValueError(f"codec {name!r} is unknown; known are {', '.join(PAYLOADS)}")


def codecs_of(settings: SyncConfig) -> Codecs:
    """The codecs of a run."""
    usual = codec_named(settings.codec, settings)
    return Codecs(usual, codec_named(settings.dense_codec, settings) if settings.codec == "topk" else usual)


def probe() -> Values:
    """Fixed values of many sizes, both signs, and a block of zeros: float32 [1000], the same everywhere."""
    steps = np.arange(PROBE_COUNT, dtype=np.int64)
    whole = (steps * 2654435761 % 65521 - 32760).astype(np.float32)
    whole[256:512] = 0
    return np.ldexp(whole, (steps % 40 - 50).astype(np.int32)).astype(np.float32)


class EncoderBroken(ExpectedError):
    """This machine computes something else than all others."""


def self_test() -> None:
    """Raise EncoderBroken unless every codec writes the bytes that it must, and reads them back."""
    default = SyncConfig(local_steps=1)
    for name, wanted in PAYLOADS.items():
        codec, values = codec_named(name, default), probe()
        payload = codec.encode(values)
        found = blake3(payload).hexdigest()
        decoded = codec.decode(payload, values.size)
        if found != wanted or not np.isfinite(decoded).all():
            raise EncoderBroken(
                f"codec {name} writes {found[:12]} where {wanted[:12]} is right: this build of NumPy or this processor "
                "computes something else than IEEE 754, and would spoil the run; it must not take part"
            )
