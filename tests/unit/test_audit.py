"""`.ci/audit` says what it could not check, and fails for nothing but a known fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOUND = {"name": "sound", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "not found on PyPI"}


def audit(folder: Path, said: str, code: int) -> subprocess.CompletedProcess[str]:
    """With a pip-audit that says that."""
    (folder / "pip_audit.py").write_text(
        f"import sys\nprint({said!r})\nprint('no route', file=sys.stderr)\nsys.exit({code})"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([ROOT / ".ci/audit", sys.executable], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("packages", "pip_code", "code", "told"),
    [
        ([SOUND], 0, 0, "1 packages checked, 0 not, 0 known faults"),
        ([SOUND, BAD], 1, 1, "bad 2: PYSEC-1, mended in 3"),
        ([SOUND, UNKNOWN], 0, 0, "not checked: torch; as of the first: not found on PyPI"),
        ([UNKNOWN], 0, 0, "NOT DONE: 0 packages checked, 1 not"),
        (None, 1, 0, "NOT DONE, nothing was checked: pip-audit ended with 1: no route"),
    ],
)
def test_what_is_told(tmp_path: Path, packages: list[Any] | None, pip_code: int, code: int, told: str) -> None:
    done = audit(tmp_path, "" if packages is None else json.dumps({"dependencies": packages}), pip_code)
    assert told in done.stdout, done.stderr
    assert done.returncode == code
    assert "nats-server" in done.stdout.splitlines()[-1]
