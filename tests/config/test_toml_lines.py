"""Lines of keys, against documents of every shape that TOML has."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from spesd.config.toml_lines import key_lines

DOCUMENT = '''\
# a comment with [brackets] and key = value
top = 1
"quoted key" = 2
a.b . c = 3

[table]  # comment
text = """
[not.a.table]
key = 1 """
literal = \'\'\'
fake = "x"\'\'\'\'
after = true
list = [
  "a]",  # comment ]
  [1, 2],

  { x = 1, y.z = [ 3 ] },
]
inline = { first = 1, second = { deep = "}" } }

[table.sub]
key = 1979-05-27 07:32:00
[[rows]]
name = "one"
[[rows]]
name = "two"
[rows.inner]
key = 'C:\\#no comment'
[[rows.more]]
n = 1
'''


def test_every_kind_of_key_has_its_line():
    lines = key_lines(DOCUMENT)
    assert lines["top",] == 2
    assert lines["quoted key",] == 3
    assert lines["a",] == lines["a", "b"] == lines["a", "b", "c"] == 4
    assert lines["table",] == 6
    assert lines["table", "literal"] == 10
    assert lines["table", "after"] == 12
    assert lines["table", "list", 0] == 14
    assert lines["table", "list", 1, 1] == 15
    assert lines["table", "list", 2, "y", "z", 0] == 17
    assert lines["table", "inline", "second", "deep"] == 19
    assert lines["table", "sub", "key"] == 22
    assert lines["rows",] == lines["rows", 0] == 23
    assert lines["rows", 1] == 25
    assert lines["rows", 1, "name"] == 26
    assert lines["rows", 1, "inner", "key"] == 28
    assert lines["rows", 1, "more", 0, "n"] == 30
    assert ("table", "fake") not in lines
    assert set(lines) == set(paths(tomllib.loads(DOCUMENT)))


def paths(value, key=()):
    """Every path inside a parsed document."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, child in children:
        yield (*key, step)
        yield from paths(child, (*key, step))


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=6)
scalars = st.one_of(st.integers(-9, 9), st.booleans(), st.text(st.sampled_from("a]}[{=#,.'\"\\ \n"), max_size=8))
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


def quoted(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\x7f", "\\u007f")
    return f'"{escaped}"'


def rendered(value):
    """One TOML value, arrays over several lines."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quoted(name)} = {rendered(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[\n" + "".join(f"{rendered(item)}, # ]\n" for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else str(value)


@given(st.dictionaries(names, st.dictionaries(names, values, max_size=3), max_size=3))
def test_the_scan_finds_what_the_parser_finds(document):
    text, expected = "", {}
    for table, pairs in document.items():
        expected[table,] = text.count("\n") + 1
        text += f"[{quoted(table)}]\n"
        for name, value in pairs.items():
            expected[table, name] = text.count("\n") + 1
            text += f"{quoted(name)} = {rendered(value)}\n\n"
    parsed = tomllib.loads(text)
    lines = key_lines(text)
    assert set(lines) == set(paths(parsed))
    assert {key: lines[key] for key in expected} == expected
