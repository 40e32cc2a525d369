"""Held-out loss against tokens, bytes and memory, drawn from the curves' CSV so that old results can be drawn again."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spesd.config.errors import ExpectedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EMPHASISED = "spesd"
SIZE_INCHES = (7.0, 4.5)


class Curve(NamedTuple):
    """One row: mean over its seeds at each point, float64 [points], and the lowest and highest loss of any seed."""

    tokens: np.ndarray
    bytes: np.ndarray
    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray
    memory: int


def read_curves(path: Path) -> dict[str, Curve]:
    """The curves of a CSV that `bench.quality` wrote, by row, best last loss first."""
    points: dict[str, dict[int, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            points[line["row"]][int(line["seed"])].append(line)
    curves = {name: _mean(list(seeds.values())) for name, seeds in points.items()}
    return dict(sorted(curves.items(), key=lambda item: item[1].loss[-1]))


def _mean(seeds: list[list[dict[str, str]]]) -> Curve:
    """Mean at the tokens of the seed with the fewest points; between the points of the others."""

    def column(points: list[dict[str, str]], name: str) -> np.ndarray:
        return np.array([float(point[name]) for point in points])

    tokens = column(min(seeds, key=len), "tokens")
    sent, loss = (
        np.array([np.interp(tokens, column(points, "tokens"), column(points, name)) for points in seeds])
        for name in ("bytes", "loss")
    )
    return Curve(tokens, sent.mean(0), loss.mean(0), loss.min(0), loss.max(0), int(seeds[0][0]["memory"]))


def draw(curves: dict[str, Curve], folder: Path, title: str = "") -> list[Path]:
    """Write `loss-tokens.png`, `loss-bytes.png` and `loss-memory.png`. Raises ExpectedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ExpectedError("plots need matplotlib: pip install -e '.[bench]'") from None
    panels: dict[str, Callable[[Axes, dict[str, Curve]], None]] = {
        "tokens": _against_tokens,
        "bytes": _against_bytes,
        "memory": _against_memory,
    }
    written = []
    for name, panel in panels.items():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        panel(axes, curves)
        axes.set_ylabel("held-out loss, nats per token")
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
        written.append(folder / f"loss-{name}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def _against_tokens(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        line = axes.plot(curve.tokens / 1e6, curve.loss, label=name, linewidth=_width(name))[0]
        axes.fill_between(curve.tokens / 1e6, curve.low, curve.high, color=line.get_color(), alpha=0.15)
    axes.set_xlabel("tokens of all peers, millions")
    axes.legend(fontsize="x-small", ncols=2)


def _against_bytes(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        if curve.bytes[-1] > 0:
            axes.plot(curve.bytes / 1e6, curve.loss, label=name, linewidth=_width(name))
    axes.set_xscale("log")
    axes.set_xlabel("sent per peer, MB")
    axes.legend(fontsize="x-small", ncols=2)


def _against_memory(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.scatter(curve.memory / 1e6, curve.loss[-1], s=60 if name == EMPHASISED else 20)
        axes.annotate(
            name, (curve.memory / 1e6, curve.loss[-1]), (4, 2), textcoords="offset points", fontsize="x-small"
        )
    axes.set_xlabel("static memory of one trainer, MB")
    axes.margins(x=0.15)


def _width(name: str) -> float:
    return 2.5 if name == EMPHASISED else 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m bench.quality.plots CURVES.csv FOLDER`: draw results that were written before."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality.plots", description=__doc__)
    parser.add_argument("curves", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--row", action="append", help="draw these rows only; repeatable")
    options = parser.parse_args(argv)
    curves = read_curves(options.curves)
    if options.row:
        curves = {name: curves[name] for name in options.row if name in curves}
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in draw(curves, options.folder, options.title):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
