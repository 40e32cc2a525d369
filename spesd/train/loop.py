"""The training loop: obey the daemon at step boundaries, step, report. It never waits for the network."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor

from spesd.config.manifest import Manifest
from spesd.data.sampler import Sampler, held_out_blocks
from spesd.data.shards import DataError, open_shard
from spesd.model.flat import FlatWeights
from spesd.model.transformer import Transformer
from spesd.model.units import UnitLayout
from spesd.train import link
from spesd.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from spesd.train.exchange import UnitFile
from spesd.train.failure import TrainerError
from spesd.train.link import Command, Event, FailureReason
from spesd.train.meters import Meters
from spesd.train.optim import UnitAdamW, balance_factor, clip_gradient

MAX_SKIPPED_IN_A_ROW = 20
"""Steps without a finite gradient after which the weights are taken to be lost."""

Commands = SimpleQueue[Command | Exception]
"""Commands in the order in which they came; an exception is raised when its turn comes."""


class Trainer:
    """Trains one peer's units. Made from `Start`, driven by `commands`, answers through `send`."""

    def __init__(self, start: link.Start, commands: Commands, send: Callable[[Event], None]) -> None:
        self.commands, self.send = commands, send
        self.manifest = _parse_manifest(start.manifest)
        self.device = choose_device(start.device)
        torch.set_num_threads(start.threads)
        # The experts of one layer lie far apart in theta on purpose; see spesd.model.flat.
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")

        self.layout = UnitLayout(self.manifest.model, self.manifest.sync.shared_shards)
        self.inbound = UnitFile(Path(start.inbound), self.layout)
        self.outbound = UnitFile(Path(start.snapshot), self.layout)
        self.weights = self._checked_weights(start.owned)
        for unit in self.layout.units:
            self._load(unit.id, "replace")
        self.model = Transformer(self.weights, self.manifest.data.sequence_length)
        self.optimizer = UnitAdamW(self.weights, self.manifest.optimizer)

        self.round, self.position = start.round, start.position
        if start.checkpoint is not None:
            self._restore(Path(start.checkpoint))
        self._open_data(start)
        self.meters = Meters()
        self.running, self.paused = True, False
        self._skipped_in_a_row = 0
        self._step_seconds = 1 / start.max_steps_per_second if start.max_steps_per_second else 0.0
        self._next_step_at = time.monotonic()

    def run(self) -> None:
        """Train until told to stop. Raises TrainerError, DataError, LinkError and whatever torch raises."""
        self._send_ready()
        while True:
            self.obey()
            if not self.running:
                break
            with self.meters.timed("step"):
                self.step()
            if progress := self.meters.report(self.sampler.position):
                self.send(progress)
        self.send(link.Stopped(position=self.sampler.position, step=self.meters.steps))

    def step(self) -> None:
        """One optimizer step over `accumulate` micro-batches; left out when its gradient is not finite."""
        config = self.manifest.optimizer
        self._next_step_at = max(self._next_step_at + self._step_seconds, time.monotonic())
        self.weights.grad.zero_()
        loss = torch.zeros((), device=self.device)
        balances = self.model.balances(balance_factor(config, self.round))
        for _ in range(config.accumulate):
            blocks = self._checked_tokens(self.sampler.batch(config.sequences)).to(self.device)
            with self._autocast():
                losses = self.model.loss(blocks, balances)
            torch.autograd.backward(losses.total / config.accumulate)
            loss += losses.cross_entropy.detach() / config.accumulate

        finite = math.isfinite(clip_gradient(self.weights.grad, config.clip_norm))
        if finite:
            self.optimizer.step(self.round)
        tokens = config.accumulate * config.sequences * self.manifest.data.sequence_length
        self.meters.count_step(tokens, loss.item() if finite else None)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            detail = f"no finite gradient in {MAX_SKIPPED_IN_A_ROW} steps, last loss {loss.item()}"
            raise TrainerError(FailureReason.NON_FINITE, detail)

    def obey(self) -> None:
        """Obey all waiting commands in order; wait for more while paused or ahead of the pace."""
        while self.running:
            patience = None if self.paused else max(0.0, self._next_step_at - time.monotonic())
            try:
                command = self.commands.get(timeout=patience)
            except Empty:
                return
            if isinstance(command, Exception):
                raise command
            self._obey_one(command)

    def _obey_one(self, command: Command) -> None:
        match command:
            case link.Round(round=number):
                self.round = number
            case link.Load(units=units, mode=mode, round=number):
                with self.meters.timed("load"):
                    for unit_id in units:
                        self._load(unit_id, mode)
                self.send(link.Loaded(units=units, round=number))
            case link.Snapshot(round=number):
                with self.meters.timed("snapshot"):
                    self._snapshot(number)
            case link.Evaluate(round=number):
                with self.meters.timed("evaluate"):
                    self._evaluate(number)
            case link.Own(experts=experts):
                self._own(experts)
            case link.Checkpoint(path=path, round=number):
                self._checkpoint(Path(path), number)
            case link.Pause():
                self.paused = True
            case link.Resume():
                self.paused = False
            case link.Stop():
                self.running = False
            case link.Start():
                raise TrainerError(FailureReason.BAD_COMMAND, "start came twice; a trainer is started once")

    def _load(self, unit_id: str, mode: str) -> None:
        """Add or copy a unit's inbound values; exact in fp32."""
        if unit_id not in self.layout.by_id:
            raise TrainerError(FailureReason.BAD_COMMAND, f"load of unknown unit {unit_id!r}")
        if mode == "add" and not self.weights.is_trained(unit_id):
            raise TrainerError(FailureReason.BAD_COMMAND, f"load adds to {unit_id}, which is frozen: use replace")
        values = torch.from_numpy(self.inbound.values(unit_id)).to(self.device)
        target = self.weights.values(unit_id)
        if mode == "add":
            target.add_(values)
        else:
            target.copy_(values)
        self.inbound.release(unit_id)

    def _snapshot(self, number: int) -> None:
        for unit in self.weights.trained:
            torch.from_numpy(self.outbound.values(unit.id)).copy_(self.weights.values(unit.id))
            self.outbound.release(unit.id)
        window = self.meters.take_snapshot_window()
        self.send(
            link.SnapshotTaken(
                round=number,
                steps=window.steps,
                tokens=window.tokens,
                position=self.sampler.position,
                loss=window.loss,
                units=tuple(unit.id for unit in self.weights.trained),
            )
        )

    @torch.no_grad()
    def _evaluate(self, number: int) -> None:
        total, tokens = 0.0, 0
        for blocks in torch.split(self._held_out, self.manifest.optimizer.sequences):
            with self._autocast():
                loss = self.model.loss(blocks.to(self.device)).cross_entropy
            count = blocks[:, 1:].numel()
            total, tokens = total + loss.item() * count, tokens + count
        if not math.isfinite(total):
            raise TrainerError(FailureReason.NON_FINITE, f"held-out loss of round {number} is {total / tokens}")
        self.send(link.Evaluated(round=number, loss=total / tokens, tokens=tokens))

    def _own(self, experts: tuple[str, ...]) -> None:
        self.weights = self._checked_weights(experts, self.weights)
        self.model.bind(self.weights)
        self.optimizer.rebind(self.weights)
        self.send(link.Owned(experts=tuple(unit.id for unit in self.weights.owned)))

    def _checkpoint(self, path: Path, number: int) -> None:
        """Write a checkpoint; a full disk is reported and survived."""
        error = None
        try:
            run_id, position = self.manifest.run_id, self.sampler.position
            save_checkpoint(path, self.optimizer, self.weights.trained, run_id, number, position)
        except OSError as failure:
            error = str(failure)
        self.send(link.Checkpointed(path=str(path), round=number, error=error))

    def _restore(self, path: Path) -> None:
        """Take moments from a checkpoint; a bad one is reported and training goes on with fresh moments."""
        try:
            info = load_checkpoint(path, self.optimizer, self.weights.trained, self.manifest.run_id)
        except CheckpointError as error:
            self.send(link.Warned(detail=f"fresh optimizer moments: {error}"))
        else:
            self.position = max(self.position, info.position)

    def _checked_weights(self, experts: tuple[str, ...], current: FlatWeights | None = None) -> FlatWeights:
        """Weights that train `experts`, with room for their snapshots on disk."""
        try:
            weights = current.with_owned(experts) if current else FlatWeights(self.layout, experts, self.device)
        except ValueError as error:
            raise TrainerError(FailureReason.BAD_COMMAND, str(error)) from None
        self.outbound.reserve(unit.id for unit in weights.trained)
        return weights

    def _open_data(self, start: link.Start) -> None:
        data = self.manifest.data
        missing = [shard.hash for shard in (*data.train, *data.held_out) if shard.hash not in start.shards]
        if missing:
            raise DataError(f"start names no file for {len(missing)} shard(s), first {missing[0][:12]}")
        train, held_out = (
            [open_shard(Path(start.shards[shard.hash]), shard) for shard in shards]
            for shards in (data.train, data.held_out)
        )
        self.sampler = Sampler(train, self.manifest.run_id, start.peer_id, data.sequence_length, self.position)
        blocks = held_out_blocks(held_out, data.held_out_sequences, data.sequence_length)
        self._held_out = self._checked_tokens(blocks)

    def _checked_tokens(self, blocks: np.ndarray) -> Tensor:
        """Blocks as a tensor, after a check that the embedding has a row for every token."""
        if (largest := int(blocks.max())) >= self.manifest.model.vocabulary:
            raise DataError(f"token {largest} in the shards, model.vocabulary is {self.manifest.model.vocabulary}")
        return torch.from_numpy(blocks)

    def _autocast(self) -> torch.autocast:
        """bf16 where the device has it; CPUs are faster and exact in fp32."""
        enabled = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _send_ready(self) -> None:
        self.send(
            link.Ready(
                pid=os.getpid(),
                device=str(self.device),
                trained_values=self.weights.theta.numel(),
                frozen_values=self.weights.frozen.numel(),
                position=self.sampler.position,
            )
        )


def choose_device(name: str) -> torch.device:
    """The device that a peer config names; "auto" prefers CUDA. Raises TrainerError when there is none."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if devices else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= devices:
        detail = f"device {name!r} was asked for, torch finds {devices} CUDA devices: use 'cpu' or 'auto'"
        raise TrainerError(FailureReason.NO_DEVICE, detail)
    return device


def _parse_manifest(data: bytes) -> Manifest:
    try:
        return Manifest.from_canonical(data)
    except ValueError as error:
        raise TrainerError(FailureReason.BAD_COMMAND, f"manifest in start: {error}") from None
