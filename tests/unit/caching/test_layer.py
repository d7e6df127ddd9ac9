"""The caching layer stands below bus and peers, and needs no torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pdbus.caching


def test_it_imports_neither_torch_nor_the_bus() -> None:
    names = [f"pdbus.caching.{module.name}" for module in pkgutil.iter_modules(pdbus.caching.__path__)]
    assert "pdbus.caching.store" in names
    code = f"import sys, {', '.join(names)}; print([name for name in sys.modules if name.startswith(('torch', 'nats', 'pdbus.bus', 'pdbus.peers'))])"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_clients_of_the_ring_need_no_torch() -> None:
    code = "import sys, pdbus.peers.cache; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
