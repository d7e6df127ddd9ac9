"""Opens a checkpoint of any supported kind, and checks it whole before a single weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdbus.model import hub
from pdbus.model.config import ModelConfig
from pdbus.model.encoder_config import EncoderConfig
from pdbus.model.families import AnyConfig, any_from_hf, expected
from pdbus.model.gguf import open_file
from pdbus.model.hf import open_folder
from pdbus.model.refusal import CheckpointError, UnsupportedModel
from pdbus.model.sentence import parse_sentence
from pdbus.model.source import Source, Tensor, dump

# Of old Llama checkpoints: a buffer that follows from the config
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# Of encoders: positions as numbers, and the layer that was trained to tell whether two sentences follow each other
_NOT_OF_VECTORS = re.compile(r"embeddings\.position_ids|pooler\.dense\.(weight|bias)")
# The part of a GGUF file's name that tells its number format, or that it is one of several
_GGUF_SUFFIX = re.compile(r"[-._](i?q\d\w*|tq\d\w*|bf16|f16|f32|fp16|fp32|mxfp4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it lies on disk: sound, complete, of a served architecture."""

    name: str
    """A model id to serve it under: lower case, made from the folder's or file's name."""
    config: AnyConfig
    meta: Mapping[str, bytes]
    """config.json (Hugging Face form), tokenizer.json, tokenizer_config.json (bos_token, eos_token, unk_token,
    add_bos_token), generation_config.json (eos_token_id as a list, …), chat_template.jinja if the model has one, and of
    an encoder sentence.json (model/sentence.py)."""
    source: Source

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 array in C order) of every tensor, one at a time, in the order of `expected`.

        Raises CheckpointError if a file has changed since it was opened.
        """
        for name, shape in expected(self.config).items():
            tensor = self.source.read(name)
            if tensor.shape != shape:
                raise CheckpointError.of(self.source.path, f"tensor {name} was read as {tensor.shape}, not {shape}")
            yield name, tensor


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder, a GGUF file, or a model of the Hugging Face hub by its id (ORGANISATION/NAME).

    Raises CheckpointError (an InvalidRequest) with file and reason if it is not what it claims, UnsupportedModel if
    this engine would not compute what it means. A hub id is downloaded, unless it is in the local hub cache already.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _checked(open_folder(path), _name(_hub_name(path) or path.resolve().name))
    if path.is_file():
        return _checked(open_file(path), _name(_GGUF_SUFFIX.sub("", path.stem)))
    if hub.is_hub_id(str(source)):
        return _checked(open_folder(hub.download(str(source))), _name(str(source).partition("/")[2]))
    raise CheckpointError(f"{source}: no such folder or file, nor the id of a model on the hub (ORGANISATION/NAME)")


def _checked(source: Source, name: str) -> Checkpoint:
    try:
        config = any_from_hf(source.config, parse_sentence(source.meta))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source.path}: {error.message}") from error
    _check_tensors(source, config)
    if source.largest_token_id >= config.vocab_size:
        reason = f"its tokenizer has token id {source.largest_token_id}, beyond vocab_size {config.vocab_size}"
        raise CheckpointError.of(source.path, reason)
    return Checkpoint(name, config, {"config.json": dump(source.config), **source.meta}, source)


def _check_tensors(source: Source, config: AnyConfig) -> None:
    wanted = expected(config)
    for name, shape in wanted.items():
        if name not in source.shapes:
            raise CheckpointError.of(source.path, f"tensor {name} is missing")
        if source.shapes[name] != shape:
            raise CheckpointError.of(source.path, f"tensor {name} has shape {source.shapes[name]}, not {shape}")
    for name in source.shapes:
        if name in wanted or _may_stay_out(name, source, config):
            continue
        raise CheckpointError.of(source.path, f"tensor {name} has no place in a {config.family} model")


def _may_stay_out(name: str, source: Source, config: AnyConfig) -> bool:
    if isinstance(config, EncoderConfig):
        return _NOT_OF_VECTORS.fullmatch(name) is not None
    if name == "lm_head.weight":
        return _same_as_embedding(source, config)
    return _DERIVED.fullmatch(name) is not None


def _same_as_embedding(source: Source, config: ModelConfig) -> bool:
    """Some files store a tied LM head all the same. One that differs belongs to another model than config.json says."""
    embedding = "model.embed_tokens.weight"
    if source.shapes["lm_head.weight"] != source.shapes[embedding]:
        return False
    return config.tied_embeddings and np.array_equal(source.read("lm_head.weight"), source.read(embedding))


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "model"


def _hub_name(folder: Path) -> str | None:
    """A snapshot in the hub's cache lies in models--ORGANISATION--NAME/snapshots/COMMIT."""
    if folder.parent.name != "snapshots":
        return None
    parts = folder.parent.parent.name.split("--")
    return parts[-1] if parts[0] == "models" and len(parts) == 3 else None
