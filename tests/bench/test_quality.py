"""The quality harness in a tiny setting: every kind of row runs, learns and repeats."""

from __future__ import annotations

import csv
import json
from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import pytest

import bench.quality.__main__ as quality
from bench.quality import experiments
from bench.quality.__main__ import main
from bench.quality.experiments import Outcome, Point, Row, Setting, run
from bench.quality.plots import draw, read_curves
from bench.quality.report import Figures, remarks, summarise, write_curves
from bench.quality.rows import ROWS
from bench.quality.text import Text
from spesd.data.prepare import stdlib_documents


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few files instead of the whole standard library."""
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
    outcome = run(row, Setting(12, ("stdlib",)), seed=0)
    losses = [point.loss for point in outcome.curve]
    assert losses[-1] < losses[0] < 6
    workers = 1 if row.kind == "alone" else experiments.PEERS
    assert outcome.curve[-1].tokens == pytest.approx(12 * workers * 1024, abs=4 * 1024)
    trains_all = row.kind in ("centralised", "alone", "diloco")
    assert outcome.memory == (13_229_568 if trains_all else 7_257_600)


def test_a_killed_peer_comes_back_with_its_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "CHURN_SECONDS", 8)
    monkeypatch.setattr(experiments, "AWAY_SECONDS", 3)
    restored: list[int] = []
    restore = experiments.Learner.restore
    monkeypatch.setattr(
        experiments.Learner, "restore", lambda self, moments: (restored.append(len(moments)), restore(self, moments))
    )
    row = Row("churn", "swarm", every=2, churn=True, sync={"anchor_rounds": 1})
    outcome = run(row, Setting(16, ("stdlib",), sequences=2), seed=0)
    assert outcome.curve[-1].loss < 6
    assert restored[: experiments.PEERS] == [0] * experiments.PEERS, "nothing to restore at the beginning"
    assert restored[experiments.PEERS :], "nobody came back"
    assert all(restored[experiments.PEERS :])


def test_a_swarm_repeats_from_its_seed() -> None:
    row = Row("swarm", "swarm", every=4)
    assert run(row, Setting(8, ("stdlib",)), 3) == run(row, Setting(8, ("stdlib",)), 3)


def test_figures_and_curves(tmp_path) -> None:
    outcomes = [Outcome([Point(1, 10, 5.0, 3.0), Point(2, 20, 10.0, loss)], 7) for loss in (2.0, 2.2)]
    figures = summarise(outcomes)
    assert (figures.loss, figures.bytes, figures.memory, figures.seeds) == (pytest.approx(2.1), 10.0, 7, 2)
    assert figures.spread == pytest.approx(0.1414, abs=1e-3)
    assert [figures.at(sent) for sent in (5.0, 7.5, 10.0, 99.0)] == pytest.approx([3.0, 2.55, 2.1, 2.1])
    assert figures.public().keys() == {"loss", "spread", "bytes", "memory", "seeds"}
    write_curves(tmp_path / "curves.csv", {"row": dict(enumerate(outcomes))})
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "3.0", "2.2"]
    curve = read_curves(tmp_path / "curves.csv")["row"]
    assert curve.loss.tolist() == pytest.approx([3.0, 2.1])
    assert (curve.low[-1], curve.high[-1], curve.memory) == (2.0, 2.2, 7)


def test_seeds_with_different_points_are_compared_at_equal_tokens(tmp_path) -> None:
    few = Outcome([Point(2, 20, 10.0, 2.0), Point(4, 40, 20.0, 1.0)], 7)
    many = Outcome([Point(n, 10 * n, 5.0 * n, 5.0 - n) for n in (1, 2, 3, 4)], 7)
    write_curves(tmp_path / "curves.csv", {"row": {0: few, 1: many}})
    curve = read_curves(tmp_path / "curves.csv")["row"]
    assert (curve.tokens.tolist(), curve.loss.tolist()) == ([20.0, 40.0], [2.5, 1.0])
    assert curve.bytes.tolist() == [10.0, 20.0]


def test_plots_are_drawn_from_the_curves(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="plots are drawn with the extra 'bench'")
    outcome = Outcome([Point(1, 10, 5.0, 3.0), Point(2, 20, 10.0, 2.0)], 7)
    write_curves(tmp_path / "curves.csv", {"spesd": {0: outcome}, "alone": {0: outcome}})
    written = draw(read_curves(tmp_path / "curves.csv"), tmp_path)
    assert [path.name for path in written] == ["loss-tokens.png", "loss-bytes.png", "loss-memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_what_is_written_is_not_run_again(tmp_path, monkeypatch, capsys) -> None:
    ran = []

    def run(row, setting, seed):
        ran.append((row.name, seed))
        return Outcome([Point(120, 10, 0.0, 2.0 + seed)], 7)

    class Here:
        """Runs a job where it is handed in."""

        def submit(self, function, *args):
            future = Future()
            future.set_result(function(*args))
            return future

    monkeypatch.setattr(quality, "run", run)
    monkeypatch.setattr(quality, "draw", lambda *args: [])
    monkeypatch.setattr(quality, "_pool", lambda jobs: nullcontext(Here()))
    assert main(["alone", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert main(["alone", "spesd", "--seeds", "3", "--out", str(tmp_path)]) == 0
    assert sorted(ran) == [("alone", 0), ("alone", 1), ("alone", 2), ("spesd", 0), ("spesd", 1), ("spesd", 2)]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["alone"]["loss"], last["alone"]["seeds"]) == (3.0, 3)
    assert main(["alone", "--steps", "200", "--out", str(tmp_path)]) == 1
    assert "alone has 120 steps, not 200" in capsys.readouterr().err


def test_remarks_say_what_the_default_gains() -> None:
    losses = {"alone": 2.0, "plain_5": 1.8, "diloco_5": 1.6, "spesd": 1.7}
    figures = {name: Figures(loss, 0.0, 0.0, 0, 1, (np.zeros(1), np.zeros(1))) for name, loss in losses.items()}
    below, closed = remarks(figures)
    assert "15.0% below alone" in below
    assert "50% of the gap" in closed
    assert list(remarks({"alone": figures["alone"]})) == []


def test_the_rows_that_everybody_asks_for_are_there() -> None:
    wanted = {
        "centralised",
        "alone",
        "diloco",
        "spes_server",
        "spesd",
        "plain_5",
        "plain_20",
        "plain_100",
        "two_owners",
    }
    assert wanted | {"delayed", "speeds_1_2_4", "churn", "split_domains"} <= ROWS.keys()


def test_an_unknown_row_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nonsense"])
    assert stopped.value.code == 2
    assert "nonsense" in capsys.readouterr().err
