"""Drafts of runs for benches: the demo's, with some fields changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spesd.config.files import load_draft
from spesd.config.manifest import Draft

DEMO = Path(__file__).parent.parent / "peer_configs" / "demo.toml"


def demo_draft(**sections: dict[str, Any]) -> Draft:
    """The draft of `make demo`; each keyword is a section, with the fields that change."""
    fields = load_draft(DEMO).model_dump()
    return Draft.model_validate(fields | {name: fields[name] | changes for name, changes in sections.items()})


def write_draft(draft: Draft, path: Path) -> None:
    """Write a draft as TOML: every value in it is a string, a number or a boolean, which TOML writes as JSON does."""
    lines, sections = [], []
    for name, value in draft.model_dump(exclude_none=True).items():
        if isinstance(value, dict):
            sections += [f"\n[{name}]", *(f"{key} = {json.dumps(one)}" for key, one in value.items())]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    path.write_text("\n".join([*lines, *sections]) + "\n", encoding="utf-8")
