"""`python -m bench [NAME ...]`: run the named benches, or all; tables for people, one JSON object as the last line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from bench.report import Result, exit_code
from spesd.cli.console import console, talk
from spesd.cli.fleet import Interruptible
from spesd.config.errors import ExitCode

BENCHES = {
    "trainer": "what rounds cost a trainer in tokens per second",
    "memory": "memory of a trainer that owns 2 of 8 experts, beside what the formula predicts",
    "step": "speed of the expert layer, beside the plain loop over experts",
    "live": "held-out loss of the demo's swarm beside a single daemon at as many steps (only when named)",
}
"""Each name is a module of this package with `run(signals: Interruptible) -> Result`.

A module is imported only when its turn comes; `step` stands after those that watch others, because it loads torch into
this process.
"""

ONLY_NAMED = {"live"}
"""Benches that do not belong to a run of all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run benches; the exit code is 0 only if every one ran and met its targets."""
    names = _parse(argv)
    return exit_code(lambda: _run(names))


def _run(names: Sequence[str]) -> int:
    results: dict[str, Result] = {}
    with Interruptible() as signals:
        for name in names:
            talk(f"bench {name}: {BENCHES[name]}")
            results[name] = importlib.import_module(f"bench.{name}").run(signals)
            console().print(results[name].table())
    for name, result in results.items():
        for target in (target for target, met in result.targets.items() if not met):
            talk(f"bench {name}: target {target!r} is not met")
    print(json.dumps({name: result.model_dump(mode="json") for name, result in results.items()}))
    return ExitCode.OK if all(result.met for result in results.values()) else ExitCode.RUNTIME


def _parse(argv: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the benches to run, in the order of the registry."""
    listing = "\n".join(f"  {name:8} {what}" for name, what in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench", epilog=f"benches:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches to run (default: all but live)")
    names = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"unknown bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    return tuple(name for name in BENCHES if name in (names or BENCHES.keys() - ONLY_NAMED))


if __name__ == "__main__":
    sys.exit(main())
