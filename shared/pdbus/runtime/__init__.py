"""What every process runs: `run(Service, Settings)`, its life cycle, its logs, and its tie to the launcher."""

from pdbus.runtime.process import run
from pdbus.runtime.service import Service

__all__ = ["Service", "run"]
