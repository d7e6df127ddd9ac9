"""The files of sentence-transformers in a model folder: which modules make a text's vector, and its longest text.

    modules.json                    Transformer, Pooling, and perhaps Normalize
    1_Pooling/config.json           the kind of pooling (the folder as modules.json names it)
    sentence_bert_config.json       max_seq_length
    config_sentence_transformers.json    a prompt that is put before each text

They become one file of `meta`, so that a change of them is another root. A folder without them gets what
sentence-transformers gives it: mean pooling, not normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdbus.model.config_fields import Fields
from pdbus.model.encoder_config import Pooling, Sentence
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.source import dump, parse_json, read_bytes, read_json

META_FILE = "sentence.json"
FILES = ("modules.json", "*/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
"""Patterns of all that `read_sentence` may read."""

_MODES: Mapping[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def read_sentence(folder: Path) -> bytes:
    """The file of `meta`. Raises CheckpointError, UnsupportedModel with file and reason."""
    pooling, normalize = _modules(folder)
    settings = _optional(folder / "sentence_bert_config.json")
    try:
        fields = Fields(settings)
        if fields.flag("do_lower_case"):
            raise UnsupportedModel("do_lower_case: only a tokenizer that does it itself is served")
        most = None if settings.get("max_seq_length") is None else fields.integer("max_seq_length", most=1 << 20)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder / 'sentence_bert_config.json'}: {error.message}") from error
    _check_prompt(folder / "config_sentence_transformers.json")
    return dump({"pooling": pooling, "normalize": normalize, "max_tokens": most})


def parse_sentence(meta: Mapping[str, bytes]) -> Sentence:
    """From a version's files. Raises UnsupportedModel: it was made by another version of this program."""
    content = parse_json(Path(META_FILE), meta.get(META_FILE, b"{}"))
    pooling, most = content.get("pooling", "mean"), content.get("max_tokens")
    if pooling not in ("mean", "cls") or not (most is None or (type(most) is int and most > 0)):
        raise UnsupportedModel(f"{META_FILE}: pooling {pooling!r:.80}, max_tokens {most!r:.80}")
    return Sentence(pooling, Fields(content).flag("normalize"), most)


def _modules(folder: Path) -> tuple[Pooling, bool]:
    path = folder / "modules.json"
    if not path.is_file():
        return "mean", False
    # A list, which read_json refuses
    content = parse_json(path, b'{"modules": %b}' % read_bytes(path))["modules"]
    modules = content if isinstance(content, list) else []
    kinds = [str(m.get("type", "")).rpartition(".")[2] if isinstance(m, dict) else "" for m in modules]
    if kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(f"{path}: served are Transformer, Pooling, Normalize, in this order, not {kinds!r:.200}")
    return _pooling(folder, str(modules[1].get("path", ""))) if len(kinds) > 1 else "mean", kinds[-1] == "Normalize"


def _pooling(folder: Path, name: str) -> Pooling:
    if not name or Path(name).name != name:
        raise CheckpointError.of(folder / "modules.json", f"{name!r:.80} is not the name of a folder beside it")
    path = folder / name / "config.json"
    config = read_json(path)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if isinstance(config.get("pooling_mode"), str):  # as sentence-transformers writes it since 5
        modes = [{"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}.get(config["pooling_mode"], "")]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(f"{path}: served is pooling by mean or by the first token, not {modes!r:.200}")
    return _MODES[modes[0]]


def _check_prompt(path: Path) -> None:
    config = _optional(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if isinstance(name, str) and isinstance(prompts, dict) and prompts.get(name):
        raise UnsupportedModel(f"{path}: a prompt before every text (default_prompt_name) is not served")


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
