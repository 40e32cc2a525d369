"""The layers of the peer config, and that each value knows its origin."""

from pathlib import Path

import pytest

from spesd.config import peer
from spesd.config.errors import ConfigError
from spesd.config.peer import PeerConfig, load_peer_config

VOLUNTEER = Path(__file__).parents[2] / "peer_configs" / "volunteer.toml"
PEER = "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(autouse=True)
def no_file_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setattr(peer, "default_config_path", lambda: tmp_path / "absent.toml")


def load(flags=None, environ=None, config=None):
    return load_peer_config(flags or {}, environ=environ or {}, config=config)


def written(tmp_path, text):
    path = tmp_path / "peer.toml"
    path.write_text(text)
    return path


def lines(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return caught.value.lines


def test_each_layer_goes_over_the_one_below(tmp_path):
    path = written(tmp_path, 'threads = 2\ndevice = "cuda:1"\nlog_level = "debug"\n')
    config = load({"device": "cpu"}, {"SPESD_THREADS": "3", "SPESD_DEVICE": "cuda"}, path)
    assert (config.device, config.threads, config.log_level, config.log_format) == ("cpu", 3, "debug", "auto")
    assert config.origin("device") == "flag --device"
    assert config.origin("threads") == "SPESD_THREADS"
    assert config.origin("log_level") == f"{path}:3: log_level"
    assert config.origin("log_format") == "default"


def test_the_file_can_be_named_by_the_environment_or_lie_in_its_usual_place(tmp_path, monkeypatch):
    path = written(tmp_path, "threads = 7")
    assert load(environ={"SPESD_CONFIG": str(path)}).threads == 7
    monkeypatch.setattr(peer, "default_config_path", lambda: path)
    assert load().threads == 7


def test_defaults():
    config = load()
    assert config.listen == ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/tcp/0")
    assert config.threads == peer.physical_cores() >= 1
    assert config.train_experts is None
    assert config.memory_gib is None


def test_lists_from_the_environment_and_from_flags():
    assert load(environ={"SPESD_JOIN": f"{PEER}, {PEER}"}).join == (PEER, PEER)
    assert load({"join": [PEER]}).join == (PEER,)
    assert load({"join": []}, {"SPESD_JOIN": PEER}).join == (PEER,)


def test_reachability_from_everywhere(tmp_path):
    assert (load().nat_port_map, load().reachability, load().serve_relay) == (True, "auto", False)
    config = load({"nat_port_map": False, "relays": [PEER]}, {"SPESD_SERVE_RELAY": "true", "SPESD_RELAYS": PEER})
    assert (config.nat_port_map, config.serve_relay, config.relays) == (False, True, (PEER,))
    assert load(config=written(tmp_path, 'reachability = "private"')).reachability == "private"
    with pytest.raises(ConfigError, match="flag --reachability"):
        load({"reachability": "hidden"})
    with pytest.raises(ConfigError, match=r"SPESD_RELAYS.*does not end with /p2p/"):
        load(environ={"SPESD_RELAYS": "/ip4/203.0.113.7/tcp/1"})


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    config = load(config=written(tmp_path, 'manifest = "run.toml"\nstate_dir = "/var/x"'))
    assert config.manifest == tmp_path / "run.toml"
    assert config.state_dir == Path("/var/x")
    assert load({"manifest": Path("run.toml")}).manifest == Path("run.toml")


def test_a_budget_overrides_the_other_one_of_a_lower_layer(tmp_path):
    path = written(tmp_path, "memory_gib = 8.0")
    config = load({"train_experts": 3}, config=path)
    assert (config.train_experts, config.memory_gib) == (3, None)
    assert lines({"train_experts": 3, "memory_gib": 2.0}) == (
        "peer config: train_experts and memory_gib both give the budget; leave one out",
    )


def test_errors_name_the_origin(tmp_path):
    assert lines({"device": "gpu"})[0].startswith("flag --device: 'gpu' is refused: ")
    assert lines(environ={"SPESD_THREADS": "many"})[0].startswith("SPESD_THREADS: 'many' is refused: ")
    path = written(tmp_path, "\nthreads = 0\nlogfile = 1")
    assert lines(config=path) == (
        f"{path}:2: threads: 0 is refused: input should be greater than or equal to 1",
        f"{path}:3: logfile: unknown key; did you mean log_level?",
    )


def test_unknown_variable_has_the_nearest_name():
    assert lines(environ={"SPESD_DEVCIE": "cpu"}) == ("SPESD_DEVCIE: unknown variable; did you mean SPESD_DEVICE?",)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:4001", "is not a multiaddr such as /ip4/203.0.113.7/tcp/31337"),
        ("/ip4/127.0.0.1/tcp/4001", "does not end with /p2p/<peer id>"),
        ("/ip4/1270.0.0.1/tcp/4001/p2p/" + "Q" * 46, "'1270.0.0.1' is not an ip4 address"),
        ("/ip5/127.0.0.1/tcp/4001/p2p/" + "Q" * 46, "/ip5/ is not a network"),
        ("/ip4/127.0.0.1/sctp/4001/p2p/" + "Q" * 46, "has transport 'sctp'"),
        ("/ip4/127.0.0.1/tcp/65536/p2p/" + "Q" * 46, "has port '65536'"),
        ("/dns4//tcp/1/p2p/" + "Q" * 46, "/dns4/ needs a host name"),
    ],
)
def test_addresses_are_checked_before_anything_is_dialled(address, message):
    (line,) = lines({"join": [PEER, address]})
    assert line.startswith("flag --join: ")
    assert message in line


@pytest.mark.parametrize("address", ["/ip6/::1/udp/4001/quic-v1", "/dns4/example.org/tcp/1", "/ip4/0.0.0.0/tcp/0"])
def test_good_endpoints(address):
    assert load({"listen": [address]}).listen == (address,)


def test_the_example_is_valid_and_shows_every_field():
    config = load(config=VOLUNTEER)
    assert config.memory_gib == 8.0
    text = VOLUNTEER.read_text()
    assert not [name for name in PeerConfig.model_fields if f"{name} = " not in text and name != "manifest"]
