"""Points a lesson at the tests that would have caught its fault, and makes sure that they are still there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_NOT_RUN = {"skip", "xfail"}


def caught_by(file: str, *names: str) -> None:
    """`file`: below tests/, without `.py`. Fails where one of these test functions does not exist, or does not run."""
    known = _functions(file)
    for name in names:
        assert f"test_{name}" in known, f"tests/{file}.py has no test_{name}: which one holds this lesson now?"
        assert known[f"test_{name}"], f"test_{name} of tests/{file}.py is not run"


@cache
def _functions(file: str) -> dict[str, bool]:
    """By name, whether it runs."""
    tree = ast.parse((_TESTS / f"{file}.py").read_text())
    return {
        node.name: not _NOT_RUN & {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
