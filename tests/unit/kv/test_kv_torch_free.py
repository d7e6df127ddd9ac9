"""Routers and the pure scheduler use these: torch must not come with them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "pdbus.kv.format",
        "pdbus.kv.pages",
        "pdbus.kv.prefix",
        "pdbus.kv.roots",
        "pdbus.model.batch",
        "pdbus.model.sampler",
        "pdbus.model.scope",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
