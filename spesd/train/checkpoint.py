"""The trainer's own state on disk: optimizer moments, one pair for each trained unit, in a safetensors file.

Weights are not in it: after a restart they come from the daemon.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spesd.model.units import Unit
from spesd.train.optim import UnitAdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of another run."""


class CheckpointInfo(BaseModel):
    """What a checkpoint says about itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    round: int = Field(ge=0)
    position: int = Field(ge=0)
    steps: dict[str, float] = Field(description="Adam's step count of each unit")
    hash: str = Field(description="blake3 over all moments in order of units")


def save_checkpoint(
    path: Path, optimizer: UnitAdamW, units: Iterable[Unit], run_id: str, round_number: int, position: int
) -> None:
    """Write the moments of `units`, whole or not at all (temporary file, fsync, rename). Raises OSError."""
    tensors: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for unit in units:
        state = optimizer.state(unit.id)
        steps[unit.id] = float(state["step"])
        tensors |= {name: state[moment].cpu() for moment, name in zip(_MOMENTS, _names(unit.id), strict=True)}
    info = CheckpointInfo(run_id=run_id, round=round_number, position=position, steps=steps, hash=_digest(tensors))
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, unfinished, metadata={"spesd": info.model_dump_json()})
    except SafetensorError as error:
        raise OSError(f"{unfinished}: {error}") from None
    _sync(unfinished)
    unfinished.replace(path)
    _sync(path.parent)


def load_checkpoint(path: Path, optimizer: UnitAdamW, units: Iterable[Unit], run_id: str) -> CheckpointInfo:
    """Read the moments of those `units` that are in the file; the others keep theirs.

    Raises CheckpointError when the file is missing, damaged or of another run; then no moment has been touched.
    """
    try:
        with safe_open(path, framework="pt") as file:
            info = CheckpointInfo.model_validate_json((file.metadata() or {}).get("spesd", ""))
            tensors = {name: file.get_tensor(name) for unit in info.steps for name in _names(unit)}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (SafetensorError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__})") from None
    if info.run_id != run_id:
        raise CheckpointError(f"{path}: belongs to run {info.run_id[:12]}, this is run {run_id[:12]}")
    if _digest(tensors) != info.hash:
        raise CheckpointError(f"{path}: damaged (its moments do not match their hash)")
    known = [unit for unit in units if unit.id in info.steps]
    for unit in known:
        for name in _names(unit.id):
            if tensors[name].dtype != torch.float32 or tensors[name].shape != (unit.size,):
                raise CheckpointError(f"{path}: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}")
    for unit in known:
        state = optimizer.state(unit.id)
        optimizer.resume(unit.id, info.steps[unit.id])
        for moment, name in zip(_MOMENTS, _names(unit.id), strict=True):
            state[moment].copy_(tensors[name])
    return info


def _names(unit_id: str) -> tuple[str, ...]:
    return tuple(f"{moment}/{unit_id}" for moment in _MOMENTS)


def _digest(tensors: dict[str, Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors.values():
        hasher.update(tensor.numpy().view(np.uint8).data)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
