"""The compose file's NATS configuration, read by the real server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pdbus.stack.nats_accounts import write_accounts
from pdbus.stack.nats_server import find_nats_server

CONFIG = Path(__file__).parents[3] / "deploy" / "nats.conf"


def test_the_server_takes_it(tmp_path: Path) -> None:
    write_accounts(tmp_path, ["shop"], "shop.features")
    shutil.copy(CONFIG, tmp_path)
    checked = subprocess.run(
        [str(find_nats_server()), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_what_the_bus_relies_on_is_pinned() -> None:
    text = CONFIG.read_text()
    assert "js_ack_fc_v2: false" in text
    assert "sync_interval: always" in text
    assert "max_payload: 1MB" in text
