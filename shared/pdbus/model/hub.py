"""A model of the Hugging Face hub by its id: fetched into the hub's own cache on this machine, safe files only."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from pdbus.model import sentence
from pdbus.model.encoder_config import Sentence
from pdbus.model.families import any_from_hf
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import read_json

_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    *sentence.FILES,
]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def download(hub_id: str) -> Path:
    """The folder of the newest snapshot. Weights come only after config.json is known to be served.

    Only safetensors and JSON files are fetched: nothing that runs code when it is read. Raises CheckpointError when
    the hub can't be reached or has no such model, UnsupportedModel by its config.json.
    """
    folder = _snapshot(hub_id, _SMALL_FILES)
    try:
        any_from_hf(read_json(folder / "config.json"), Sentence())
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{hub_id}: {error.message}") from error
    return _snapshot(hub_id, [*_SMALL_FILES, "model*.safetensors"])


def _snapshot(hub_id: str, patterns: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{hub_id}: can't be fetched from the hub, and is not in its cache here: {reason}"
        ) from error
