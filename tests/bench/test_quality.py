"""The quality harness in a tiny setting: every kind of row runs, learns and repeats."""

from __future__ import annotations

import csv

import pytest

from bench.quality import experiments
from bench.quality.__main__ import main, summarise, write_curves
from bench.quality.experiments import Outcome, Point, Row, Setting, run
from bench.quality.text import Text
from spesd.data.prepare import stdlib_documents


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few files instead of the whole standard library."""
    import numpy as np

    data = b"".join(path.read_bytes() for path in stdlib_documents()[:8])
    tokens = np.frombuffer(data, np.uint8).astype(np.uint16)
    monkeypatch.setattr(experiments, "load_text", lambda name: Text(tokens[:-20_000], tokens[-20_000:]))


@pytest.mark.parametrize(
    "row",
    [
        Row("centralised", "centralised"),
        Row("alone", "alone"),
        Row("diloco", "diloco", every=4),
        Row("server", "server", every=4),
        Row("swarm", "swarm", every=4, merge={"interval": 1, "alpha": 0.2}),
    ],
    ids=lambda row: row.name,
)
def test_every_kind_of_row_learns(row: Row) -> None:
    outcome = run(row, Setting(steps=12), seed=0)
    losses = [point.loss for point in outcome.curve]
    assert losses[-1] < losses[0] < 6
    workers = 1 if row.kind == "alone" else experiments.PEERS
    assert outcome.curve[-1].tokens == pytest.approx(12 * workers * 1024, abs=4 * 1024)
    trains_all = row.kind in ("centralised", "alone", "diloco")
    assert outcome.memory == (13_229_568 if trains_all else 7_257_600)


def test_a_swarm_repeats_from_its_seed() -> None:
    row = Row("swarm", "swarm", every=4)
    assert run(row, Setting(steps=8), 3) == run(row, Setting(steps=8), 3)


def test_figures_and_curves(tmp_path) -> None:
    outcomes = [Outcome([Point(1, 10, 5.0, 3.0), Point(2, 20, 10.0, loss)], 7) for loss in (2.0, 2.2)]
    figures = summarise(outcomes)
    assert (figures.loss, figures.bytes, figures.memory, figures.seeds) == (pytest.approx(2.1), 10.0, 7, 2)
    assert figures.spread == pytest.approx(0.1414, abs=1e-3)
    write_curves(tmp_path / "curves.csv", {"row": dict(enumerate(outcomes))})
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "3.0", "2.2"]


def test_an_unknown_row_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2
    assert "nonsense" in capsys.readouterr().err
