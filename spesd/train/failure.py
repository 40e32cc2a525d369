"""Why a trainer gave up, in the closed list of the link."""

from __future__ import annotations

import torch

from spesd.data.shards import DataError
from spesd.train.exchange import ExchangeError
from spesd.train.link import Failed, FailureReason, LinkError


class TrainerError(RuntimeError):
    """An expected end of the trainer, with its reason."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def describe_failure(error: Exception) -> Failed:
    """Map an error to the event that reports it; `INTERNAL` is everything that nobody foresaw."""
    return Failed(reason=_reason(error), detail=str(error) or type(error).__name__)


def _reason(error: Exception) -> FailureReason:
    match error:
        case TrainerError():
            return error.reason
        case MemoryError() | torch.OutOfMemoryError():
            return FailureReason.OUT_OF_MEMORY
        case RuntimeError() if "can't allocate memory" in str(error):  # how torch's CPU allocator says it
            return FailureReason.OUT_OF_MEMORY
        case DataError():
            return FailureReason.BAD_DATA
        case LinkError():
            return FailureReason.BAD_COMMAND
        case ExchangeError():
            return FailureReason.BAD_EXCHANGE
    return FailureReason.INTERNAL
