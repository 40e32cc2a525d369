"""The demo over fake daemons: its verdict, its last line, and that nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_daemon import fake_command

from spesd.api.schema import HeldOut, RoundStatus, State, Status, Traffic, TrainerStatus, UnitStatus, UnitVersion
from spesd.cli.demo_report import Track, disagreements, incomparable, live_table, plain_line, problems, summarise
from spesd.cli.fleet import Fleet, Interruptible
from spesd.cli.launch import session_members

FAKE_DEMO = Path(__file__).with_name("fake_demo.py")
KEYS = ["peers", "rounds", "loss_first", "loss_last", "hashes_agree", "bytes_up", "bytes_down", "tokens_per_s"]


class FakeDemo:
    """A demo in a process of its own, whose temp folder is ours."""

    def __init__(self, temp, *args):
        self.temp = temp
        environ = os.environ | {"TMPDIR": str(temp), "SPESD_JOIN": "nonsense that must not reach the daemons"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, FAKE_DEMO, *args], env=environ, text=True, **pipes)

    def result(self):
        """Exit code, lines of stdout, stderr; and nothing is left."""
        out, err = self.process.communicate(timeout=60)
        assert list(self.temp.iterdir()) == []
        assert not daemons(self.temp)
        return self.process.returncode, out.splitlines(), err


def daemons(temp):
    """Processes whose command line or environment names the temp folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(temp) in text for text in (*process.cmdline(), *process.environ().values())):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def demo(tmp_path):
    started = []

    def start(*args):
        started.append(FakeDemo(tmp_path, *args))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
    for process in daemons(tmp_path):
        process.kill()


def test_good_run(demo):
    code, out, err = demo("good", "1.5").result()
    assert code == 0, err
    summary = json.loads(out[-1])
    assert list(summary) == KEYS
    assert summary["hashes_agree"] is True
    assert summary["peers"] == ["Qmpeer-0", "Qmpeer-1", "Qmpeer-2", "Qmpeer-3"]
    assert all(len(summary[key]) == 4 for key in KEYS if key != "hashes_agree")
    assert min(summary["rounds"]) > 8
    assert all(last < first for first, last in zip(summary["loss_first"], summary["loss_last"], strict=True))
    assert any(line.startswith("   0 s: states training training training training, rounds ") for line in out)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("flat", "1", "peer-1"), "the held-out loss of Qmpeer-1 did not fall: 5.000, then 5.000"),
        (("forked", "1", "peer-3"), "has 2 different hashes"),
    ],
)
def test_bad_run(demo, args, complaint):
    code, out, err = demo(*args).result()
    assert code == 1
    assert complaint in err
    assert list(json.loads(out[-1])) == KEYS
    assert json.loads(out[-1])["hashes_agree"] is (args[0] != "forked")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("dying", "60", "peer-2"), "the daemon ended by signal SIGKILL"),
        (("failing", "60", "peer-0"), "the daemon ended with exit code 5"),
    ],
)
def test_a_daemon_that_dies_ends_the_demo(demo, args, complaint):
    code, _, err = demo(*args).result()
    assert code == (5 if args[0] == "failing" else 1)
    assert complaint in err
    assert ("the last words" in err) == (args[0] == "dying")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_everything(demo, number, code):
    running = demo("good", "60")
    assert running.process.stderr.readline().startswith("spesd: starting the bootstrap peer")
    running.process.send_signal(number)
    returned, out, err = running.result()
    assert (returned, out) == (code, [])
    assert f"interrupted by {number.name}; all daemons are stopped" in err


def test_second_signal_does_not_wait_for_daemons_that_drain(demo):
    running = demo("stubborn", "60")
    line = ""
    while "0 s: states training training training training" not in line:
        line = running.process.stdout.readline()
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGTERM)
    code, _, err = running.result()
    assert code == 130
    assert err.endswith("interrupted by SIGINT; all daemons are stopped\n")


