"""Keeps a trainer running: starts it from the agreed state, restarts it when it dies, relays what it says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Set
from enum import StrEnum

import structlog

from spesd.config.manifest import Manifest, Shard
from spesd.config.peer import PeerConfig
from spesd.daemon.state_dir import StateDir
from spesd.daemon.store import Progress, Store
from spesd.daemon.trainer_link import TrainerLink
from spesd.model.units import UnitLayout
from spesd.sync.codec import Values
from spesd.sync.effects import RoundEnded
from spesd.sync.ledger import UnitId
from spesd.sync.peer import SyncPeer
from spesd.sync.workshop import Workshop
from spesd.train import link

log = structlog.get_logger(__name__)

RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before a trainer that died is started again."""

STEADY_SECONDS = 120.0
"""A trainer that ran so long is restarted at once when it dies."""

KEPT_LOSSES = 4096

LAST_SNAPSHOT = 1 << 40
"""Round of the snapshot at the end: one that no real round has."""

Tell = Callable[[Callable[[float], None]], None]
"""Hands the protocol an event, and carries out what follows."""


class TrainerState(StrEnum):
    """What the trainer process is doing."""

    ABSENT = "absent"
    STARTING = "starting"
    TRAINING = "training"
    RESTARTING = "restarting"


class Trainer:
    """The trainer process over its restarts. `begin` once the ledger is complete; all on the event loop."""

    def __init__(
        self,
        config: PeerConfig,
        manifest: Manifest,
        state_dir: StateDir,
        store: Store,
        peer: SyncPeer,
        workshop: Workshop,
        tell: Tell,
    ) -> None:
        self.state = TrainerState.ABSENT
        self.failure = ""
        self.restarts = 0
        self.last: link.Progress | None = None
        self.device: str | None = None
        self.losses: deque[link.Evaluated] = deque(maxlen=KEPT_LOSSES)
        self.first_held_out: link.Evaluated | None = None
        self.warnings: list[str] = []
        self._config, self._manifest, self._dir, self._store = config, manifest, state_dir, store
        self._peer, self._workshop, self._tell = peer, workshop, tell
        self._layout = UnitLayout(manifest.model, manifest.sync.shared_shards)
        self._progress = store.load_progress()
        self._tokens_before = self._progress.tokens
        self._link: TrainerLink | None = None
        self._unaccepted: Mapping[UnitId, Values] = {}
        self._snapshot_round = -1
        self._counted = self._at_snapshot = (0, 0)
        self._started_at = 0.0
        self._failures = 0
        self._leaving = False
        self._restart: asyncio.Task[None] | None = None
        self._answers: dict[tuple[type[link.Event], int], asyncio.Future[link.Event]] = {}
        self._base: dict[UnitId, Values] = {}

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link is not None else None

    @property
    def held_out(self) -> link.Evaluated | None:
        """The newest evaluation."""
        return self.losses[-1] if self.losses else None

    @property
    def tokens(self) -> int:
        """Tokens that this peer has trained on in this run."""
        return self._progress.tokens

    @property
    def owned_before(self) -> tuple[UnitId, ...]:
        """Experts that this peer trained when it last ran."""
        return self._progress.owned

    async def begin(self, unaccepted: Mapping[UnitId, Values]) -> None:
        """Start training the experts that the protocol owns, with work that was not accepted before the last stop."""
        self._unaccepted = unaccepted
        await self._start_after(0.0)
        self._save_progress()

    def own(self, experts: frozenset[UnitId]) -> None:
        """Train these experts from now on. The protocol must be idle."""
        before = self._peer.context.owned
        self._peer.on_owned(experts)
        if self._link is None or experts == before:
            return
        self._link.send(link.Own(experts=tuple(sorted(experts))))
        given_up = {unit: self._workshop.agreed[unit] for unit in sorted(before - experts)}
        if given_up:
            self._link.load(given_up, "replace", self._peer.context.newest_round)
        self._save_progress()

    async def _start(self) -> None:
        peer, newest = self._peer, self._peer.context.newest_round
        self.state = TrainerState.STARTING
        self._snapshot_round, self._counted, self._at_snapshot = -1, (0, 0), (0, 0)
        self._tokens_before = self._progress.tokens
        values = dict(self._workshop.agreed)
        self._base = dict(values)
        for unit, work in self._unaccepted.items():
            if unit in peer.trained and work.shape == values[unit].shape:
                values[unit] = values[unit] + work
        command = link.Start(
            manifest=self._manifest.canonical_bytes(),
            peer_id=peer.context.me,
            owned=tuple(sorted(peer.context.owned)),
            round=newest,
            position=self._progress.position,
            shards={s.hash: str(self._store.blobs.path(s.hash)) for s in self._shards()},
            inbound=str(self._dir.inbound),
            snapshot=str(self._dir.snapshot),
            checkpoint=str(self._dir.checkpoint) if self._dir.checkpoint.exists() else None,
            device=self._config.device,
            threads=self._config.threads,
            max_steps_per_second=self._pace(),
        )
        trainer = TrainerLink(self._layout, self._dir.inbound, self._dir.snapshot, self._on_event, self._on_exit)
        self._link, self._started_at = trainer, asyncio.get_running_loop().time()
        await trainer.start(command, values)

    def _shards(self) -> tuple[Shard, ...]:
        return (*self._manifest.data.train, *self._manifest.data.held_out)

    def _pace(self) -> float | None:
        optimizer, limit = self._manifest.optimizer, self._config.max_tokens_per_second
        tokens = optimizer.sequences * optimizer.accumulate * self._manifest.data.sequence_length
        return limit / tokens if limit else None

    # What the protocol asks (TrainerPort) ----------------------------------------------------------------------------

    def take_snapshot(self, round_: int) -> None:
        if self._link is not None:
            self._link.send(link.Snapshot(round=round_))

    def snapshot(self, round_: int, unit: UnitId) -> Values | None:
        if self._link is None or self._snapshot_round != round_:
            return None
        return self._link.snapshot(unit)

    @property
    def life(self) -> int:
        return self.restarts

    def moved(self, unit: UnitId, shift: Values, agreed: Values, round_: int, life: int) -> None:
        if self._link is None or self._base[unit] is agreed:
            return  # there is no trainer, or it was started from this very state
        base, self._base[unit] = self._base[unit], agreed
        if unit in self._peer.trained:
            # a shift for a trainer that has died meanwhile takes account of work that this one never did
            self._link.load({unit: shift if life == self.life else agreed - base}, "add", round_)
        else:
            self._link.load({unit: agreed}, "replace", round_)

    def round_ended(self, report: RoundEnded) -> None:
        if self._link is None:
            return
        self._link.send(link.Round(round=report.round))
        if report.round % self._manifest.sync.evaluate_rounds == 0:
            self._link.send(link.Evaluate(round=report.round))
        if report.round % self._manifest.sync.anchor_rounds == 0:
            self._link.send(link.Checkpoint(path=str(self._dir.checkpoint), round=report.round))
            self._save_progress()

    # What the trainer says -------------------------------------------------------------------------------------------

    def _on_event(self, event: link.Event) -> None:
        answer = self._answers.pop((type(event), getattr(event, "round", 0)), None)
        if answer is not None and not answer.done():
            answer.set_result(event)
        match event:
            case link.Ready():
                log.info("trainer ready", pid=event.pid, device=event.device, trained_values=event.trained_values)
                self.state, self.device, self.failure = TrainerState.TRAINING, event.device, ""
                self._unaccepted = {}  # it is in the trainer's parameters now
                assert self._link is not None
                self._link.send(link.Evaluate(round=self._peer.context.newest_round))
                self._tell(lambda now: self._peer.on_training(now, True))
            case link.Progress():
                self.last = event
                self._advance(event.step, event.tokens, event.position)
            case link.SnapshotTaken():
                steps, tokens = self._at_snapshot
                self._at_snapshot = (steps + event.steps, tokens + event.tokens)
                self._advance(*self._at_snapshot, event.position)
                self._snapshot_round = event.round
                self._tell(lambda now: self._peer.on_snapshot(now, event.round))
            case link.Evaluated():
                self.losses.append(event)
                self.first_held_out = self.first_held_out or event
            case link.Warned() | link.Checkpointed(error=str()):
                detail = event.detail if isinstance(event, link.Warned) else f"checkpoint not written: {event.error}"
                log.warning("trainer warns", detail=detail)
                self.warnings = [*self.warnings[-7:], detail]

    def _advance(self, steps: int, tokens: int, position: int) -> None:
        """Tell the protocol of new steps. Totals may come late: a snapshot can overtake the report of its second."""
        counted_steps, counted_tokens = self._counted
        if steps > counted_steps:
            self._counted = (steps, tokens)
            more = (steps - counted_steps, tokens - counted_tokens)
            self._tell(lambda now: self._peer.on_progress(now, *more))
        total = self._tokens_before + self._counted[1]
        self._progress = self._progress.model_copy(
            update={"position": max(position, self._progress.position), "tokens": total}
        )

    def _on_exit(self, code: int, failed: link.Failed | None) -> None:
        self._link = None
        if self._leaving:
            self.state = TrainerState.ABSENT
            return
        self.failure = f"{failed.reason}: {failed.detail}" if failed else f"ended with code {code}"
        self.state = TrainerState.RESTARTING
        self.restarts += 1
        steady = asyncio.get_running_loop().time() - self._started_at > STEADY_SECONDS
        self._failures = 0 if steady else self._failures + 1
        first, longest = RESTART_SECONDS
        pause = min(longest, first * 2 ** max(0, self._failures - 1))
        log.warning("trainer died, restarting it from the agreed state", reason=self.failure, in_seconds=pause)
        self._tell(lambda now: self._peer.on_training(now, False))
        self._restart = asyncio.create_task(self._start_after(pause))

    async def _start_after(self, pause: float) -> None:
        await asyncio.sleep(pause)
        try:
            await self._start()
        except OSError as error:
            log.error("trainer cannot be started", reason=str(error))
            self._on_exit(-1, link.Failed(reason=link.FailureReason.INTERNAL, detail=str(error)))

    # The end ---------------------------------------------------------------------------------------------------------

    async def finish(self, seconds: float, keep: Set[UnitId]) -> None:
        """End the trainer: keep its moments, and of the units in `keep` what the swarm has not accepted."""
        self._leaving = True
        if self._restart is not None:
            self._restart.cancel()
        trainer, newest = self._link, self._peer.context.newest_round
        if self._unaccepted:  # no trainer has taken it up
            await asyncio.to_thread(self._store.save_unaccepted, newest, self._unaccepted)
        if trainer is None:
            return
        if self.state is TrainerState.TRAINING:
            try:
                async with asyncio.timeout(seconds):
                    trainer.send(link.Pause())
                    base = dict(self._base)  # packets may still be committed while the snapshot is waited for
                    await self._ask(link.Snapshot(round=LAST_SNAPSHOT), link.SnapshotTaken, LAST_SNAPSHOT)
                    work = {unit: trainer.snapshot(unit) - base[unit] for unit in sorted(keep)}
                    await asyncio.to_thread(self._store.save_unaccepted, newest, work)
                    checkpoint = link.Checkpoint(path=str(self._dir.checkpoint), round=newest)
                    await self._ask(checkpoint, link.Checkpointed, newest)
            except (TimeoutError, OSError) as error:
                log.warning("trainer's last work was not kept", reason=str(error) or f"no answer in {seconds:.0f} s")
            self._save_progress()
        await trainer.stop()

    def kill(self) -> None:
        """End the trainer at once."""
        self._leaving = True
        if self._link is not None:
            self._link.kill()

    async def _ask(self, command: link.Command, answer: type[link.Event], round_: int) -> link.Event:
        """Send a command, and wait for its answer; the caller bounds the wait."""
        if self._link is None:
            raise ConnectionError("the trainer is gone")
        future: asyncio.Future[link.Event] = asyncio.get_running_loop().create_future()
        self._answers[answer, round_] = future
        self._link.send(command)
        return await future

    def _save_progress(self) -> None:
        owned = tuple(sorted(self._peer.context.owned))
        progress = Progress(
            run=self._peer.context.run, owned=owned, position=self._progress.position, tokens=self._progress.tokens
        )
        try:
            self._store.save_progress(progress)
        except OSError as error:
            log.error("progress cannot be written", reason=str(error))
