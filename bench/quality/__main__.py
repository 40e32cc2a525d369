"""`python -m bench.quality`: what a swarm learns at equal tokens, beside a data centre, DiLoCo and a peer alone."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from rich.table import Table

from bench.quality.experiments import Outcome, Setting, run
from bench.quality.rows import REDUCED, ROWS
from bench.quality.text import DOMAINS
from spesd.cli.console import amount, console, number, talk


class Figures(NamedTuple):
    """One row over all seeds. Bytes are sent per peer, memory is static bytes of one trainer."""

    loss: float
    spread: float
    bytes: float
    memory: int
    seeds: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows, print the table, write curves, and close with one JSON object."""
    options = _parse(argv)
    setting = Setting(options.steps, tuple(options.text))
    jobs = [(name, seed) for seed in range(options.seeds) for name in options.rows]
    results: dict[str, dict[int, Outcome]] = {name: {} for name in options.rows}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, ROWS[name], setting, seed): (name, seed) for name, seed in jobs}
        for done, future in enumerate(as_completed(waiting), 1):
            name, seed = waiting[future]
            results[name][seed] = future.result()
            loss = results[name][seed].curve[-1].loss
            talk(f"{done} of {len(jobs)}: {name}, seed {seed}: held-out loss {loss:.3f}")
    figures = {name: summarise(list(outcomes.values())) for name, outcomes in results.items()}
    console().print(table(figures, setting))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_curves(options.out / "curves.csv", results)
    print(json.dumps({name: row._asdict() for name, row in figures.items()}))
    return 0


def summarise(outcomes: Sequence[Outcome]) -> Figures:
    """Mean and spread (standard deviation) of the last held-out loss."""
    losses = [outcome.curve[-1].loss for outcome in outcomes]
    sent = mean(outcome.curve[-1].bytes for outcome in outcomes)
    return Figures(mean(losses), stdev(losses) if len(losses) > 1 else 0.0, sent, outcomes[0].memory, len(losses))


def table(figures: dict[str, Figures], setting: Setting) -> Table:
    """The table for people, best row first."""
    title = f"held-out loss after {setting.steps} steps of each of four peers, text {' and '.join(setting.domains)}"
    result = Table(title=title)
    for column in ("row", "loss", "spread", "seeds", "sent per peer", "static memory"):
        result.add_column(column, justify="left" if column == "row" else "right")
    for name, row in sorted(figures.items(), key=lambda item: item[1].loss):
        sent = amount(row.bytes) if row.bytes else "–"
        result.add_row(name, number(row.loss), number(row.spread), str(row.seeds), sent, amount(row.memory))
    return result


def write_curves(path: Path, results: dict[str, dict[int, Outcome]]) -> None:
    """All points of all curves, as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "seed", "steps", "tokens", "bytes", "loss", "memory"))
        writer.writerows(_points(results))


def _points(results: dict[str, dict[int, Outcome]]) -> Iterator[tuple[object, ...]]:
    for name, outcomes in results.items():
        for seed, outcome in sorted(outcomes.items()):
            for point in outcome.curve:
                yield (name, seed, point.steps, point.tokens, round(point.bytes), round(point.loss, 5), outcome.memory)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to run, of {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, default=200, help="steps of each peer (default 200)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, with seeds 0, 1, … (default 1)")
    parser.add_argument("--text", action="append", choices=DOMAINS, help="text domain; repeatable (default stdlib)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="experiments at once")
    parser.add_argument("--out", type=Path, help="folder for curves.csv")
    options = parser.parse_args(argv)
    options.rows = options.rows or list(REDUCED)
    options.text = options.text or ["stdlib"]
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}")
    return options


if __name__ == "__main__":
    sys.exit(main())
