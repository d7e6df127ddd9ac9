"""Nothing that comes from outside is ever run: no pickle, no torch.load, no eval, in any file of the program."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("shared", "services", "loadtest") for path in (ROOT / folder).rglob("*.py"))
MODULES = frozenset(
    "pickle _pickle cPickle dill cloudpickle joblib marshal shelve jsonpickle code codeop runpy".split()
)
CALLS = frozenset("eval exec compile __import__".split())
ATTRIBUTES = frozenset({
    ("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("np", "save"),
    ("pd", "read_pickle"), ("torch", "jit"), ("torch", "hub"), ("os", "system"),
})  # fmt: skip
KEYWORDS = frozenset({("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False), ("shell", True)})


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (name.name for name in node.names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in MODULES:
                    yield module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in ATTRIBUTES:
                yield f"{owner}.{name}"
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if (name, value) in KEYWORDS:
                yield f"{name}={value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    assert list(dangers(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import joblib.memory", "eval(x)", "torch.load(f)", "np.load(f)",
    "f(x, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)", "run('x', shell=True)",
])  # fmt: skip
def test_it_would_be_found(source: str) -> None:
    assert list(dangers(ast.parse(source)))
