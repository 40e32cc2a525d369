"""Where each key of a TOML document stands. The standard library's parser does not tell."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict

Key = tuple[str | int, ...]
"""Path of a value: names of tables and keys, and indices of arrays."""

_SPACE = re.compile(r"[ \t]*")
_CLOSING = re.compile(r"[ \t]*\]{1,2}")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_SEPARATOR = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")' r"|'''.*?'{3,5}(?!')" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> dict[Key, int]:
    """Return the line (from 1) of every table, key and array element of a TOML document.

    `text` must be a document that `tomllib` has accepted.
    """
    return _Scan(text).document()


class _Scan:
    """One pass over a document. `at` is the offset of the next character to read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Key, int] = {}
        self.elements: defaultdict[Key, int] = defaultdict(int)

    def document(self) -> dict[Key, int]:
        table: Key = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            table = self._header() if self.text[self.at] == "[" else self._pair(table)
            self._skip(_BLANK)
        return self.lines

    def _header(self) -> Key:
        """`[table]` or `[[table]]`."""
        array = self.text.startswith("[[", self.at)
        line = self._line()
        self.at += 1 + array
        *parents, last = self._names()
        self._skip(_CLOSING)
        key = (*self._current(parents), last)
        if array:
            self.lines.setdefault(key, line)
            self.elements[key] += 1
            key = (*key, self.elements[key] - 1)
        self.lines[key] = line
        return key

    def _current(self, names: list[str]) -> Key:
        """The path of a table, where the name of an array of tables means its newest element."""
        key: Key = ()
        for name in names:
            key = (*key, name)
            if key in self.elements:
                key = (*key, self.elements[key] - 1)
        return key

    def _pair(self, table: Key) -> Key:
        """`key = value` inside `table`, which is returned."""
        line = self._line()
        names = self._names()
        for depth in range(1, len(names) + 1):
            self.lines.setdefault((*table, *names[:depth]), line)
        self._skip(_EQUALS)
        self._value((*table, *names))
        return table

    def _value(self, key: Key) -> None:
        opening = self.text[self.at : self.at + 1]
        if opening == "[":
            self._array(key)
        elif opening == "{":
            self._inline_table(key)
        else:
            self._skip(_STRING if opening in ("'", '"') else _SCALAR)

    def _array(self, key: Key) -> None:
        self.at += 1
        self._skip(_SEPARATOR)
        index = 0
        while self.text[self.at : self.at + 1] != "]":
            self.lines[*key, index] = self._line()
            self._value((*key, index))
            self._skip(_SEPARATOR)
            index += 1
        self.at += 1

    def _inline_table(self, key: Key) -> None:
        self.at += 1
        self._skip(_SEPARATOR)
        while self.text[self.at : self.at + 1] != "}":
            self._pair(key)
            self._skip(_SEPARATOR)
        self.at += 1

    def _names(self) -> list[str]:
        """A dotted key."""
        names = []
        self._skip(_SPACE)
        while match := _NAME.match(self.text, self.at):
            self.at = match.end()
            names.append(_decoded(match.group()))
            if not self._skip(_DOT):
                break
        return names

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Move behind `pattern`; True when something was skipped."""
        match = pattern.match(self.text, self.at)
        if match is None or match.end() == self.at:
            return False
        self.at = match.end()
        return True

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1


def _decoded(name: str) -> str:
    if name[0] not in "'\"":
        return name
    return str(tomllib.loads(f"name = {name}")["name"])
