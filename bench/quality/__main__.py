"""`python -m bench.quality`: what a swarm learns at equal tokens, beside a data centre, DiLoCo and a peer alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from bench.quality.experiments import FULL, REDUCED, Setting, run
from bench.quality.plots import draw, read_curves
from bench.quality.report import Results, read_results, remarks, summarise, table, write_curves
from bench.quality.rows import LEFT_TO_FULL, ROWS
from bench.quality.text import DOMAINS
from spesd.cli.console import console, talk
from spesd.config.errors import ExpectedError

SEEDS = 3
CURVES = "curves.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows, print the table, write curves and plots, and close with one JSON object."""
    options = _parse(argv)
    setting = _setting(options)
    try:
        results = _run(options, setting)
        figures = {name: summarise(list(results[name].values())) for name in options.rows}
        console().print(table(figures, setting))
        for remark in remarks(figures):
            console().print(remark)
        if options.out is not None:
            draw(read_curves(options.out / CURVES), options.out, f"{setting.steps} steps of each of four peers")
    except ExpectedError as error:
        talk(f"error: {error}")
        return 1
    print(json.dumps({name: row.public() for name, row in figures.items()}))
    return 0


def _run(options: argparse.Namespace, setting: Setting) -> Results:
    """Run what the curves in the folder `--out` do not have yet; each result is written at once."""
    file = None
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / CURVES
    results = read_results(file, setting) if file is not None else {}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(name, seed) for seed in seeds for name in options.rows if seed not in results.get(name, {})]
    with _pool(options.jobs) as pool:
        waiting = {pool.submit(run, ROWS[name], setting, seed): (name, seed) for name, seed in jobs}
        for done, future in enumerate(as_completed(waiting), 1):
            name, seed = waiting[future]
            outcome = results.setdefault(name, {})[seed] = future.result()
            talk(f"{done} of {len(jobs)}: {name}, seed {seed}: held-out loss {outcome.curve[-1].loss:.3f}")
            if file is not None:
                write_curves(file, results)
    return results


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes; what has not begun is dropped when one fails or the user has had enough."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _setting(options: argparse.Namespace) -> Setting:
    given = {"steps": options.steps, "domains": tuple(options.text or ())}
    base = FULL if options.full else REDUCED
    return base._replace(**{name: value for name, value in given.items() if value})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help=f"rows to run (default: with --full all, else the main ones): {', '.join(ROWS)}",
    )
    parser.add_argument("--full", action="store_true", help=f"{FULL.steps} steps instead of {REDUCED.steps}; hours")
    parser.add_argument("--steps", type=int, help="steps of each peer")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"runs of each row (default {SEEDS})")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first seed (default 0)")
    parser.add_argument("--text", action="append", choices=DOMAINS, help="text domain; repeatable (default both)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="experiments at once")
    parser.add_argument("--out", type=Path, help="folder for curves.csv and plots; what is there is not run again")
    options = parser.parse_args(argv)
    options.rows = options.rows or [name for name in ROWS if options.full or name not in LEFT_TO_FULL]
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; known are {', '.join(ROWS)}")
    for name in ("steps", "seeds", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value} is less than 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
