"""The WAN bench: arithmetic and table everywhere, the rig in small where it can be built."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import bench.wan.__main__ as wan
from bench.wan import baseline, rig, swarm
from bench.wan.arithmetic import Sizes, Volume, server_limit, server_volume, swarm_volume
from bench.wan.links import QUEUE_SECONDS, TCP, UDP, Firewalls, Internet, Link
from bench.wan.report import Measurement, PeerFigures, figures, misses, table
from bench.wan.rig import CannotEmulate, Counters, Rig
from bench.wan.setting import Setting
from spesd.cli.console import console
from spesd.cli.fleet import Interruptible

SIZES = Sizes(peers=4, shared=100, experts=700)
LINK = Link(up=8.0, down=16.0, rtt=50.0)
TINY = Setting(
    model={"layers": 2, "width": 64, "heads": 2, "expert_width": 64, "experts": 8, "top_k": 2},
    rounds=1,
    local_seconds=5.0,
)


RECEIVE = """
import socket
server = socket.create_server(("", 9))
print(flush=True)
connection, _ = server.accept()
while connection.recv(65536):
    pass
"""
SEND = """
import socket
connection = socket.create_connection(("11.77.0.2", 9))
connection.sendall(bytes(10**6))
connection.close()
"""


KNOCK = """
import contextlib, socket, sys
with contextlib.suppress(ConnectionRefusedError):  # which is an answer
    socket.create_connection((sys.argv[1], 9), timeout=0.5)
