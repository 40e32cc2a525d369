"""The training loop, stepped by hand in this process."""

import queue

import numpy as np
import pytest
import torch
from train_harness import LocalTrainer, TinyRun, found_run

from spesd.data.shards import DataError
from spesd.model.genesis import initial_state
from spesd.train import link
from spesd.train.failure import TrainerError, describe_failure
from spesd.train.loop import MAX_SKIPPED_IN_A_ROW


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRun:
    return found_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(tiny: TinyRun) -> TinyRun:
    """The tiny run with its genesis state inbound."""
    tiny.fill_inbound(initial_state(tiny.layout))
    return tiny


def steps(local, count):
    for _ in range(count):
        local.trainer.step()


def test_it_learns(run):
    """Bytes cost 5.5 nats before and clearly less after a few dozen steps, on text it never trained on."""
    local = LocalTrainer(run.start("expert-0", "expert-2"))
    (before,) = local.tell(link.Evaluate(round=0))
    steps(local, 40)
    (after,) = local.tell(link.Evaluate(round=1))
    assert before.loss == pytest.approx(5.55, abs=0.1)
    assert after.loss < 3.6
    assert after.tokens == 6 * 32


def test_frozen_experts_stay_and_trained_units_move(run):
    local = LocalTrainer(run.start("expert-1"))
    before = {unit.id: local.values(unit.id) for unit in run.layout.units}
    steps(local, 2)
    moved = {unit for unit, old in before.items() if not np.array_equal(old, local.values(unit))}
    assert moved == {"shared-0", "shared-1", "shared-2", "expert-1"}


def test_the_same_start_gives_the_same_bits(run):
    one, two = (LocalTrainer(run.start("expert-1", position=8)) for _ in range(2))
    other = LocalTrainer(run.start("expert-1", position=12))
    for local in (one, two, other):
        steps(local, 3)
    assert torch.equal(one.trainer.weights.theta, two.trainer.weights.theta)
    assert not torch.equal(one.trainer.weights.theta, other.trainer.weights.theta)


def test_snapshot_add_and_replace_are_exact(run):
    """A shift is the fp32 sum bit for bit; frozen units can be replaced, not shifted."""
    local = LocalTrainer(run.start("expert-1"))
    steps(local, 1)
    (taken,) = local.tell(link.Snapshot(round=4))
    assert taken.units == ("shared-0", "shared-1", "shared-2", "expert-1")
    assert (taken.round, taken.steps, taken.tokens, taken.position) == (4, 1, 8 * 32, 8)
    before = {unit: run.snapshot.values(unit).copy() for unit in taken.units}
    for unit, values in before.items():
        assert np.array_equal(values, local.values(unit))

    shift = np.random.default_rng(0).standard_normal(run.layout.total_size, dtype=np.float32) * 1e-3
    run.fill_inbound(shift)
    steps(local, 1)
    theta = {unit: local.values(unit) for unit in ("shared-1", "expert-1")}
    answers = local.tell(
        link.Load(units=("shared-1", "expert-1"), mode="add", round=5),
        link.Load(units=("shared-2", "expert-3"), mode="replace", round=5),
    )
    assert answers == [
        link.Loaded(units=("shared-1", "expert-1"), round=5),
        link.Loaded(units=("shared-2", "expert-3"), round=5),
    ]
    for unit, values in theta.items():
        assert np.array_equal(local.values(unit), values + run.inbound.values(unit))
    for unit in ("shared-2", "expert-3"):
        assert np.array_equal(local.values(unit), run.inbound.values(unit))
    assert np.array_equal(run.snapshot.values("expert-1"), before["expert-1"])


def test_commands_are_obeyed_in_order(run):
    """Snapshots around a load show the values before and after it."""
    local = LocalTrainer(run.start("expert-1"))
    run.fill_inbound(np.ones(run.layout.total_size, dtype=np.float32))
    old = local.values("expert-1")
    answers = local.tell(
        link.Load(units=("expert-1",), mode="add", round=1),
        link.Snapshot(round=1),
        link.Load(units=("expert-1",), mode="replace", round=2),
        link.Evaluate(round=2),
        link.Own(experts=("expert-1", "expert-3")),
    )
    assert [answer.type for answer in answers] == ["loaded", "snapshot_taken", "loaded", "evaluated", "owned"]
    assert np.array_equal(run.snapshot.values("expert-1"), old + 1)
    assert (local.values("expert-1") == 1).all()


def test_a_snapshot_without_steps_says_so(run):
    local = LocalTrainer(run.start())
    steps(local, 2)
    first, second = local.tell(link.Snapshot(round=0), link.Snapshot(round=1))
    assert first.steps == 2
    assert first.loss == pytest.approx(5.5, abs=0.3)
    assert (second.steps, second.tokens, second.loss) == (0, 0, None)


