"""A Hugging Face model folder: config.json, tokenizer.json and safetensors, in one file or in shards by an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdbus.model import sentence, tokens
from pdbus.model.families import embeds
from pdbus.model.refusal import CheckpointError
from pdbus.model.safetensors_file import StoredTensor, stored_tensors
from pdbus.model.source import Source, decode, dump, parse_json, read_bytes, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_folder(folder: Path) -> Source:
    """Reads the small files and the headers of the tensor files. Raises CheckpointError with file and reason."""
    config = read_json(folder / "config.json")
    tensors = _tensors(folder)
    meta, largest_token_id = _meta(folder, config)
    if embeds(config):
        meta[sentence.META_FILE] = sentence.read_sentence(folder)
    return Source(
        path=folder,
        config=config,
        meta=meta,
        largest_token_id=largest_token_id,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=lambda name: tensors[name].read(),
    )


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return stored_tensors(found[0])
    if found:
        raise CheckpointError.of(folder, f"{len(found)} safetensors files, but no {INDEX} that tells which belong")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        reason = f"only pickle files ({pickles[0]}): reading one runs code from it; convert it to safetensors"
        raise CheckpointError.of(folder, reason)
    raise CheckpointError.of(folder, f"neither {SINGLE} nor {INDEX} is there")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of all shards; the index and the shards' headers must name the same ones in the same places."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError.of(index, "weight_map must map each tensor to the name of a file")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError.of(index, f"{shard!r:.200} is not the name of a safetensors file in the same folder")
        if not (folder / shard).is_file():
            raise CheckpointError.of(folder / shard, f"is missing, but {INDEX} names it")
        held = stored_tensors(folder / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        if listed != set(held):
            name = min(listed ^ set(held))
            where = "is in the index, but not in the file" if name in listed else "is in the file, but not in the index"
            raise CheckpointError.of(folder / shard, f"tensor {name} {where}")
        tensors |= held
    return tensors


def _meta(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, bytes], int]:
    """The files that go with a version, and the largest token id."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError.of(path, "is missing; a checkpoint needs its tokenizer in the `tokenizers` format")
    content = read_bytes(path)
    tokenizer = tokens.parse_tokenizer(path, decode(path, content))
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        # Left over from training; a prompt is never cut or filled up
        tokenizer.no_truncation()
        tokenizer.no_padding()
        content = tokenizer.to_str().encode()
    settings = _optional_json(folder / "tokenizer_config.json")
    special = tokens.SpecialTokens(*(_text(settings.get(f"{kind}_token")) for kind in ("bos", "eos", "unk")))
    if (
        settings.get("add_bos_token") is True
        and special.bos is not None
        and not tokens.begins_with(tokenizer, special.bos)
    ):
        # transformers adds it in the tokenizer class; here tokenizer.json alone decides
        if tokenizer.token_to_id(special.bos) is None:
            raise CheckpointError.of(path, f"bos_token {special.bos!r:.80} is not in the vocabulary")
        tokens.add_beginning(tokenizer, special.bos)
        content = tokenizer.to_str().encode()
    meta = {
        "tokenizer.json": content,
        "tokenizer_config.json": tokens.tokenizer_config(tokenizer, special),
        "generation_config.json": _generation_config(folder, config, tokenizer, special),
    }
    template = _chat_template(folder, settings)
    if template is not None:
        meta["chat_template.jinja"] = template
    return meta, tokens.largest_id(tokenizer)


def _generation_config(folder: Path, config: Mapping[str, Any], tokenizer: Any, special: tokens.SpecialTokens) -> bytes:
    """generation_config.json with eos_token_id as a list: from the file, else from config.json, else the eos token."""
    path = folder / "generation_config.json"
    generation = _optional_json(path)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None and special.eos is not None:
        eos = tokenizer.token_to_id(special.eos)
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError.of(path, f"eos_token_id must be token ids, not {eos!r:.80}")
    return dump(generation | {"eos_token_id": ids})


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> bytes | None:
    """The default chat template: a file of its own, or a text or a list of named ones in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        content = read_bytes(path)
        decode(path, content)
        return content
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError.of(folder / "tokenizer_config.json", "chat_template must be a text")
    return None if template is None else template.encode()


def _optional_json(path: Path) -> dict[str, Any]:
    return parse_json(path, read_bytes(path)) if path.is_file() else {}


def _text(token: object) -> str | None:
    """A special token: a text, or an object with its flags, or absent."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
