"""Daemons as child processes."""

import os
import signal

import psutil
import pytest

from spesd.cli.launch import DaemonExited, NotReady, command, session_members
from spesd.config.errors import ExitCode
from spesd.config.peer import LIST_FIELDS, PeerConfig, load_peer_config

PEER = "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_the_command_says_the_whole_configuration(tmp_path):
    config = PeerConfig(
        state_dir=tmp_path,
        join=(PEER, PEER),
        relays=(PEER,),
        train_experts=3,
        threads=2,
        device="cuda:1",
        nat_port_map=False,
        serve_relay=True,
    )
    argv = command(config)
    assert argv[3:6] == ["start", "--config", os.devnull]
    flags, rest = {}, iter(argv[6:])
    for flag in rest:
        field = flag.removeprefix("--").replace("-", "_")
        if field.removeprefix("no_") in ("nat_port_map", "serve_relay"):
            flags[field.removeprefix("no_")] = not field.startswith("no_")
        elif field in LIST_FIELDS:
            flags.setdefault(field, []).append(next(rest))
        else:
            flags[field] = next(rest)
    assert load_peer_config(flags, environ={}).model_dump() == config.model_dump()


def test_ready_daemon(spawn):
    daemon = spawn()
    assert daemon.wait_ready(30).pid == daemon.process.pid


def test_daemon_that_is_not_ready_goes_on(spawn, tmp_path):
    daemon = spawn("slow")
    with pytest.raises(NotReady, match=r"is not ready after 1 s: .*; it goes on trying") as caught:
        daemon.wait_ready(1)
    assert f"--state-dir {tmp_path / 'state'}" in str(caught.value)
    assert daemon.process.poll() is None


def test_daemon_that_fails_passes_on_its_exit_code_and_last_words(spawn):
    with pytest.raises(DaemonExited, match="threads: 0 is refused") as caught:
        spawn("failing").wait_ready(30)
    assert caught.value.exit_code is ExitCode.CONFIG


def test_only_the_log_of_this_start_is_told(spawn):
    first = spawn("failing")
    first.process.wait(30)
    second = spawn()
    second.wait_ready(30)
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(30)
    with pytest.raises(DaemonExited, match=r"by signal SIGKILL.*\n.*it wrote nothing") as caught:
        second.check_alive()
    assert caught.value.exit_code is ExitCode.RUNTIME


def test_the_answer_of_another_daemon_is_not_taken_for_ours(spawn):
    first = spawn()
    assert first.wait_ready(30).pid == first.process.pid
    second = spawn("failing")
    second.process.wait(30)
    assert second.status() is None


def test_kill_ends_the_children_too_after_their_parent(spawn):
    daemon = spawn("stubborn")
    daemon.wait_ready(30)
    (child,) = [member for member in session_members(daemon.process.pid) if member.pid != daemon.process.pid]
    daemon.process.kill()
    daemon.process.wait(30)
    assert child.is_running()
    (left,) = daemon.kill()
    assert f"(pid {child.pid})" in left
    psutil.wait_procs([child], 10)
    assert not session_members(daemon.process.pid)
