"""Finding the run: from an address to the manifest and the data, or from what the state dir already holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import structlog

from spesd import __version__
from spesd.api.schema import Reason
from spesd.config.errors import ConfigError, ExitCode, ExpectedError
from spesd.config.manifest import MAX_MANIFEST_BYTES, Draft, Manifest
from spesd.daemon.state_dir import StateDir, write_atomically
from spesd.swarm.blob_store import BlobStore
from spesd.swarm.blobs import BlobExchange
from spesd.swarm.errors import BlobUnavailable, SwarmError
from spesd.swarm.join import PROTOCOL_VERSION, Hello, HelloInfo, differences, hello
from spesd.swarm.transport import Transport

log = structlog.get_logger(__name__)

HELLO_SECONDS = 10.0
MANIFEST_SECONDS = 60.0
RETRY_SECONDS = (1.0, 60.0)
"""First and longest pause between two rounds of dialling."""

Explain = Callable[[Reason, str], None]
"""Tells status what is being waited for."""


class CannotJoinRun(ExpectedError):
    """The swarm is there, and this daemon cannot be part of it. Retrying would not help."""

    exit_code = ExitCode.CANNOT_JOIN


def load_manifest(state_dir: StateDir) -> Manifest | None:
    """The run to which the state dir belongs, or None. Raises ConfigError when the file is damaged."""
    try:
        return Manifest.from_canonical(state_dir.manifest.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{state_dir.manifest}: damaged ({error}); move it away and start with --join to fetch it again"
        ) from None


def check_same_run(mine: Manifest, draft: Draft) -> None:
    """Raise ConfigError with the differing fields unless `mine` was founded from `draft`."""
    theirs = draft.model_dump(mode="json")
    kept = {name: value for name, value in mine.model_dump(mode="json").items() if name in theirs}
    kept["data"] = {name: value for name, value in kept["data"].items() if name in theirs["data"]}
    differing = differences(kept, theirs)
    if differing:
        lines = [
            f"{field}: {ours!r} in the state dir, {new!r} in the draft" for field, (ours, new) in differing.items()
        ]
        raise ConfigError(
            f"the state dir belongs to run {mine.name} {mine.run_id[:12]}, founded from another draft; "
            "use another --state-dir for a new run",
            *lines,
        )


def hello_info(manifest: Manifest) -> HelloInfo:
    """What we tell a joiner."""
    run = manifest.run_id
    size = len(manifest.canonical_bytes())
    return HelloInfo(run_id=run, manifest_hash=run, manifest_bytes=size, version=__version__)


async def find_run(transport: Transport, addresses: Sequence[str], explain: Explain) -> tuple[Hello, ...]:
    """Dial until one of `addresses` answers, for ever, with backoff; return who answered.

    Raises CannotJoinRun when those who answer cannot be joined.
    """
    pause, longest = RETRY_SECONDS
    while True:
        found, reasons = await ask_all(transport, addresses)
        if found:
            for answer in found:
                check_protocol(answer)
            return found
        first = next(iter(reasons.items()))
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        explain(Reason.WAITING_FOR_BOOTSTRAP, f"no answer from {first[0]}{more}, trying again in {pause:.0f} s")
        for address, reason in reasons.items():
            log.warning("bootstrap peer does not answer", address=address, reason=reason, retry_seconds=round(pause))
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        pause = min(2 * pause, longest)


async def ask_all(transport: Transport, addresses: Sequence[str]) -> tuple[tuple[Hello, ...], dict[str, str]]:
    """Ask every address for its run: those that answered, and why the others did not."""
    outcomes = await asyncio.gather(
        *(hello(transport, address, HELLO_SECONDS) for address in addresses), return_exceptions=True
    )
    found: list[Hello] = []
    reasons: dict[str, str] = {}
    for address, outcome in zip(addresses, outcomes, strict=True):
        if isinstance(outcome, Hello):
            found.append(outcome)
        elif isinstance(outcome, SwarmError | ValueError):
            reasons[address] = str(outcome)
        else:
            raise outcome
    return tuple(found), reasons


def check_protocol(answer: Hello) -> None:
    """Raise CannotJoinRun if that peer speaks another protocol."""
    theirs = answer.info
    if theirs.protocol != PROTOCOL_VERSION:
        raise CannotJoinRun(
            f"peer {answer.peer} speaks protocol {theirs.protocol} (spesd {theirs.version}), this is protocol "
            f"{PROTOCOL_VERSION} (spesd {__version__}); install a matching version"
        )


async def check_run(transport: Transport, mine: Manifest, answers: Sequence[Hello], scratch: BlobStore) -> None:
    """Raise CannotJoinRun, with the differing fields, if a peer that we were told to join is of another run."""
    for answer in answers:
        if answer.info.run_id == mine.run_id:
            continue
        lines = [f"peer {answer.peer} is of run {answer.info.run_id[:12]}, this state dir of run {mine.run_id[:12]}"]
        try:
            theirs = await fetch_manifest(transport, scratch, [answer])
        except ExpectedError as error:
            lines.append(f"its manifest cannot be had: {error}")
        else:
            pairs = differences(mine.model_dump(mode="json"), theirs.model_dump(mode="json"))
            lines += [f"{field}: {ours!r} here, {other!r} there" for field, (ours, other) in list(pairs.items())[:20]]
        raise CannotJoinRun("\n".join([*lines, "use another --state-dir to join it"]))


async def fetch_manifest(transport: Transport, store: BlobStore, answers: Sequence[Hello]) -> Manifest:
    """The manifest of the run of the first of `answers`, verified by hash. Raises CannotJoinRun."""
    info = answers[0].info
    sources = [answer.peer for answer in answers if answer.info.run_id == info.run_id]
    exchange = BlobExchange(transport, store, info.run_id)
    try:
        path = await exchange.fetch(info.run_id, sources, timeout=MANIFEST_SECONDS, max_size=MAX_MANIFEST_BYTES)
        return Manifest.from_canonical(path.read_bytes())
    except BlobUnavailable as error:
        raise CannotJoinRun(f"the manifest of run {info.run_id[:12]} cannot be fetched: {error}") from None
    except ValueError as error:
        raise CannotJoinRun(f"the manifest of run {info.run_id[:12]} is not understood: {error}") from None


async def fetch_data(
    exchange: BlobExchange, manifest: Manifest, sources: Callable[[], Awaitable[Sequence[str]]], explain: Explain
) -> None:
    """Fetch all shards that are not here yet, for ever, with backoff. `sources` tells who may have them now."""
    shards = (*manifest.data.train, *manifest.data.held_out)
    pause, longest = RETRY_SECONDS
    while missing := [shard for shard in shards if not exchange.store.has(shard.hash)]:
        size = sum(shard.bytes for shard in missing)
        explain(Reason.FETCHING_DATA, f"{len(missing)} of {len(shards)} shards, {size / 1e6:.1f} MB left")
        shard = missing[0]
        try:
            await exchange.fetch(shard.hash, await sources(), timeout=30 + shard.bytes / 50_000, size=shard.bytes)
            pause = RETRY_SECONDS[0]
        except BlobUnavailable as error:
            log.warning("shard not fetched", shard=shard.hash[:12], reason=str(error), retry_seconds=round(pause))
            explain(Reason.FETCHING_DATA, f"shard {shard.hash[:12]}: {error}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)


def keep_manifest(manifest: Manifest, state_dir: StateDir, store: BlobStore) -> None:
    """Bind the state dir to the run, and serve the manifest to joiners. Raises OSError."""
    data = manifest.canonical_bytes()
    store.put(data, durable=True)
    write_atomically(state_dir.manifest, data)