def test_ownership_changes_while_it_runs(run):
    local = LocalTrainer(run.start("expert-0", "expert-1"))
    steps(local, 2)
    trainer = local.trainer
    before = {unit.id: local.values(unit.id) for unit in run.layout.units}
    moment = trainer.optimizer.state("expert-1")["exp_avg"].clone()
    assert local.tell(link.Own(experts=("expert-3", "expert-1"))) == [link.Owned(experts=("expert-1", "expert-3"))]
    assert all(np.array_equal(old, local.values(unit)) for unit, old in before.items())
    assert torch.equal(trainer.optimizer.state("expert-1")["exp_avg"], moment)
    steps(local, 1)
    moved = {unit for unit, old in before.items() if not np.array_equal(old, local.values(unit))}
    assert moved == {"shared-0", "shared-1", "shared-2", "expert-1", "expert-3"}


def test_a_pause_holds_steps_but_not_commands(run):
    local = LocalTrainer(run.start("expert-0"))
    for command in (link.Pause(), link.Snapshot(round=3), link.Resume(), link.Pause(), link.Stop()):
        local.commands.put(command)
    local.trainer.run()
    assert [event.type for event in local.events] == ["ready", "snapshot_taken", "stopped"]
    assert local.events[-1] == link.Stopped(position=0, step=0)


def test_a_pace_is_waited_for_by_listening(run):
    """Ahead of its pace the trainer waits for commands with the time that is left, and obeys them meanwhile."""
    local = LocalTrainer(run.start("expert-0", max_steps_per_second=1e-3))
    steps(local, 1)
    assert [answer.type for answer in local.tell(link.Snapshot(round=0), link.Stop())] == ["snapshot_taken"]

    class Empties:
        def get(self, timeout):
            self.timeout = timeout
            raise queue.Empty

    local.trainer.running, local.trainer.commands = True, Empties()
    local.trainer.obey()
    assert 900 < local.trainer.commands.timeout <= 1000


def test_a_gradient_that_is_not_finite_skips_the_step(run):
    local = LocalTrainer(run.start("expert-0"))
    head = dict(local.trainer.model.named_parameters())["head"]
    hook = head.register_hook(lambda gradient: gradient * float("nan"))
    before = local.values("shared-0")
    steps(local, 2)
    assert np.array_equal(before, local.values("shared-0"))
    assert local.trainer.meters.skipped == 2
    hook.remove()
    steps(local, 1)
    assert not np.array_equal(before, local.values("shared-0"))
    assert np.isfinite(local.values("shared-0")).all()

    head.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(TrainerError, match="no finite gradient"):
        steps(local, MAX_SKIPPED_IN_A_ROW)


def test_restart_from_a_checkpoint_has_the_same_moments(run, tmp_path):
    local = LocalTrainer(run.start("expert-0"))
    steps(local, 2)
    path = tmp_path / "moments"
    assert local.tell(link.Checkpoint(path=str(path), round=9)) == [link.Checkpointed(path=str(path), round=9)]
    again = LocalTrainer(run.start("expert-0", checkpoint=str(path)))
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(*(one.trainer.optimizer.state("expert-0")[name] for one in (local, again)))
    assert again.trainer.sampler.position == 16
    assert again.events == []


def test_a_checkpoint_that_cannot_be_read_or_written_is_reported_and_survived(run, tmp_path):
    (tmp_path / "broken").write_bytes(b"nonsense")
    local = LocalTrainer(run.start("expert-0", checkpoint=str(tmp_path / "broken")))
    assert local.events[0].type == "warned"
    assert "fresh optimizer moments" in local.events[0].detail
    (answer,) = local.tell(link.Checkpoint(path=str(tmp_path / "none" / "c"), round=0))
    assert answer.error
    steps(local, 1)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (link.Load(units=("expert-9",), mode="add", round=0), "unknown unit 'expert-9'"),
        (link.Load(units=("expert-1",), mode="add", round=0), "expert-1, which is frozen"),
        (link.Own(experts=("shared-0",)), "shared-0"),
    ],
)
def test_commands_that_make_no_sense_are_refused(run, command, complaint):
    local = LocalTrainer(run.start("expert-0"))
    with pytest.raises(TrainerError, match=complaint) as error:
        local.tell(command)
    assert describe_failure(error.value).reason is link.FailureReason.BAD_COMMAND


def test_a_missing_shard_is_named(run):
    with pytest.raises(DataError, match=run.data.train[0].hash[:12]):
        LocalTrainer(run.start("expert-0", shards={}))


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path):
    """Without router losses, which are defined over a micro-batch."""
    model = {"load_balance_loss": 0.0, "router_z_loss": 0.0}
    cuts = {"one": {"sequences": 8, "accumulate": 1}, "four": {"sequences": 2, "accumulate": 4}}
    gradients = []
    for name, cut in cuts.items():
        (tmp_path / name).mkdir()
        run = found_run(tmp_path / name, optimizer=cut | {"clip_norm": 1e9}, model=model)
        local = LocalTrainer(run.start("expert-0", peer_id="p"))
        # The run's id differs with its cut, so the same blocks are put in by hand.
        generator = np.random.default_rng(0)
        blocks = generator.integers(0, 256, size=(8, 33))
        parts = iter(np.split(blocks, cut["accumulate"]))
        local.trainer.sampler.batch = lambda _, parts=parts: next(parts)
        steps(local, 1)
        gradients.append(local.trainer.weights.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)
