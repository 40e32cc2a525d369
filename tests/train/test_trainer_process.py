"""The real trainer process over real pipes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from train_harness import TinyRun, TrainerProcess, found_run

from spesd.train import link

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return found_run(tmp_path)


@pytest.fixture
def trainer(tmp_path: Path):
    process = TrainerProcess(tmp_path / "trainer.log")
    yield process
    process.close()


def test_a_whole_life(run: TinyRun, trainer: TrainerProcess, tmp_path: Path):
    trainer.tell(run.start("expert-0", "expert-3"))
    ready = trainer.wait_for(link.Ready)
    assert ready.pid == trainer.popen.pid
    assert ready.trained_values == run.layout.shared_size + 2 * run.layout.expert_size
    assert ready.frozen_values == 2 * run.layout.expert_size
    progress = trainer.wait_for(link.Progress, lambda event: event.step > 0)
    assert progress.tokens == progress.step * 8 * 32
    assert progress.tokens_per_second > 0
    assert progress.peak_rss_bytes > 50 << 20

    trainer.tell(link.Pause(), link.Snapshot(round=1))
    taken = trainer.wait_for(link.SnapshotTaken)
    assert taken.steps > 0
    old = run.snapshot.values("expert-3").copy()
    run.inbound.values("expert-3")[:] = np.float32(0.25)
    trainer.tell(link.Load(units=("expert-3",), mode="add", round=1), link.Snapshot(round=2))
    assert trainer.wait_for(link.Loaded).units == ("expert-3",)
    assert trainer.wait_for(link.SnapshotTaken).steps == 0
    assert np.array_equal(run.snapshot.values("expert-3"), old + np.float32(0.25))

    path = tmp_path / "moments"
    trainer.tell(link.Own(experts=("expert-1",)), link.Checkpoint(path=str(path), round=2), link.Stop())
    assert trainer.wait_for(link.Owned).experts == ("expert-1",)
    assert trainer.wait_for(link.Checkpointed).error is None
    assert trainer.wait_for(link.Stopped).position == taken.position
    assert trainer.popen.wait(timeout=20) == 0
    assert path.exists()


@pytest.mark.parametrize("commands", [(), (link.Pause(),)], ids=["training", "paused"])
def test_the_end_of_its_input_ends_it_at_once(run: TinyRun, trainer: TrainerProcess, commands):
    """The daemon was killed: its end of the pipe closes, and nobody will ever answer again."""
    trainer.tell(run.start("expert-0"), *commands)
    trainer.wait_for(link.Ready)
    trainer.popen.stdin.close()
    assert trainer.popen.wait(timeout=20) == 3


def test_a_failure_is_an_event_and_a_log_line_without_traceback(run: TinyRun, trainer: TrainerProcess):
    trainer.tell(run.start("expert-0", inbound=str(run.folder / "none")))
    failed = trainer.wait_for(link.Failed)
    assert failed.reason is link.FailureReason.BAD_EXCHANGE
    assert "none: no such file" in failed.detail
    assert trainer.popen.wait(timeout=20) == 1
    lines = [json.loads(line) for line in trainer.log.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["bad_exchange"]
    assert "exception" not in lines[0]


def test_garbage_on_the_pipe_is_refused(run: TinyRun, trainer: TrainerProcess):
    trainer.popen.stdin.write(b"GET / HTTP/1.1\r\n\r\n")
    trainer.popen.stdin.flush()
    failed = trainer.wait_for(link.Failed)
    assert failed.reason is link.FailureReason.BAD_COMMAND
    assert "frame of" in failed.detail
    assert trainer.popen.wait(timeout=20) == 1


def test_stray_prints_cannot_get_into_the_pipe(tmp_path: Path):
    """What writes to descriptor 1 after the pipes are set aside lands on standard error."""
    code = (
        "import os; from spesd.train.process import take_pipes; source, sink = take_pipes();"
        "print('stray'); os.write(1, b'raw'); sink.write(source.read()); sink.flush()"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b"command", capture_output=True, check=True)
    assert done.stdout == b"command"
    assert b"stray" in done.stderr
    assert b"raw" in done.stderr
