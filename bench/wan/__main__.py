"""`python -m bench.wan [METHOD ...]`: rounds over home internet links, of spesd by codec and of a central server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from bench.report import exit_code
from bench.wan import baseline, swarm
from bench.wan.links import Link
from bench.wan.report import Measurement, figures, misses, table
from bench.wan.rig import Rig
from bench.wan.setting import PEERS, TRANSPORTS, Setting
from spesd.cli.console import console, talk
from spesd.cli.fleet import Interruptible
from spesd.config.errors import ExitCode

BASELINE = "baseline"
METHODS = (BASELINE, "fp16", "int8", "int4", "topk")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and close with one JSON object; the exit code is 0 only if all goals are met."""
    options = _parse(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    setting = Setting(
        rounds=options.rounds,
        refresh_every=options.refresh_every,
        transport=options.transport,
        up_mbit=options.up_mbit,
    )
    results: dict[str, Measurement] = {}
    with Interruptible() as signals, Rig(_links(setting)) as rig:
        for method in options.methods:
            talk(f"wan bench: {method}")
            results[method] = _measure(rig, signals, setting, method)
    console().print(table(results, _title(setting)))
    missed = misses(results)
    for line in missed:
        talk(f"wan bench: {line}")
    print(json.dumps({name: figures(measured)._asdict() for name, measured in results.items()}))
    return ExitCode.RUNTIME if missed else ExitCode.OK


def _measure(rig: Rig, signals: Interruptible, setting: Setting, method: str) -> Measurement:
    return baseline.run(rig, signals, setting) if method == BASELINE else swarm.run(rig, signals, setting, method)


def _links(setting: Setting) -> dict[int, Link]:
    return dict.fromkeys(range(1, PEERS + 1), setting.link) | {PEERS + 1: setting.server_link}


def _title(setting: Setting) -> str:
    sizes, link = setting.sizes, setting.link
    return (
        f"{sizes.shared / 1e6:.1f} M values shared, {sizes.experts / 1e6:.1f} M in experts, {sizes.peers} peers at "
        f"{link.up:g}/{link.down:g} Mbit/s, {link.rtt:g} ms, {link.loss:.1%} loss, {setting.transport}"
        f"{f', capped at {setting.up_mbit:g} up' if setting.up_mbit else ''}; means per peer and round"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.wan", description=__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=Setting().rounds, help="rounds measured of each method")
    parser.add_argument("--refresh-every", type=int, default=1, help="rounds in which a foreign expert is fetched once")
    parser.add_argument("--transport", choices=TRANSPORTS, default=Setting().transport, help="of spesd (default both)")
    parser.add_argument("--up-mbit", type=float, help="cap of each peer of spesd on what it sends")
    options = parser.parse_args(argv)
    options.methods = options.methods or list(METHODS)
    if unknown := [method for method in options.methods if method not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
