"""Codecs: how fp32 values become the payload of a contribution or a packet, and back.

Decoding is deterministic bit for bit on every platform: a packet is canonical, and every replica adds the same values.
What encoding loses is not lost to learning: it stays in the contributor's `theta - agreed`, and of a packet in its
reducer's next one (error feedback).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

FP16_MAX = float(np.finfo(np.float16).max)


class Codec(ABC):
    """One way to write fp32 values [count].

    `encode` needs finite values (`aggregate.check` has seen to that) and returns exactly `payload_size(count)` bytes;
    `decode` accepts exactly that many. A block-quantised codec has `block` values under one scale; others have 0. No
    decoded value is more than `growth` times what was encoded.
    """

    id: ClassVar[int]
    name: ClassVar[str]
    block: int = 0
    growth: ClassVar[float] = 1.0

    @abstractmethod
    def payload_size(self, count: int) -> int:
        """Bytes of the payload of `count` values: known before a byte is read."""

    @abstractmethod
    def encode(self, values: Values) -> bytes:
        """Write float32 [count]."""

    @abstractmethod
    def decode(self, payload: bytes | memoryview, count: int) -> Values:
        """Read float32 [count]. Raises ValueError if the payload has another size."""

    def _check_size(self, payload: bytes | memoryview, count: int) -> None:
        if len(payload) != self.payload_size(count):
            raise ValueError(f"{self.name}: {len(payload)} bytes for {count} values, not {self.payload_size(count)}")


class Fp32(Codec):
    """The values as they are, little-endian."""

    id, name = 1, "fp32"

    def payload_size(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Values) -> bytes:
        return values.astype("<f4", copy=False).tobytes()

    def decode(self, payload: bytes | memoryview, count: int) -> Values:
        self._check_size(payload, count)
        return np.frombuffer(payload, "<f4").astype(np.float32)


class Fp16(Codec):
    """IEEE half precision, round to nearest even; values beyond its range saturate instead of becoming infinite."""

    id, name = 2, "fp16"

    def payload_size(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Values) -> bytes:
        return np.clip(values, -FP16_MAX, FP16_MAX).astype("<f2").tobytes()

    def decode(self, payload: bytes | memoryview, count: int) -> Values:
        self._check_size(payload, count)
        return np.frombuffer(payload, "<f2").astype(np.float32)
