"""spesd: volunteers on ordinary internet links pretrain one mixture-of-experts model together, with no server."""

__version__ = "0.1.0"
