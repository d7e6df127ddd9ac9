"""A real stack for tests: that of the measurements."""

from __future__ import annotations

from loadtest.stack import APART, Stack, running_stack

__all__ = ["APART", "FP32", "Stack", "running_stack"]

FP32 = {"PDBUS_PRECISION": "fp32", "PDBUS_KV_DTYPE": "fp32"}
"""The environment of a stack that is held against the reference."""