@pytest.mark.parametrize(
    ("behaviour", "faults"),
    [
        ("good", []),
        ("rude", [r"peer 0 ended with exit code 1"]),
        ("stubborn", [r"peer 0 left python\S* \(pid \d+\), which was killed"] * 2),
    ],
)
def test_a_fleet_tells_what_did_not_stop_cleanly(tmp_path, behaviour, faults):
    fleet = Fleet(tmp_path, Interruptible(), fake_command(behaviour), drain_seconds=5 if faults[1:] == [] else 0.2)
    with fleet:
        daemon = fleet.spawn(threads=1)
        daemon.wait_ready(30)
    assert len(fleet.faults) == len(faults)
    assert all(re.fullmatch(pattern, fault) for pattern, fault in zip(faults, fleet.faults, strict=True))
    assert daemon.process.returncode is not None
    assert not session_members(daemon.process.pid)


def link(version, hash_="same"):
    return UnitVersion(version=version, hash=hash_)


def observed(*histories, **fields):
    """A track that has seen one status after the other; a history is a list of links of unit expert-0."""
    track = Track()
    for at, history in enumerate(histories):
        unit = UnitStatus(unit="expert-0", version=history[-1].version, hash=history[-1].hash, history=history)
        base = {"state": State.TRAINING, "peer": "QmA", "version": "0", "pid": 1, "uptime_s": 0, "units": [unit]}
        track.observe(Status(**(base | {"trainer": TrainerStatus(tokens=100 * at)} | fields)), at)
    return track


def test_hashes_are_compared_by_version_over_the_whole_run():
    one = observed([link(1), link(2)], [link(2), link(3)], [link(3), link(4)])
    assert not list(disagreements([one, observed([link(2), link(3)])]))
    assert list(disagreements([one, observed([link(1, "other"), link(2)])])) == [
        "expert-0 version 1 has 2 different hashes"
    ]


def test_a_settled_fork_is_no_disagreement():
    loser = observed([link(1), link(2, "fork")], [link(1), link(2), link(3)])
    assert not list(disagreements([loser, observed([link(2), link(3)])]))


@pytest.mark.parametrize("after", [[link(4)], [link(2), link(3), link(4)]], ids=["full state", "older fork"])
def test_what_a_peer_gave_up_without_showing_it_is_no_disagreement(after):
    loser = observed([link(1, "fork"), link(2, "fork")], after)
    assert not list(disagreements([loser, observed([link(1), link(2)], [link(2), link(3), link(4)])]))
    assert list(disagreements([loser, observed([link(4, "other")])]))


def test_without_a_common_version_nothing_is_proved():
    tracks = [observed([link(1)]), observed([link(1), link(2)]), observed([link(3)])]
    assert list(incomparable(tracks)) == ["peer 2 shares no version of expert-0 with another peer"]
    assert not summarise(tracks).hashes_agree


def test_summary_and_problems():
    trainer = TrainerStatus(tokens=0, first_held_out=HeldOut(round=1, loss=5.5), held_out=HeldOut(round=8, loss=3.0))
    good = {"trainer": trainer, "traffic": Traffic(up_bytes=1, down_bytes=2), "round": RoundStatus(number=9)}
    tracks = [observed([link(8)], **good), observed([link(8)], [link(8)])]
    summary = summarise(tracks)
    assert (summary.rounds, summary.loss_first, summary.loss_last) == ((8, 8), (5.5, None), (3.0, None))
    assert (summary.bytes_up, summary.bytes_down, summary.tokens_per_s) == ((1, 0), (2, 0), (0.0, 100.0))
    assert list(problems(summary, tracks)) == ["QmA has no held-out loss"]
    few = [observed([link(7)], **good), observed([link(7)], **good)]
    assert list(problems(summarise(few), few)) == ["only 7 rounds were committed, 8 are wanted"]
    with pytest.raises(ValueError, match="1 of 2 peers never answered"):
        summarise([Track(), *few[:1]])


def test_table_shows_every_peer_also_before_its_first_answer():
    table = live_table([Track(), observed([link(1)])], "title")
    assert list(table.columns[0].cells) == ["0", "1 QmA"]
    assert list(table.columns[1].cells) == ["starting", "training"]
    assert plain_line([Track()]).startswith("states –")
