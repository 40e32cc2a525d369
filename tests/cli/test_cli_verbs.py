"""What a person types, what comes back on which stream, and with which exit code."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spesd import __version__
from spesd.api.client import Client
from spesd.api.schema import (
    Expert,
    Experts,
    HeldOut,
    Limits,
    Losses,
    Neighbour,
    Peer,
    Peers,
    RoundRecord,
    Rounds,
    State,
    Status,
    UnitOutcome,
    UnitResult,
)
from spesd.cli import console, main
from spesd.cli.stop import StillRunning, stop_and_wait

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OTHER = "QmXwQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def spesd(monkeypatch, capsys):
    """Run `spesd` in this process."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["spesd", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(caught.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def answers(monkeypatch):
    """Let the client answer without a daemon."""

    def give(verb, answer):
        monkeypatch.setattr(Client, verb, lambda self: answer)

    return give


def test_version(spesd):
    assert spesd("version").out == f"{__version__}\n"


def test_help_lists_all_verbs_and_imports_nothing_slow():
    script = (
        "import sys, spesd.cli.main as m; sys.argv = ['spesd', '--help']\ntry: m.main()\nfinally: print(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    *text, modules = out.splitlines()
    for verb in ("start", "status", "peers", "experts", "rounds", "loss", "stop", "data", "demo", "version"):
        assert any(line.split()[:1] == [verb] for line in text)
    assert not {"torch", "hivemind", "aiohttp", "numpy", "rich.table"} & set(modules.split())


@pytest.mark.parametrize("verb", ["status", "peers", "experts", "rounds", "loss", "stop"])
def test_no_daemon_is_exit_code_3_and_one_line(spesd, tmp_path, verb):
    result = spesd(verb, "--state-dir", tmp_path)
    assert (result.code, result.out) == (3, "")
    assert result.err == (
        f"spesd: no daemon is running on {tmp_path}; start one with `spesd start`, or give its --state-dir\n"
    )


def test_wrong_usage_is_exit_code_2(spesd):
    assert spesd("status", "--sate-dir", "x").code == 2
    assert spesd("start", "--train-experts", "three").code == 2


def test_wrong_configuration_is_exit_code_5(spesd, tmp_path):
    result = spesd("start", "--state-dir", tmp_path, "--join", "nowhere", "--device", "abacus")
    assert result.code == 5
    assert result.err.splitlines()[0].startswith("spesd: flag --device: 'abacus' is refused")
    assert result.err.splitlines()[1].startswith("spesd: flag --join: 'nowhere' is not a multiaddr")
    draft = tmp_path / "run.toml"
    draft.write_text("format = 1\nnaem = 'x'\n")
    result = spesd("start", "--manifest", draft)
    assert result.code == 5
    assert f"spesd: {draft}:2: naem: unknown key; did you mean name?" in result.err.splitlines()


def test_start_hands_the_configuration_to_the_daemon_and_passes_its_exit_code_on(spesd, tmp_path, monkeypatch):
    seen = []
    fake = SimpleNamespace(run=lambda config: seen.append(config) or 6)
    monkeypatch.setitem(sys.modules, "spesd.daemon.run", fake)
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    assert spesd("start", "--join", address, "--join", address, "--train-experts", 2, "--state-dir", tmp_path).code == 6
    (config,) = seen
    assert (config.join, config.train_experts, config.state_dir) == ((address, address), 2, tmp_path)
    assert config.origin("train_experts") == "flag --train-experts"


def test_detach_prints_the_ready_line_and_leaves_the_daemon(spesd, spawn, monkeypatch):
    from spesd.cli.launch import Daemon

    daemon = spawn()
    monkeypatch.setattr(Daemon, "spawn", lambda config: daemon)
    result = spesd("start", "--detach")
    assert (result.code, result.err) == (0, "")
    assert result.out == f"ready · run fake 01234567 · peer Qmstate · pid {daemon.process.pid}\n"
    assert daemon.process.poll() is None


def test_detach_passes_the_exit_code_of_a_failed_daemon_on(spesd, spawn, monkeypatch):
    from spesd.cli.launch import Daemon

    daemon = spawn("failing")
    monkeypatch.setattr(Daemon, "spawn", lambda config: daemon)
    result = spesd("start", "--detach")
    assert (result.code, result.out) == (5, "")
    assert "spesd: the daemon ended with exit code 5" in result.err


def test_status(spesd, spawn, tmp_path):
    daemon = spawn()
    daemon.wait_ready(30)
    text = spesd("status", "--state-dir", tmp_path / "state").out.splitlines()
    assert text[0].startswith("training · round ")
    assert any(line.split() == ["trains", "expert-0"] for line in text)
    data = json.loads(spesd("status", "--json", "--state-dir", tmp_path / "state").out)
    assert (data["schema_version"], data["state"], data["pid"]) == (1, "training", daemon.process.pid)


def test_status_and_peers_show_each_line(spesd, answers):
    rows = [
        Neighbour(peer=OTHER, line="relayed", rtt_ms=126.6, up_mbit=0.76, down_mbit=0.61),
        Neighbour(peer=PEER, line="direct"),
        Neighbour(peer="QmNobody"),
    ]
    answers("status", Status(state=State.TRAINING, version="0", pid=1, uptime_s=0, peers_live=4, neighbours=rows))
    lines = [line.strip() for line in spesd("status").out.splitlines()]
    at = lines.index("peers    4 live")
    assert lines[at + 1 : at + 4] == [
        f"{OTHER[:8]}… relayed, 127 ms, 0.76 Mbit/s up, 0.61 down",
        f"{PEER[:8]}… direct, 0.00 Mbit/s up, 0.00 down",
        "QmNobody not connected",
    ]
    answers("peers", Peers(peers=[Peer(**rows[0].model_dump(), state=State.TRAINING)]))
    assert "relayed, 127 ms" in " ".join(spesd("peers").out.split())


@pytest.mark.parametrize("options", [("--json",), ()])
def test_watch_prints_line_after_line(spesd, answers, monkeypatch, options):
    looks = iter(range(3))

    def status(self):
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return Status(state=State.SYNCING, version="0", pid=1, uptime_s=0)

    monkeypatch.setattr(Client, "status", status)
    result = spesd("status", "--watch", "--interval", "0.1", *options)
    assert result.code == 0
    assert len(result.out.splitlines()) == 3
    assert all("syncing" in line for line in result.out.splitlines())


def test_peers(spesd, answers):
    record = Peer(
        peer=PEER, me=True, state=State.TRAINING, round=3, owned=["expert-1", "expert-4"], version="0.1", age_s=75
    )
    answers("peers", Peers(peers=[Peer(peer=OTHER, state=State.JOINING), record]))
    rows = spesd("peers").out.splitlines()
    assert rows[1].split()[:2] == [PEER, "(this"]
    assert "1, 4" in rows[1]
    assert "1 min 15 s ago" in rows[1]
    assert rows[2].split()[:2] == [OTHER, "joining"]
    assert json.loads(spesd("peers", "--json").out)["peers"][0]["peer"] == OTHER


def test_experts(spesd, answers):
    mine = Expert(expert=0, version=3, hash="ab" * 32, owners=[PEER], mine=True)
    answers("experts", Experts(experts=[mine, Expert(expert=1, version=0, hash="cd" * 32)]))
    rows = spesd("experts").out.splitlines()
    assert rows[1].split() == ["0", "3", "abababababab", "yes", "QmYyQSo1…"]
    assert rows[2].rstrip().endswith("nobody: it keeps its value")


def test_loss_shows_a_thinned_curve(spesd, answers):
    answers("loss", Losses(points=[HeldOut(round=number, loss=5 - number / 100) for number in range(101)]))
    lines = spesd("loss").out.splitlines()
    assert len(lines) == 21
    assert lines[1].split()[:2] == ["0", "5.000"]
    assert lines[-1].split()[:2] == ["100", "4.000"]


def test_rounds(spesd, answers):
    results = {
        "expert-0": UnitOutcome(result=UnitResult.PARTIAL, missing=[PEER]),
        "expert-1": UnitOutcome(result=UnitResult.UNCHANGED, detail="no owner"),
        "expert-2": UnitOutcome(result=UnitResult.COMMITTED),
    }
    answers(
        "rounds",
        Rounds(
            rounds=[
                RoundRecord(
                    number=7, coordinator=OTHER, members=[PEER, OTHER], results=results, own_seconds=1.25, seconds=4.5
                )
            ]
        ),
    )
    row = spesd("rounds").out.splitlines()[1]
    assert row.split()[:9] == ["7", "2", "1.2", "4.5", "1", "1", "1", "0", "QmXwQSo1…"]
    assert row.rstrip().endswith("expert 0 without QmYyQSo1…; expert 1: no owner")


def test_stop_returns_when_the_process_is_gone(spesd, spawn, tmp_path):
    daemon = spawn()
    daemon.wait_ready(30)
    result = spesd("stop", "--state-dir", tmp_path / "state")
    assert (result.code, result.err) == (0, f"spesd: stopped (pid {daemon.process.pid})\n")
    assert daemon.process.wait(0) == 0


def test_stop_names_the_process_that_does_not_end(spawn):
    daemon = spawn("stubborn")
    daemon.wait_ready(30)
    with pytest.raises(StillRunning, match=rf"pid {daemon.process.pid}\) is still draining after 0\.1 s"):
        stop_and_wait(daemon.client, 0.1)


def test_data_prepare(spesd, tmp_path):
    for number in range(20):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 50)
    result = spesd("data", "prepare", tmp_path / "text", "--out", tmp_path / "shards", "--held-out-share", 0.2)
    assert (result.code, result.out) == (0, "")
    assert "20 files (0 skipped)" in result.err
    result = spesd("data", "prepare", tmp_path / "text", "--out", tmp_path / "shards", "--json")
    assert json.loads(result.out)["documents"] == 20
    result = spesd("data", "prepare", tmp_path / "nothing", "--out", tmp_path / "shards")
    assert (result.code, result.err) == (1, f"spesd: no such file or folder: {tmp_path / 'nothing'}\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0 s"), (75, "1 min 15 s"), (3600, "1 h"), (90000, "1 d 1 h"), (86400, "1 d")]
)
def test_duration(seconds, text):
    assert console.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (1e16, "10000.0 TB")])
def test_amount(count, text):
    assert console.amount(count) == text


def test_limit_changes_only_what_is_given(spesd, monkeypatch):
    seen = []

    def limit(self, change):
        seen.append(change.model_dump(exclude_unset=True))
        return Limits(up_mbit=4.0)

    monkeypatch.setattr(Client, "limit", limit)
    assert spesd("limit", "--up", "4", "--down", "off").out == "at most 4 Mbit/s up, any speed down\n"
    assert json.loads(spesd("limit", "--json").out) == {"up_mbit": 4.0, "down_mbit": None}
    assert seen == [{"up_mbit": 4.0, "down_mbit": None}, {}]


@pytest.mark.parametrize("cap", ["0", "-3", "fast", "nan", "inf"])
def test_limit_refuses_what_is_no_speed(spesd, cap):
    result = spesd("limit", "--up", cap)
    assert result.code != 0 and "0.1, nor off" in result.err
