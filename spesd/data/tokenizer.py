"""From text to tokens. The only tokenizer so far: UTF-8 bytes, which needs no file and no training."""

from __future__ import annotations

import numpy as np

SEPARATOR = 0
"""Token between two documents: the byte NUL, which text does not contain."""


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    name = "bytes"
    vocabulary = 256

    def encode(self, text: str) -> np.ndarray:
        """Return uint8 [bytes of the UTF-8 form]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens 0 to 255 [any]; bytes that are not UTF-8 become U+FFFD."""
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")
