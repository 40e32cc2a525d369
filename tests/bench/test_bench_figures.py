"""Arithmetic, verdicts and output of the benches; nothing is started."""

import json

import pytest

import bench.memory
import bench.step
import bench.trainer
from bench.__main__ import BENCHES, main
from bench.drafts import DEMO, demo_draft, write_draft
from bench.memory import MemoryResult, Peak, predicted_bytes
from bench.report import BenchError
from bench.step import Comparison
from bench.trainer import Speed, Window
from spesd.config.files import load_draft


def window(tokens_per_s, rounds=5, snapshot=0.004, load=0.006, waiting=0.001):
    return Window(
        tokens_per_s=tokens_per_s, rounds=rounds, snapshot_share=snapshot, load_share=load, waiting_share=waiting
    )


ALONE = [window(100, rounds=0, snapshot=0, load=0), window(120, rounds=0, snapshot=0, load=0)]


def memory_result(saved):
    few = Peak(owned=2, trained_values=10, frozen_values=30, peak_bytes=1000, predicted_bytes=280)
    everything = Peak(owned=8, trained_values=40, frozen_values=0, peak_bytes=1000 + saved, predicted_bytes=640)
    return bench.memory.compare(500, few, everything)


def test_speed_counts_between_changes_only():
    """The first value may be of any age, and a counter that stands still at the end counts until its last change."""
    speed = Speed()
    for at, tokens in [(0.0, 7), (0.9, 7), (1.0, 107), (2.0, 207), (3.0, 307), (3.9, 307)]:
        speed.observe(tokens, at)
    assert speed.tokens_per_second() == pytest.approx(100)


@pytest.mark.parametrize("seen", [[], [(0.0, 5), (1.0, 5)], [(0.0, 5), (1.0, 6)]])
def test_speed_of_a_trainer_that_stands_still_is_no_number(seen):
    speed = Speed()
    for at, tokens in seen:
        speed.observe(tokens, at)
    with pytest.raises(BenchError, match="no progress"):
        speed.tokens_per_second()


def test_trainer_compares_means():
    result = bench.trainer.compare(ALONE, [window(98, snapshot=0.002), window(122)], pinned=True)
    assert result.ratio == pytest.approx(1.0)
    assert result.snapshot_share == pytest.approx(0.003)
    assert result.load_share == pytest.approx(0.006)
    assert result.rounds == 10
    assert result.met


@pytest.mark.parametrize(
    ("target", "together"),
    [
        ("ratio", [window(104), window(104)]),
        ("share", [window(110, snapshot=0.012, load=0.009), window(110, snapshot=0.012, load=0.009)]),
        ("waiting", [window(110), window(110, waiting=0.02)]),
        ("rounds", [window(110), window(110, rounds=2)]),
    ],
)
def test_trainer_misses_its_targets_one_by_one(target, together):
    result = bench.trainer.compare(ALONE, together, pinned=True)
    assert [name for name, met in result.targets.items() if not met] == [target]
    assert not result.met


def test_rounds_in_the_windows_without_rounds_spoil_the_comparison():
    assert not bench.trainer.compare([window(100), *ALONE[1:]], [window(110), window(110)], True).targets["rounds"]


def test_memory_prediction_and_ratio():
    assert predicted_bytes(trained_values=10, frozen_values=30) == 280
    result = memory_result(saved=360)
    assert (result.saved_bytes, result.predicted_saved_bytes, result.ratio) == (360, 360, 1.0)
    assert result.met
    assert not memory_result(saved=300).met


def test_step_is_met_when_every_shape_keeps_less():
    fields = {
        "grouped_tokens_per_cpu_s": 1.0,
        "loop_tokens_per_cpu_s": 2.0,
        "ratio": 0.5,
        "grouped_kept_bytes": 1,
        "loop_kept_bytes": 2,
    }
    less, more = Comparison(**fields, kept_ratio=0.5), Comparison(**fields, kept_ratio=1.5)
    assert bench.step.summarise({"a": less}).met
    assert not bench.step.summarise({"a": less, "b": more}).met


def test_a_written_draft_reads_back(tmp_path):
    draft = demo_draft(sync={"local_steps": 1 << 40}, optimizer={"eps": 1e-9})
    write_draft(draft, tmp_path / "draft.toml")
    assert load_draft(tmp_path / "draft.toml") == draft
    assert draft != load_draft(DEMO) == demo_draft()


@pytest.mark.parametrize(("saved", "code"), [(360, 0), (10, 1)])
def test_the_last_line_is_one_json_object(monkeypatch, capsys, saved, code):
    monkeypatch.setattr(bench.memory, "run", lambda signals: memory_result(saved))
    assert main(["memory"]) == code
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert list(last) == ["memory"]
    assert MemoryResult.model_validate(last["memory"]) == memory_result(saved)
    assert ("target 'saving' is not met" in err) == bool(code)


def test_a_bench_that_cannot_measure_prints_no_json(monkeypatch, capsys):
    def fail(signals):
        raise BenchError("the trainer ended")

    monkeypatch.setattr(bench.memory, "run", fail)
    assert main(["memory"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the trainer ended" in err


def test_an_unknown_bench_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as end:
        main(["memroy"])
    assert end.value.code == 2
    assert f"unknown bench 'memroy'; there are {', '.join(BENCHES)}" in capsys.readouterr().err


def test_every_table_can_be_drawn(capsys):
    from rich.console import Console

    trainer = bench.trainer.compare(ALONE, [window(110), window(110, waiting=None)], pinned=False)
    Console(width=160).print(trainer.table(), memory_result(360).table())
    assert "NOT kept apart" in capsys.readouterr().out


def test_every_key_is_documented():
    readme = (DEMO.parent.parent / "bench" / "README.md").read_text()
    models = (bench.trainer.TrainerResult, Window, MemoryResult, Peak, bench.step.StepResult, Comparison)
    missing = [name for model in models for name in model.model_fields if f"`{name}`" not in readme]
    assert missing == []