"""


def measurement(seconds=2.0, stalled=0.05, pace=1.0, device=1000):
    peer = PeerFigures(Counters(device, device), Counters(900, 900), stalled, pace)
    return Measurement(Volume(880, 880), limit=1.6, window=10.0, seconds=[seconds], peers=[peer, peer])


def test_volume_of_a_swarm_counts_every_transfer():
    """Of 100 shared values a peer keeps a quarter to itself, and gives what it reduced to three; its experts too."""
    assert swarm_volume(SIZES, 2.0, 2.0) == (2 * (75 + 3 * 25 + 3 * 175), 2 * (75 + 75 + 525))
    assert swarm_volume(SIZES, 2.0, 1.0, refresh_every=7) == (2 * (75 + 75) + 75, 2 * (75 + 75) + 75)
    assert swarm_volume(Sizes(1, 100, 700), 2.0, 2.0) == (0, 0)


def test_volume_follows_the_codec():
    """A refresh of topk is written densely."""
    fp16, int8, topk = (TINY.swarm_volume(codec).up for codec in ("fp16", "int8", "topk"))
    assert 1.9 < fp16 / int8 < 2.0
    assert topk < fp16 / 8
    lazy = TINY._replace(refresh_every=4)
    assert lazy.swarm_volume("int8").up < int8
    assert lazy.swarm_volume("topk").up > topk


def test_server_takes_two_phases():
    assert server_volume(SIZES) == (4 * (100 + 175), 4 * 800)
    uploads, downloads = 8e-6 * 1100 / 8, 8e-6 * 3200 / 16
    assert server_limit(SIZES, LINK, LINK.faster(100)) == pytest.approx(uploads + downloads)
    assert server_limit(SIZES, LINK, LINK) == pytest.approx(8e-6 * (4 * 1100 / 16 + 4 * 3200 / 8))


def test_limit_is_that_of_the_slower_direction():
    assert Volume(1e6, 1e6).seconds(LINK) == pytest.approx(1.0)
    assert Volume(1e6, 4e6).seconds(LINK) == pytest.approx(2.0)


def test_packet_takes_rate_and_distance():
    internet = Internet({1: LINK, 2: LINK})
    assert internet.arrival(5.0, 1, 2, 1000) == pytest.approx(5.0 + 0.001 + 0.025 + 0.0005)
    assert internet.arrival(5.0, 1, 2, 1000) == pytest.approx(5.0 + 0.002 + 0.025 + 0.0005), "it waits for the first"
    assert internet.arrival(5.0, 2, 1, 1000) == pytest.approx(5.0 + 0.001 + 0.025 + 0.0005), "the other way is free"


def test_queues_are_finite():
    internet = Internet({1: LINK, 2: LINK})
    arrivals = [internet.arrival(0.0, 1, 2, 1000) for _ in range(500)]
    through = [at for at in arrivals if at is not None]
    assert len(through) == pytest.approx(QUEUE_SECONDS * 1000, abs=2)
    assert arrivals[-1] is None
    assert internet.arrival(1.0, 1, 2, 1000) is not None, "the queue has drained"


def test_loss_has_its_share_and_repeats():
    links = {1: Link(up=1000, down=1000, loss=0.1), 2: Link(up=1000, down=1000)}
    one, other = Internet(links, seed=7), Internet(links, seed=7)
    lost = [one.arrival(at, 1, 2, 100) is None for at in range(2000)]
    assert sum(lost) == pytest.approx(200, abs=60)
    assert lost == [other.arrival(at, 1, 2, 100) is None for at in range(2000)]
    assert not any(Internet(links).arrival(at, 2, 1, 100) is None for at in range(100))


def test_a_split_internet_loses_what_would_cross_it_and_heals():
    internet = Internet(dict.fromkeys(range(1, 6), LINK))
    internet.split([[1, 2], [3, 4]])
    through = {(a, b) for a in range(1, 6) for b in range(1, 6) if internet.arrival(0.0, a, b, 100) is not None}
    assert through == {(a, b) for side in ((1, 2), (3, 4), (5,)) for a in side for b in side}
    internet.split([])
    assert all(internet.arrival(1.0, 1, other, 100) is not None for other in range(2, 6))


def packet(protocol: int, source: int, target: int, tcp_flags: int = 0x10) -> bytes:
    """An IPv4 packet from port 1000 + source to port 1000 + target."""
    header = bytes([0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0, 11, 77, 0, source, 11, 77, 0, target])
    ports = (1000 + source).to_bytes(2, "big") + (1000 + target).to_bytes(2, "big")
    return header + ports + bytes(9) + bytes([tcp_flags]) + bytes(6)


SYN, SYN_ACK = 0x02, 0x12


def test_nothing_comes_through_a_firewall_but_answers():
    home, server = LINK.model_copy(update={"closed": True}), LINK
    walls = Firewalls()
    assert not walls.passes(server, home, packet(UDP, 2, 1))
    assert walls.passes(home, server, packet(UDP, 1, 2))
    assert walls.passes(server, home, packet(UDP, 2, 1))
    assert not walls.passes(server, home, packet(UDP, 3, 1)), "somebody else"
    assert not walls.passes(server, home, packet(TCP, 2, 1)), "another protocol"


def test_two_firewalls_keep_each_other_s_connections_out():
    home, other = (LINK.model_copy(update={"closed": True}) for _ in range(2))
    walls = Firewalls()
    assert not walls.passes(home, other, packet(TCP, 1, 2, SYN))
    assert not walls.passes(other, home, packet(TCP, 2, 1, SYN))
    assert walls.passes(home, LINK, packet(TCP, 1, 3, SYN))
    assert walls.passes(LINK, home, packet(TCP, 3, 1, SYN_ACK))


def test_figures_are_means_per_peer_and_round():
    row = figures(measurement())
    assert row._asdict() == pytest.approx(
        {"bytes_up": 1000, "bytes_down": 1000, "round_seconds": 2.0, "stall_share": 0.005, "limit_ratio": 1.25}
    )


def test_table_has_a_row_for_each_method(capsys):
    console().print(table({"baseline": measurement(), "int8": measurement()}, "title"))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("baseline", "int8", "880 B", "900 B", "1.0 kB", "1.25", "0.50%"))


def test_misses_name_method_and_figure():
    good = {"baseline": measurement(seconds=20, stalled=9, device=5000), "int8": measurement()}
    assert misses(good) == []
    assert misses({"int8": measurement(stalled=1)}) == ["int8: training stands still for 10.0% of the time"]
    assert misses({"int8": measurement(pace=0.9)}) == ["int8: the trainers keep 90.0% of their pace"]
    assert misses({"int8": measurement(seconds=4)}) == ["int8: a round takes 2.50 times the link's limit"]
    slow = good | {"baseline": measurement(seconds=6, device=2000)}
    assert misses(slow) == [
        "int8: 2.0 times fewer bytes than the baseline, 2.9 wanted",
        "int8: 3.0 times less time than the baseline, 3.5 wanted",
    ]


def test_default_setting_is_like_the_7b():
    sizes = Setting().sizes
    assert 8e6 < sizes.shared + sizes.experts < 16e6
    assert sizes.experts / sizes.shared == pytest.approx(7, rel=0.02)


def test_last_line_is_json_and_missed_goals_are_an_exit_code(monkeypatch, capsys):
    class NoRig:
        __init__ = __exit__ = lambda self, *_: None
        __enter__ = lambda self: self  # noqa: E731

    monkeypatch.setattr(wan, "Rig", NoRig)
    monkeypatch.setattr(baseline, "run", lambda *_: measurement(seconds=40, stalled=9, device=20000))
    monkeypatch.setattr(swarm, "run", lambda *_: measurement())
    assert wan.main([]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == ["baseline", "fp16", "int8", "int4", "topk"]
    assert list(last["fp16"]) == ["bytes_up", "bytes_down", "round_seconds", "stall_share", "limit_ratio"]
    monkeypatch.setattr(swarm, "run", lambda *_: measurement(seconds=4))
    assert wan.main(["fp16"]) == 1
    assert "2.50 times" in capsys.readouterr().err


def test_unknown_method_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        wan.main(["fp17"])
    assert refused.value.code == 2
    assert "unknown method 'fp17'" in capsys.readouterr().err


def test_without_root_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(rig.shutil, "which", lambda name: None if name == "ip" else name)
    assert wan.main(["baseline"]) == 1
    assert "needs root (try sudo), the program 'ip'" in capsys.readouterr().err


# The rig itself ------------------------------------------------------------------------------------------------------


@pytest.fixture
def home():
    """A rig of four peers and a server; nothing of it may be left."""
    try:
        with Rig(wan._links(TINY)) as home:
            yield home
    except CannotEmulate as reason:
        pytest.skip(str(reason))
    assert namespaces(os.getpid()) == []


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A temp folder, which must be empty afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def namespaces(pid):
    return list(Path("/run/netns").glob(f"spesd-wan-{pid}-*"))


def test_bytes_cross_the_rig_and_are_counted(home):
    home.set(1, Link(up=400, down=400, rtt=1))
    home.set(2, Link(up=400, down=400, rtt=1))
    with subprocess.Popen(home.argv(2, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE) as receiver:
        receiver.stdout.readline()
        subprocess.run(home.argv(1, [sys.executable, "-c", SEND]), check=True, timeout=30)
        assert receiver.wait(30) == 0
    assert 1e6 < home.counters(1).up < 1.2e6
    assert home.counters(2).down == pytest.approx(home.counters(1).up, rel=0.05)
    assert home.counters(3).down < 1e4


@pytest.mark.timeout(60)
def test_the_rig_can_be_cut_and_healed(home):
    def reaches(target):
        knock = home.argv(1, [sys.executable, "-c", KNOCK, f"11.77.0.{target}"])
        return subprocess.run(knock, check=False).returncode == 0

    home.partition({1, 2}, {3, 4, 5})
    wait_until(lambda: not reaches(3))
    assert reaches(2)
    home.blackhole(2)
    wait_until(lambda: not reaches(2))
    assert reaches(3)
    home.heal()
    wait_until(lambda: reaches(2) and reaches(3))


@pytest.mark.timeout(120)
def test_baseline_in_small(home):
    with Interruptible() as signals:
        measured = baseline.run(home, signals, TINY._replace(local_seconds=1.0))
    assert all(peer.counted == tuple(map(round, measured.volume)) for peer in measured.peers)
    row = figures(measured)
    assert measured.volume.up < row.bytes_up < 1.2 * measured.volume.up
    assert measured.volume.down < row.bytes_down < 1.2 * measured.volume.down
    assert 0 < row.stall_share < 1
    assert row.limit_ratio > 1


@pytest.mark.timeout(300)
def test_swarm_in_small(home, temp):
    with Interruptible() as signals:
        measured = swarm.run(home, signals, TINY, "fp16")
    assert len(measured.seconds) == 1
    counted = sum(peer.counted.up for peer in measured.peers) / len(measured.peers)
    assert measured.volume.up < counted < 1.2 * measured.volume.up
    assert figures(measured).bytes_up > counted


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_bench_nothing_is_left(home, tmp_path, number):
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench.wan", "fp16"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: list(tmp_path.glob("spesd-bench-*/peer-0/daemon.log")), process)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: not namespaces(process.pid))
    if number == signal.SIGINT:
        assert list(tmp_path.iterdir()) == []


def wait_until(condition, process=None, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)
