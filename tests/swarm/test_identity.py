"""The identity file is hivemind's, its signatures are libp2p's, and damage is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import P2P, PeerID
from hypothesis import given
from hypothesis import strategies as st

from spesd.swarm.errors import IdentityError
from spesd.swarm.identity import Identity, verify


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load_or_create(tmp_path_factory.mktemp("identity") / "key")


def test_the_file_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "identity.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o400
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    path.chmod(0o644)
    Identity.load_or_create(path)
    assert path.stat().st_mode & 0o077 == 0


def test_hivemind_reads_our_file_and_we_read_its(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert str(PeerID.from_identity(_create(ours).read_bytes())) == Identity.load_or_create(ours).peer_id
    P2P.generate_identity(str(theirs))
    assert str(PeerID.from_identity(theirs.read_bytes())) == Identity.load_or_create(theirs).peer_id


def _create(path: Path) -> Path:
    Identity.load_or_create(path)
    return path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "not a libp2p key"),
        (lambda data: data[:-1], "length is wrong"),
        (lambda data: b"\x08\x01" + data[2:], "Ed25519, only RSA"),
        (lambda data: b"\x08\x63" + data[2:], "type 99, only RSA"),
        (lambda data: data[:100] + bytes(100) + data[200:], "is unusable"),
        (lambda data: bytes(9000), "too long"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, damage: object, reason: str) -> None:
    path = tmp_path / "key"
    data = _create(path).read_bytes()
    path.chmod(0o600)
    path.write_bytes(damage(data))  # type: ignore[operator]
    with pytest.raises(IdentityError, match=reason) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value) and "move it away" in str(caught.value)


def test_a_signature_holds_for_its_peer_key_and_data_only(identity: Identity, tmp_path: Path) -> None:
    other = Identity.load_or_create(tmp_path / "other")
    signature = identity.sign(b"data")
    assert verify(identity.peer_id, identity.public_key, b"data", signature)
    assert not verify(identity.peer_id, identity.public_key, b"date", signature)
    assert not verify(identity.peer_id, other.public_key, b"data", signature)
    assert not verify(other.peer_id, identity.public_key, b"data", signature)
    assert not verify(identity.peer_id, identity.public_key, b"data", other.sign(b"data"))
    assert "private" not in repr(identity).lower() and isinstance(identity._private_key, rsa.RSAPrivateKey)


@given(key=st.binary(max_size=400), signature=st.binary(max_size=300))
def test_verify_never_raises(identity: Identity, key: bytes, signature: bytes) -> None:
    from spesd.swarm.identity import peer_id_of

    assert not verify(peer_id_of(key), key, b"data", signature)
    assert not verify(identity.peer_id, identity.public_key, b"data", signature)


def test_it_does_not_import_hivemind() -> None:
    code = "import sys, spesd.swarm.identity, spesd.swarm.wire; sys.exit('hivemind' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
