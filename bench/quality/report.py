"""What is said of the results: figures by row, a table, who closes which gap, and every point of every curve as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from rich.table import Table

from bench.quality.experiments import Outcome, Point, Setting
from spesd.cli.console import amount, number
from spesd.config.errors import ExpectedError

Results = dict[str, dict[int, Outcome]]
"""Outcomes by row and seed."""

COLUMNS = ("row", "seed", "steps", "tokens", "bytes", "loss", "memory")


class Figures(NamedTuple):
    """One row over all seeds. Bytes are sent per peer, memory is static bytes of one trainer.

    `curve` is the mean learning curve as (bytes, loss), float64 [points] each.
    """

    loss: float
    spread: float
    bytes: float
    memory: int
    seeds: int
    curve: tuple[np.ndarray, np.ndarray]

    def at(self, sent: float) -> float:
        """Loss once so many bytes were sent, between the points of the curve; of a row that sends none, the last."""
        return float(np.interp(sent, *self.curve)) if self.bytes else self.loss

    def public(self) -> dict[str, float]:
        """What the JSON object has."""
        return {name: value for name, value in self._asdict().items() if name != "curve"}


def summarise(outcomes: Sequence[Outcome]) -> Figures:
    """Mean and spread (standard deviation) of the last held-out loss."""
    losses = [outcome.curve[-1].loss for outcome in outcomes]
    points = min(len(outcome.curve) for outcome in outcomes)
    sent, loss = (
        np.mean([[getattr(point, name) for point in outcome.curve[-points:]] for outcome in outcomes], axis=0)
        for name in ("bytes", "loss")
    )
    spread = stdev(losses) if len(losses) > 1 else 0.0
    return Figures(mean(losses), spread, float(sent[-1]), outcomes[0].memory, len(losses), (sent, loss))


def table(figures: Mapping[str, Figures], setting: Setting) -> Table:
    """The table for people, best row first. Equal bytes are what the most frugal row sends in all."""
    equal = min((row.bytes for row in figures.values() if row.bytes), default=0.0)
    title = f"held-out loss after {setting.steps} steps of each of four peers, text {' and '.join(setting.domains)}"
    result = Table(title=title)
    for column in ("row", "loss", "spread", "seeds", "sent per peer", f"loss at {amount(equal)}", "static memory"):
        result.add_column(column, justify="left" if column == "row" else "right")
    for name, row in sorted(figures.items(), key=lambda item: item[1].loss):
        sent = amount(row.bytes) if row.bytes else "–"
        then = number(row.at(equal)) if row.bytes else "–"
        result.add_row(name, number(row.loss), number(row.spread), str(row.seeds), sent, then, amount(row.memory))
    return result


def remarks(figures: Mapping[str, Figures]) -> Iterator[str]:
    """How the default stands to a peer alone, and how much of plain SPES's gap to DiLoCo at its frequency it closes."""
    ours = figures.get("spesd")
    if ours is not None and (alone := figures.get("alone")) is not None:
        yield f"spesd is {1 - ours.loss / alone.loss:.1%} below alone"
    plain, full = figures.get("plain_5"), figures.get("diloco_5")
    if ours is not None and plain is not None and full is not None and plain.loss > full.loss:
        share = (plain.loss - ours.loss) / (plain.loss - full.loss)
        yield f"spesd closes {share:.0%} of the gap between plain SPES and DiLoCo, both with a round every 5 steps"


def write_curves(path: Path, results: Results) -> None:
    """All points of all curves, as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_points(results))


def read_results(path: Path, setting: Setting) -> Results:
    """What `write_curves` wrote; nothing if there is no such file. Raises ExpectedError where it is of other steps."""
    results: Results = {}
    if not path.exists():
        return results
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            outcome = Outcome([], int(line["memory"]))
            outcome = results.setdefault(line["row"], {}).setdefault(int(line["seed"]), outcome)
            steps, tokens, sent = int(line["steps"]), int(line["tokens"]), float(line["bytes"])
            outcome.curve.append(Point(steps, tokens, sent, float(line["loss"])))
    for name, outcomes in results.items():
        for outcome in outcomes.values():
            if outcome.curve[-1].steps < setting.steps:
                raise ExpectedError(f"{path}: {name} has {outcome.curve[-1].steps} steps, not {setting.steps}")
    return results


def _points(results: Results) -> Iterator[tuple[object, ...]]:
    for name, outcomes in results.items():
        for seed, outcome in sorted(outcomes.items()):
            for point in outcome.curve:
                yield (name, seed, point.steps, point.tokens, round(point.bytes), round(point.loss, 5), outcome.memory)
