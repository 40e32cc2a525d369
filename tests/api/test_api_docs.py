"""`docs/api.md` names everything that is promised to be stable."""

from pathlib import Path

import pytest

from spesd.api import schema
from spesd.config.errors import ExitCode

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("closed", [schema.State, schema.Reason, schema.Phase, schema.UnitResult])
def test_every_value_of_a_closed_enum_is_documented(closed):
    assert [value for value in closed if f"`{value}`" not in TEXT] == []


@pytest.mark.parametrize(
    "model",
    [
        schema.Status,
        schema.RoundStatus,
        schema.TrainerStatus,
        schema.UnitStatus,
        schema.Traffic,
        schema.Limits,
        schema.Peer,
        schema.Expert,
        schema.RoundRecord,
    ],
)
def test_every_field_is_documented(model):
    words = TEXT.replace("`", " ").replace(",", " ").replace(".", " ").replace(":", " ").split()
    assert [field for field in model.model_fields if field not in words] == []


def test_every_exit_code_is_documented():
    table = TEXT.partition("## Exit codes")[2]
    assert [code for code in ExitCode if f"\n| {int(code)} | " not in table] == []
