"""Errors of TOML files: file, line, field, remedy, and all of them at once."""

from pathlib import Path

import pytest

from spesd.config.errors import ConfigError, ExitCode
from spesd.config.files import load_draft

DEMO = Path(__file__).parents[2] / "peer_configs" / "demo.toml"


@pytest.fixture
def draft(tmp_path):
    """Write a changed copy of the demo's draft and return the lines of the error that reading it raises."""

    def edited(*changes):
        text = DEMO.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path = tmp_path / "run.toml"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_draft(path)
        assert caught.value.exit_code is ExitCode.CONFIG
        return [line.replace(str(path), "run.toml") for line in caught.value.lines], text

    return edited


def line_of(text, start):
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(start))


def test_the_demo_is_a_model_of_one_to_two_million_parameters():
    from spesd.model.units import UnitLayout

    demo = load_draft(DEMO)
    assert (demo.model.experts, demo.model.top_k) == (8, 2)
    assert 1_000_000 <= UnitLayout(demo.model, demo.sync.shared_shards).total_size <= 2_000_000


def test_unknown_key_has_line_and_nearest_name(draft):
    lines, text = draft(("expert_width = ", "expert_widht = "))
    number = line_of(text, "expert_widht")
    assert f"run.toml:{number}: model.expert_widht: unknown key; did you mean expert_width?" in lines
    assert f"run.toml:{line_of(text, '[model]')}: model.expert_width: missing; it has no default" in lines


def test_unknown_key_far_from_all_lists_what_is_known(draft):
    lines, _ = draft(("[ownership]", "[ownership]\nzzz = 1"))
    assert lines[0].endswith("unknown key; known keys: grace_seconds, record_seconds, redundancy")


def test_all_mistakes_are_told_in_order(draft):
    lines, text = draft(
        ("layers = 4", "layers = 0"), ("top_k = 2", 'top_k = "two"'), ("sequences = 8", "sequences = true")
    )
    assert [line.split(": ")[0] for line in lines] == [
        f"run.toml:{line_of(text, start)}" for start in ("layers", "top_k", "sequences")
    ]
    assert "model.layers: 0 is refused: input should be greater than or equal to 1" in lines[0]
    assert "'two' is refused" in lines[1]
    assert "True is refused" in lines[2]


def test_rule_between_fields_is_told_at_its_section(draft):
    lines, text = draft(("top_k = 2", "top_k = 9"))
    assert lines == [f"run.toml:{line_of(text, '[model]')}: model: top_k 9 is more than experts 8"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_not_a_number_is_refused(draft, value):
    lines, _ = draft(("weight_decay = 0.1", f"weight_decay = {value}"))
    assert "optimizer.weight_decay" in lines[0]


def test_missing_section(draft):
    lines, _ = draft(("[sync]", "[ownership.sync]"))
    assert any(line.endswith(": sync: missing; it has no default") for line in lines)


def test_syntax_error_has_line_and_column(draft):
    lines, text = draft(("layers = 4", "layers = = 4"))
    assert lines == [f"run.toml:{line_of(text, 'layers')}:10: Invalid value"]


def test_document_that_ends_too_soon(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("x = 1\ny = [1,")
    with pytest.raises(ConfigError, match=r"run\.toml:2"):
        load_draft(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; check the path"),
        (b"a = 1\nb = \xff", r":2: byte 0xff is not UTF-8"),
        (b"a = " + b"[" * 9999 + b"]" * 9999, "nested too deeply"),
        (b"#" * (1 << 20) + b"#", "longer than 1048576 bytes"),
    ],
)
def test_unreadable_file(tmp_path, content, message):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_draft(path)


def test_folder_instead_of_a_file(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    "key,value,said",
    [
        ("stagger", 40, "sync.stagger 40 is more than there are units to take turns"),
        ("block", 100, "block 100 is not a power of 2 such as 128"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(draft, key, value, said):
    lines, _ = draft(("[sync]", f"[sync]\n{key} = {value}"))
    assert any(said in line for line in lines), lines
