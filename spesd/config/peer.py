"""The peer config: what is local to one machine.

Flags go over `SPESD_*` environment over a TOML file over defaults, and each value remembers where it came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
import psutil
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from spesd.config.addresses import Endpoint, PeerAddress
from spesd.config.errors import ConfigError
from spesd.config.files import line_of, load_toml, mistakes, nearest
from spesd.config.toml_lines import Key, key_lines

ENVIRONMENT_PREFIX = "SPESD_"
CONFIG_VARIABLE = "SPESD_CONFIG"
"""Path of the peer config file, where no `--config` is given."""

BUDGET = ("train_experts", "memory_gib")
"""Two ways to say the same thing: giving one overrides the other where that comes from a lower layer."""

LEAST_MBIT = 0.1
"""A smaller cap would not let a round's messages through in time."""

LIST_FIELDS = ("join", "listen", "announce", "relays")
PATH_FIELDS = ("state_dir", "manifest")


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads not counted; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class PeerConfig(BaseModel):
    """Settings of one daemon. See `peer_configs/volunteer.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    state_dir: Path = Field(
        default_factory=lambda: platformdirs.user_state_path("spesd"),
        description="folder of identity, lock, unit states and checkpoints; one for each daemon",
    )
    manifest: Path | None = Field(default=None, description="draft of a new run; the first peer founds the run with it")
    join: tuple[PeerAddress, ...] = Field(default=(), description="addresses of peers of a running swarm")
    listen: tuple[Endpoint, ...] = Field(
        default=("/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/tcp/0"),
        min_length=1,
        description="multiaddrs to listen on; port 0 means any",
    )
    announce: tuple[Endpoint, ...] = Field(default=(), description="multiaddrs told to others, if not those found")
    nat_port_map: bool = Field(default=True, description="ask the router to forward the port (UPnP, NAT-PMP)")
    reachability: Literal["auto", "public", "private"] = Field(
        default="auto", description="whether others can dial this machine; auto: libp2p finds out"
    )
    relays: tuple[PeerAddress, ...] = Field(
        default=(), description="addresses of public peers with serve_relay, for where others cannot dial this machine"
    )
    serve_relay: bool = Field(
        default=False, description="where this machine is public, relay for others; not counted in caps and totals"
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", description="auto, cpu, cuda or cuda:1"
    )
    threads: int = Field(default_factory=physical_cores, ge=1, le=1024, description="CPU threads of the trainer")
    train_experts: int | None = Field(default=None, ge=1, le=4096, description="number of experts trained here")
    memory_gib: float | None = Field(
        default=None, gt=0, description="memory for weights and optimizer, GiB: gives the number of experts"
    )
    max_tokens_per_second: float | None = Field(default=None, gt=0, description="training is slowed to this speed")
    up_mbit: float | None = Field(default=None, ge=LEAST_MBIT, description="cap on what is sent, Mbit/s")
    down_mbit: float | None = Field(default=None, ge=LEAST_MBIT, description="cap on what is received, Mbit/s")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severity of the log lines that are written"
    )
    log_format: Literal["auto", "human", "json"] = Field(
        default="auto", description="auto: human on a terminal, JSON otherwise"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _one_budget(self) -> PeerConfig:
        if self.train_experts is not None and self.memory_gib is not None:
            raise ValueError("train_experts and memory_gib both give the budget; leave one out")
        return self

    def origin(self, field: str) -> str:
        """Where the value of `field` came from: `flag --device`, `SPESD_DEVICE`, `peer.toml:3: device` or `default`."""
        return self._origins.get(field, "default")


def load_peer_config(
    flags: Mapping[str, Any], *, config: Path | None = None, environ: Mapping[str, str] | None = None
) -> PeerConfig:
    """Merge all layers into one PeerConfig.

    `flags` maps field names to values; those that are None or empty were not given. `config` is the path of `--config`.
    Raises ConfigError with one line for each mistake, which begins with the origin of the value at fault.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in (_file_layer(config, environ), _environment_layer(environ), _flag_layer(flags)):
        if any(layer_field in BUDGET for layer_field in layer):
            for field in BUDGET:
                values.pop(field, None)
        for field, (value, origin) in layer.items():
            values[field], origins[field] = value, origin
    try:
        merged = PeerConfig.model_validate(values)
    except ValidationError as error:

        def origin_of(key: Key) -> str:
            return origins.get(str(key[0]), "default") if key else "peer config"

        raise ConfigError(*mistakes(error, PeerConfig, origin_of, name=lambda key: "")) from None
    merged._origins.update({field: origins[field] for field in values})
    return merged


Layer = dict[str, tuple[Any, str]]
"""Field -> (value, origin)."""


def default_config_path() -> Path:
    """Where the peer config is looked for when no path is given."""
    return platformdirs.user_config_path("spesd") / "peer.toml"


def flag_of(field: str) -> str:
    """`train_experts` -> `--train-experts`."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """`train_experts` -> `SPESD_TRAIN_EXPERTS`."""
    return ENVIRONMENT_PREFIX + field.upper()


def _file_layer(config: Path | None, environ: Mapping[str, str]) -> Layer:
    named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    path = named or default_config_path()
    if named is None and not path.is_file():
        return {}
    from_file = load_toml(path, PeerConfig)
    lines = key_lines(path.read_text(encoding="utf-8"))
    layer: Layer = {}
    for field in from_file.model_fields_set:
        value = getattr(from_file, field)
        if field in PATH_FIELDS:
            # A path in a file is meant relative to that file, wherever the daemon is started.
            value = path.parent / Path(value).expanduser()
        layer[field] = (value, f"{path}:{line_of((field,), lines)}: {field}")
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    fields = {variable_of(field): field for field in PeerConfig.model_fields}
    layer: Layer = {}
    unknown = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE or not text.strip():
            continue
        field = fields.get(variable)
        if field is None:
            unknown.append(f"{variable}: unknown variable; {nearest(variable, fields, 'variables')}")
            continue
        value: Any = text.replace(",", " ").split() if field in LIST_FIELDS else text.strip()
        layer[field] = (_typed(field, value), variable)
    if unknown:
        raise ConfigError(*unknown)
    return layer


def _flag_layer(flags: Mapping[str, Any]) -> Layer:
    given = {field: value for field, value in flags.items() if value is not None and value not in ([], ())}
    return {field: (_typed(field, value), f"flag {flag_of(field)}") for field, value in given.items()}


def _typed(field: str, value: Any) -> Any:
    return Path(value).expanduser() if field in PATH_FIELDS else value
