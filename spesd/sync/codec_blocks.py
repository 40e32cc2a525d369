"""Codecs that give each block of values one scale: `int8`, `int4`, and `topk`, which keeps the largest entries alone.

A scale is the upper half of an fp32 number: it has the full exponent, for deltas may be tiny. It is rounded to nearest,
so near that the largest value always gets the largest level; hence what was decoded once is coded again without loss,
and the packet of a single contribution equals it. Levels are rounded to nearest too: with error feedback the error of
one round is part of the next, and stochastic rounding would only add noise. A value is decoded by one fp32
multiplication, which IEEE 754 makes the same everywhere; a scale below the normal numbers counts as zero, because only
some processors flush such products.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from spesd.sync.codec import Codec, Values

LARGEST = 1e38
"""Values beyond it saturate, so that no product of a level and a scale is infinite."""

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)

CHUNK = 1 << 20
"""Values that are worked on at once, so that a unit of a gigabyte needs no second one; a multiple of every block."""

SCALE_BYTES = 2

TOP_BLOCK = 256
"""Block of `topk`: an index is one byte."""

Bytes = NDArray[np.uint8]


def scale_bits(rows: Values, levels: int) -> NDArray[np.uint16]:
    """Scale of each row of float32 [blocks, block], the largest value over `levels`: upper half of an fp32 number."""
    exact = np.abs(rows).max(axis=1) / np.float32(levels)
    nearest = (exact.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    return np.where(exact < SMALLEST_SCALE, 0, nearest).astype(np.uint16)


def scales_of(bits: NDArray[np.uint16], levels: int) -> Values:
    """The fp32 numbers of which `bits` are the upper halves.

    Raises ValueError for a scale that no encoder writes: negative, not finite, or with a largest value beyond LARGEST.
    """
    # as whole numbers the bits of negative, infinite and NaN scales are larger than those of all others
    largest = int(scale_bits(np.full((1, 1), LARGEST, np.float32), levels)[0])
    worst = int(bits.max(initial=0))
    if worst > largest:
        raise ValueError(f"scale {worst:#06x} is above {largest:#06x}")
    scales = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(scales < SMALLEST_SCALE, np.float32(0), scales)


def quantise(rows: Values, scales: Values) -> NDArray[np.float32]:
    """Nearest whole levels of float32 [blocks, n], zero where the scale is."""
    levels = np.zeros_like(rows)
    np.divide(rows, scales[:, None], out=levels, where=scales[:, None] > 0)
    return np.rint(levels, out=levels)


def rows_of(values: Values, block: int) -> Values:
    """Float32 [n] as [blocks, block], zeros at the end, bounded by LARGEST."""
    rows = np.zeros((-(-values.size // block), block), np.float32)
    np.clip(values, -LARGEST, LARGEST, out=rows.reshape(-1)[: values.size])
    return rows


def largest_places(rows: Values, kept: int) -> NDArray[np.int64]:
    """Rising places of the `kept` largest values of each row of float32 [blocks, TOP_BLOCK]; of equal ones the first.

    Magnitude and place make one whole number, no two of them equal: which of equal values `np.argpartition` takes
    differs from one processor to another.
    """
    keys = np.abs(rows).view(np.uint32).astype(np.int64) * TOP_BLOCK
    keys += np.arange(TOP_BLOCK - 1, -1, -1)
    places = TOP_BLOCK - 1 - np.partition(keys, -kept, axis=1)[:, -kept:] % TOP_BLOCK
    places.sort(axis=1)
    return places


class BlockCodec(Codec):
    """A payload of all scales, little-endian, and then a body. Works in chunks.

    Whatever it decodes is finite: a scale that would make it otherwise is refused.
    """

    levels: ClassVar[int]
    growth = 2.0  # half a level rounds to one

    def __init__(self, block: int) -> None:
        self.block = block

    def payload_size(self, count: int) -> int:
        return SCALE_BYTES * self._blocks(count) + self._body_size(count)

    def encode(self, values: Values) -> bytes:
        payload = np.zeros(self.payload_size(values.size), np.uint8)
        scales, body = self._halves(payload, values.size)
        for start in range(0, values.size, CHUNK):
            rows = rows_of(values[start : start + CHUNK], self.block)
            first = start // self.block
            scales[first : first + len(rows)] = self._write(rows, self._body_of(body, start, len(rows)))
        return payload.tobytes()

    def decode(self, payload: bytes | memoryview, count: int) -> Values:
        self._check_size(payload, count)
        bits, body = self._halves(np.frombuffer(payload, np.uint8), count)
        scales = scales_of(bits, self.levels)
        values = np.empty(count, np.float32)
        for start in range(0, count, CHUNK):
            target = values[start : start + CHUNK]
            first, blocks = start // self.block, self._blocks(target.size)
            rows = self._read(scales[first : first + blocks], self._body_of(body, start, blocks))
            target[:] = rows.reshape(-1)[: target.size]
        return values

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _halves(self, payload: Bytes, count: int) -> tuple[NDArray[np.uint16], Bytes]:
        at = SCALE_BYTES * self._blocks(count)
        return payload[:at].view("<u2"), payload[at:]

    def _body_of(self, body: Bytes, start: int, blocks: int) -> Bytes:
        """The part of the body that holds `blocks` blocks from value `start` on."""
        return body[self._body_size(start) : self._body_size(start + blocks * self.block)]

    @abstractmethod
    def _body_size(self, count: int) -> int:
        """Bytes of the body of `count` values; linear over whole chunks."""

    @abstractmethod
    def _write(self, rows: Values, body: Bytes) -> NDArray[np.uint16]:
        """Fill `body` with float32 [blocks, block]; returns the scales' bits."""

    @abstractmethod
    def _read(self, scales: Values, body: Bytes) -> Values:
        """Decoded float32 [blocks, block]; cells past the body are of no account. Raises ValueError."""


