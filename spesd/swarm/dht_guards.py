"""What hivemind's DHT node is allowed to store, to believe and to work on."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.routing import DHTID
from hivemind.utils.auth import AuthorizerBase

from spesd.swarm.records import MAX_RECORD_BYTES, dht_key, unseal
from spesd.swarm.wire import WireError, unpack

MAX_KEYS = 512
"""Most keys in one request: each costs a walk through the routing table, and 4 MiB hold 190 000 of them."""

_EXPIRY_SLACK = 1.0


class RecordGuard(RecordValidatorBase):  # type: ignore[misc]
    """Lets only sound records of this run into the DHT node, whether they are stored here or found elsewhere."""

    def __init__(self, run_id: str, rejected: Counter[str]) -> None:
        self._run_id = run_id
        self._rejected = rejected

    def validate(self, record: DHTRecord) -> bool:
        """True when the value is signed by the peer in its subkey, for this key, and not kept beyond its life."""
        try:
            peer = unpack(record.subkey, 256)
            value = unpack(record.value, MAX_RECORD_BYTES + 16)
            if not isinstance(peer, str) or not isinstance(value, bytes):
                raise WireError("shape")
            name, sealed = unseal(self._run_id, value, peer, time.time())
            if DHTID.generate(dht_key(self._run_id, name)).to_bytes() != record.key:
                raise WireError("other key")
            if record.expiration_time > sealed.expires + _EXPIRY_SLACK:
                raise WireError("kept too long")
        except WireError as error:
            self._rejected[str(error)[:40]] += 1
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Values are signed before they come here."""
        value: bytes = record.value
        return value

    def strip_value(self, record: DHTRecord) -> bytes:
        """Nothing is added, so nothing is stripped."""
        value: bytes = record.value
        return value


class RequestGuard(AuthorizerBase):  # type: ignore[misc]
    """Refuses requests that ask for too much work. It signs nothing: libp2p has proven who asks."""

    def __init__(self, rejected: Counter[str]) -> None:
        self._rejected = rejected

    async def validate_request(self, request: Any) -> bool:
        """True for pings, and for at most MAX_KEYS keys."""
        if len(getattr(request, "keys", ())) <= MAX_KEYS:
            return True
        self._rejected["too many keys"] += 1
        return False

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Nothing to add."""

    async def sign_response(self, response: Any, request: Any) -> None:
        """Nothing to add."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Responses are checked record by record."""
        return True
