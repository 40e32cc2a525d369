"""Fake daemons for the tests of the command line."""

import pytest
from fake_daemon import fake_command

from spesd.cli.launch import Daemon, session_members
from spesd.config import peer
from spesd.config.peer import PeerConfig


@pytest.fixture(autouse=True)
def no_settings_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setattr(peer, "default_config_path", lambda: tmp_path / "absent.toml")


@pytest.fixture
def spawn(tmp_path):
    """Start a fake daemon on `tmp_path/state`; whatever is left of it afterwards is ended."""
    daemons = []

    def start(behaviour="good", state_dir=tmp_path / "state"):
        config = PeerConfig(state_dir=state_dir, threads=1)
        daemons.append(Daemon.spawn(config, fake_command(behaviour)(config)))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()
        assert not session_members(daemon.process.pid)
