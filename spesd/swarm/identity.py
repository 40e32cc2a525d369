"""Who we are: an RSA-2048 key in libp2p's file format, its peer id, and signatures made with it.

The file is what hivemind's p2pd reads. Its two-field protobuf is handled here in a few lines, because importing
hivemind costs seconds and a signature check needs none of it.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from spesd.swarm.errors import IdentityError

KEY_BITS = 2048
MAX_KEY_BITS = 4096
MAX_PUBLIC_KEY_BYTES = 1024
MAX_IDENTITY_BYTES = 8192
_KEY_TYPES = ("RSA", "Ed25519", "Secp256k1", "ECDSA")
_SHA256_MULTIHASH = b"\x12\x20"


@dataclass(frozen=True)
class Identity:
    """A peer's key. `public_key` is libp2p's PublicKey protobuf, the bytes whose hash is the peer id."""

    peer_id: str
    public_key: bytes
    _private_key: rsa.RSAPrivateKey = field(repr=False)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key at `path`, or make one there (mode 0400).

        Raises IdentityError when the file is damaged or of another kind, or cannot be read or written.
        """
        try:
            if not path.exists():
                _create(path)
            elif path.stat().st_mode & 0o077:
                path.chmod(0o400)  # others must not read the key
            if path.stat().st_size > MAX_IDENTITY_BYTES:
                raise _unusable(path, "it is too long")
            data = path.read_bytes()
        except OSError as error:
            raise IdentityError(
                f"cannot use identity file {path}: {error.strerror}; check its folder's owner"
            ) from None
        try:
            der = _unwrap(data)
            key = serialization.load_der_private_key(der, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _unusable(path, str(error)) from None
        if not isinstance(key, rsa.RSAPrivateKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
            raise _unusable(path, f"an RSA key of {KEY_BITS} to {MAX_KEY_BITS} bits is needed")
        public = _wrap(
            key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return cls(peer_id_of(public), public, key)

    def sign(self, data: bytes) -> bytes:
        """Signature of `data`: PKCS #1 v1.5 with SHA-256, as libp2p does."""
        return self._private_key.sign(data, padding.PKCS1v15(), hashes.SHA256())


def peer_id_of(public_key: bytes) -> str:
    """Base58 peer id of a wrapped public key: its SHA-256 multihash."""
    return base58.b58encode(_SHA256_MULTIHASH + hashlib.sha256(public_key).digest()).decode()


def verify(peer_id: str, public_key: bytes, data: bytes, signature: bytes) -> bool:
    """True when `public_key` is that of `peer_id` and `signature` is its signature of `data`. Never raises."""
    if len(public_key) > MAX_PUBLIC_KEY_BYTES or peer_id_of(public_key) != peer_id:
        return False
    try:
        key = serialization.load_der_public_key(_unwrap(public_key))
        if not isinstance(key, rsa.RSAPublicKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
            return False
        key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def _create(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_wrap(der))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _wrap(der: bytes) -> bytes:
    """Protobuf {1: key type RSA, 2: der}; a DER key of 2048 bits and more has a length of two varint bytes."""
    size = len(der)
    return b"\x08\x00\x12" + bytes((size & 0x7F | 0x80, size >> 7)) + der


def _unwrap(data: bytes) -> bytes:
    if len(data) < 5 or data[0] != 0x08 or data[2] != 0x12:
        raise ValueError("it is not a libp2p key")
    if data[1] != 0:
        name = _KEY_TYPES[data[1]] if data[1] < len(_KEY_TYPES) else f"type {data[1]}"
        raise ValueError(f"its key is {name}, only RSA is supported")
    if not data[3] & 0x80 or data[4] & 0x80 or (data[3] & 0x7F | data[4] << 7) != len(data) - 5:
        raise ValueError("its length is wrong")
    return data[5:]


def _unusable(path: Path, reason: str) -> IdentityError:
    return IdentityError(
        f"identity file {path} is unusable: {reason}; restore it from a backup, or move it away to get a new identity"
    )
