"""A real stack for tests: that of the measurements."""

from __future__ import annotations

from loadtest.stack import Stack, running_stack

__all__ = ["Stack", "running_stack"]
