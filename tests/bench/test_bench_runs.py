"""The benches on real processes, in the smallest setting."""

import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

import bench.memory
import bench.step
import bench.trainer
from bench.cores import bind, one_core_apart, wanting_seconds
from spesd.cli.fleet import Interruptible

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="binds processes to cores")


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A temp folder for the bench, which must be empty afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@linux_only
def test_one_core_is_kept_apart_and_a_process_bound_to_it():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    with one_core_apart() as core, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == before - {core}
        bind(child.pid, core)
        assert os.sched_getaffinity(child.pid) == {core}
        assert wanting_seconds(child.pid) >= 0
        child.stdin.close()
    assert os.sched_getaffinity(0) == before


@pytest.mark.timeout(240)
def test_memory_of_tiny_trainers(temp):
    model = {"layers": 2, "width": 64, "heads": 2, "expert_width": 64, "experts": 4}
    with Interruptible() as signals:
        result = bench.memory.run(signals, model)
    expert = 2 * 3 * 64 * 64
    assert (result.few.owned, result.all.owned) == (2, 4)
    assert result.few.frozen_values == 2 * expert
    assert result.all.frozen_values == 0
    assert result.predicted_saved_bytes == 12 * 2 * expert
    assert result.baseline_bytes > 50 << 20


def test_step_compares_equal_layers():
    shape = {"width": 16, "expert_width": 16, "experts": 4, "top_k": 2}
    with Interruptible() as signals:
        result = bench.step.run(signals, {"tiny": shape}, tokens=32, repeats=2)
    tiny = result.shapes["tiny"]
    assert tiny.ratio == pytest.approx(tiny.grouped_tokens_per_cpu_s / tiny.loop_tokens_per_cpu_s)
    assert tiny.kept_ratio == pytest.approx(tiny.grouped_kept_bytes / tiny.loop_kept_bytes)
    assert result.met


@pytest.mark.timeout(300)
def test_trainer_with_rounds(temp):
    """One short window: two daemons, and a trainer that is seen to progress."""
    with Interruptible() as signals, one_core_apart() as core:
        window = bench.trainer.measure(signals, core, rounds=True, seconds=6.0)
    assert window.tokens_per_s > 0
    assert 0 <= window.snapshot_share < 1


@pytest.mark.timeout(240)
def test_ctrl_c_leaves_nothing(tmp_path):
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench", "memory"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        me = psutil.Process(process.pid)
        while not (children := me.children(recursive=True)):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "everything that was started is stopped" in err
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []
