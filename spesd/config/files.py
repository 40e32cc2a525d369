"""Reading TOML files, with errors that say file, line, field and remedy."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spesd.config.errors import ConfigError
from spesd.config.manifest import Draft
from spesd.config.toml_lines import Key, key_lines

MAX_FILE_BYTES = 1 << 20
"""A longer file is not a configuration."""

M = TypeVar("M", bound=BaseModel)


def load_draft(path: Path) -> Draft:
    """Read the draft of a run, such as `peer_configs/demo.toml`. Raises ConfigError."""
    return load_toml(path, Draft)


def load_toml(path: Path, model: type[M]) -> M:
    """Read a TOML file as `model`, without coercion between types (`"4"` or `true` is no number).

    Raises ConfigError with one line `file:line: field: what is wrong; remedy` for every mistake in the file.
    """
    text = _read(path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_message(path, text, error)) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; is this the right file?") from None
    try:
        # By way of JSON, because strictness there still turns arrays into tuples and strings into paths.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        lines = key_lines(text)
        raise ConfigError(*mistakes(error, model, lambda key: f"{path}:{line_of(key, lines)}")) from None


def line_of(key: Key, lines: dict[Key, int]) -> int:
    """The line of `key` or, where it does not stand in the file, of the nearest table around it."""
    for depth in range(len(key), 0, -1):
        if key[:depth] in lines:
            return lines[key[:depth]]
    return 1


def mistakes(
    error: ValidationError,
    model: type[BaseModel],
    origin: Callable[[Key], str],
    name: Callable[[Key], str] | None = None,
) -> list[str]:
    """One line for each mistake in `error`, in the order of their origins.

    `origin` tells where a value came from, `name` how a person spells it (default: the dotted path).
    """
    spell = name or dotted
    found: list[tuple[list[Any], str]] = []
    for details in error.errors(include_url=False):
        key = tuple(details["loc"])
        where, field = origin(key), spell(key)
        text = ": ".join(part for part in (where, field, _what(details, key, model)) if part)
        found.append((_natural(where), text))
    return [text for _, text in sorted(found, key=lambda item: item[0])]


def dotted(key: Key) -> str:
    """`model.layers`, `data.train[2].hash`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key)
    return text.removeprefix(".")


def nearest(name: str, known: Iterable[str], noun: str = "keys") -> str:
    """`did you mean layers?`, or the list of all known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known {noun}: {', '.join(names)}"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes; is this the right file?")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from None


def _syntax_message(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    message = str(error)
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if at is None:
        line = text.count("\n") + 1
        return f"{path}:{line}: {message.removesuffix(' (at end of document)')} at the end of the file"
    return f"{path}:{at[1]}:{at[2]}: {message[: at.start()]}"


def _what(details: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    kind, message = details["type"], details["msg"]
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(key[-1]), _fields(model, key[:-1]))}"
    if kind == "missing":
        return "missing; it has no default"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if isinstance(details["input"], dict | list):
        return message[:1].lower() + message[1:]
    return f"{details['input']!r} is refused: {message[:1].lower() + message[1:]}"


def _fields(model: type[BaseModel], key: Key) -> list[str]:
    """Names of the fields of the section at `key`."""
    section: Any = model
    for step in key:
        if isinstance(step, int):
            continue
        field = section.model_fields.get(step)
        if field is None:
            return []
        section = _section(field.annotation)
        if section is None:
            return []
    return list(section.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section(part) for part in get_args(annotation) if part not in (NoneType, Ellipsis))
    return next((part for part in inner if part is not None), None)


def _natural(text: str) -> list[Any]:
    """Sort key in which line 9 comes before line 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]
