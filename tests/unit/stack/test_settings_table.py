"""The README's table of settings holds what the services read, with their defaults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from pdbus.cache.settings import CacheSettings
from pdbus.decode.settings import DecodeSettings
from pdbus.invalidator.settings import InvalidatorSettings
from pdbus.param_server.settings import ParamServerSettings
from pdbus.prefill.settings import PrefillSettings
from pdbus.router.settings import RouterSettings
from pdbus.settings import Settings
from pdbus.stack.settings import StackSettings

README = Path(__file__).parents[3] / "README.md"
SERVICES = (
    CacheSettings,
    DecodeSettings,
    InvalidatorSettings,
    ParamServerSettings,
    PrefillSettings,
    RouterSettings,
    StackSettings,
)


def _defaults(cls: type[Settings]) -> dict[str, str]:
    """By variable, as a user would write them; empty: nothing."""
    return {
        field.metadata.get("env", f"PDBUS_{field.name.upper()}"): "" if field.default is None else str(field.default)
        for field in dataclasses.fields(cls)
    }


def test_each_row_is_a_setting_with_its_default() -> None:
    section = README.read_text().split("## Settings\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|", section, flags=re.MULTILINE)
    assert len(rows) > 10
    read: dict[str, set[str]] = {}
    for cls in SERVICES:
        for name, default in _defaults(cls).items():
            read.setdefault(name, set()).add(default)
    for name, told in rows:
        assert name in read
        if told.strip():
            assert set(re.findall(r"`(.*?)`", told)) == read[name], name