class Int8(BlockCodec):
    """One byte a value: 127 levels on each side. (1 + 2 / block) bytes a value."""

    id, name = 3, "int8"
    levels = 127

    def _body_size(self, count: int) -> int:
        return count

    def _write(self, rows: Values, body: Bytes) -> NDArray[np.uint16]:
        bits = scale_bits(rows, self.levels)
        levels = quantise(rows, scales_of(bits, self.levels)).astype(np.int8)
        body[:] = levels.view(np.uint8).reshape(-1)[: body.size]
        return bits

    def _read(self, scales: Values, body: Bytes) -> Values:
        rows = np.zeros((len(scales), self.block), np.float32)
        rows.reshape(-1)[: body.size] = body.view(np.int8)
        return rows * scales[:, None]


class Int4(BlockCodec):
    """Half a byte a value, the even one in the lower half: 7 levels on each side. (0.5 + 2 / block) bytes a value."""

    id, name = 4, "int4"
    levels = 7

    def _body_size(self, count: int) -> int:
        return (count + 1) // 2

    def _write(self, rows: Values, body: Bytes) -> NDArray[np.uint16]:
        bits = scale_bits(rows, self.levels)
        nibbles = (quantise(rows, scales_of(bits, self.levels)) + 8).astype(np.uint8).reshape(-1, 2)
        body[:] = (nibbles[:, 0] | nibbles[:, 1] << 4)[: body.size]
        return bits

    def _read(self, scales: Values, body: Bytes) -> Values:
        rows = np.zeros((len(scales), self.block), np.float32)
        pairs = rows.reshape(-1, 2)[: body.size]
        pairs[:, 0], pairs[:, 1] = body & 15, body >> 4
        return (rows - 8) * scales[:, None]


class TopK(BlockCodec):
    """The largest entries of each block of 256, as one byte of place and one of value.

    A block takes 2 + 2 * kept bytes; at 5 % that is 28, or 0.875 bits a value.
    """

    id, name = 5, "topk"
    levels = 127

    def __init__(self, share: float) -> None:
        super().__init__(TOP_BLOCK)
        self.kept = max(1, round(share * TOP_BLOCK))

    def _body_size(self, count: int) -> int:
        return 2 * self.kept * self._blocks(count)

    def _write(self, rows: Values, body: Bytes) -> NDArray[np.uint16]:
        bits = scale_bits(rows, self.levels)
        places = largest_places(rows, self.kept)
        levels = quantise(np.take_along_axis(rows, places, axis=1), scales_of(bits, self.levels)).astype(np.int8)
        pairs = body.reshape(len(rows), 2, self.kept)
        pairs[:, 0], pairs[:, 1] = places, levels.view(np.uint8)
        return bits

    def _read(self, scales: Values, body: Bytes) -> Values:
        pairs = body.reshape(len(scales), 2, self.kept)
        places = pairs[:, 0].astype(np.intp)
        if (np.diff(places, axis=1) <= 0).any():
            raise ValueError("places of a block do not rise")
        rows = np.zeros((len(scales), self.block), np.float32)
        np.put_along_axis(rows, places, pairs[:, 1].view(np.int8) * scales[:, None], axis=1)
        return rows
