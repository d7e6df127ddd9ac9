from __future__ import annotations

import subprocess
import sys


def test_reading_weights_needs_no_torch() -> None:
    modules = (
        "pdbus.weights.blocks, pdbus.weights.layer, pdbus.weights.manifest, pdbus.weights.placement, "
        "pdbus.weights.history, pdbus.peers.history, pdbus.peers.weights, pdbus.param_server.service"
    )
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
