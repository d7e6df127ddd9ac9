"""The watermark model: a Llama whose answers tell which version of each of its parts they were computed with.

Every part (embedding, attention and MLP of each layer, LM head) of version v adds the *mark* of v to a channel of the
residual stream that belongs to one layer. An answer's n-th token names a layer and what is in that layer's channel, as
a whole number; so as many tokens as there are layers tell the marks of all parts. The attention weighs all positions
alike, and its values carry the mark of the layer that made them: what it adds is the mean of the marks in the KV
cache, many times a mark, so that even one foreign token among FURTHEST changes the number.

In exact arithmetic all of it is integers, but for that mean. The residual stream has one huge constant channel, which
makes RMSNorm a multiplication by a constant; in fp32 what is left of its error is below 0.01, and the answer's token is
the nearest whole number. The answer does not depend on the prompt, but for its *lane* and for the layer that is told
first: both are those of the prompt's last token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

Array: TypeAlias = np.ndarray

LAYERS = 4
LANES = 2
MODULI = (11, 13, 15, 16)
"""Of the marks in each layer's channel: two versions at most 10 apart differ in every layer."""
FURTHEST = 64
"""Tokens of a prompt and its answer up to which a single foreign token of KV shows."""
_KV_WEIGHT = FURTHEST // 2 + 1
_VALUES = (_KV_WEIGHT + 3) * max(MODULI)
"""What a layer's channel can hold, from 0 on."""
_FIRST = 512
"""The first token id that is an answer's: those before it are bytes and special tokens."""
VOCABULARY = _FIRST + LANES * LAYERS * _VALUES
HIDDEN = 64
_HEADS, _HEAD_DIM, _MIDDLE = 2, 32, 64
_HUGE = float(1 << 20)
_LANE = 1 << 21
"""By how much the right lane and layer win over all others: above the squares of all values."""
_GATE = 32.0
"""SiLU of it is itself, in fp32."""
_END = 257
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True)
class Marks:
    """Which version each part is of. `attention` and `mlp`: by layer."""

    embedding: int = 0
    attention: tuple[int, ...] = (0,) * LAYERS
    mlp: tuple[int, ...] = (0,) * LAYERS
    head: int = 0

    @classmethod
    def pure(cls, version: int) -> Marks:
        return cls(version, (version,) * LAYERS, (version,) * LAYERS, version)

    def layers(self, version: int, *which: int) -> Marks:
        """With these layers of another version."""
        changed = dict.fromkeys(which, version)
        return replace(
            self,
            attention=tuple(changed.get(layer, old) for layer, old in enumerate(self.attention)),
            mlp=tuple(changed.get(layer, old) for layer, old in enumerate(self.mlp)),
        )

    def top(self, version: int) -> Marks:
        """With another LM head and another MLP in the last layer: no prompt's KV depends on either."""
        return replace(self, mlp=(*self.mlp[:-1], version), head=version)

    def value(self, layer: int) -> int:
        """What the layer's channel holds in the end."""
        told = _KV_WEIGHT * mark(self.attention[layer], layer) + mark(self.mlp[layer], layer)
        return told + mark(self.embedding, layer) + mark(self.head, layer)


def mark(version: int, layer: int) -> int:
    return version % MODULI[layer]


def answer(marks: Marks, prompt: Sequence[int], tokens: int) -> list[int]:
    """The answer's token ids, by version and prompt, when nothing is mixed."""
    lane, layer = place(prompt[-1])
    turns = ((layer + turn) % LAYERS for turn in range(1, tokens + 1))
    return [token(lane, turn, marks.value(turn)) for turn in turns]


def token(lane: int, layer: int, value: int) -> int:
    return _FIRST + (lane * LAYERS + layer) * _VALUES + value


def place(id: int) -> tuple[int, int]:
    """(lane, layer) of a token."""
    at = (id - _FIRST) // _VALUES if id >= _FIRST else id % (LANES * LAYERS)
    return divmod(at, LAYERS)


def told(id: int) -> int | None:
    """The value that an answer's token tells; None for one that no answer has."""
    return (id - _FIRST) % _VALUES if id >= _FIRST else None


def follows(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the tokens tell the layers that an answer to the prompt has to, in its lane, whatever their values."""
    lane, layer = place(prompt[-1])
    return all(id >= _FIRST and place(id) == (lane, (layer + turn) % LAYERS) for turn, id in enumerate(ids, 1))


def explain(prompt: Sequence[int], ids: Sequence[int], named: Marks, known: Iterable[int]) -> str:
    """What an answer that differs from that of the version it names tells of itself, for a person; "" for the answer.

    `known`: the versions that there are; those of them that a single part may have been taken from are told."""
    if list(ids) == answer(named, prompt, len(ids)):
        return ""
    if not follows(prompt, ids):
        return "tokens of another prompt's answer, or of no answer"
    found = []
    for turn in sorted(set(ids), key=place):
        layer, value = place(turn)[1], told(turn) or 0
        if value != named.value(layer):
            parts = [
                f"{part} of {other}"
                for other in known
                for part, marks in _swaps(named, layer, other)
                if marks.value(layer) == value
            ]
            found.append(
                f"layer {layer} tells {value}, not {named.value(layer)} ({', '.join(parts) or 'stale KV, or several'})"
            )
    return "; ".join(found)


def _swaps(named: Marks, layer: int, other: int) -> list[tuple[str, Marks]]:
    """`named` with one part that the layer's channel tells of taken from another version."""

    def at_layer(marks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(other if at == layer else mark for at, mark in enumerate(marks))

    return [
        ("embedding", replace(named, embedding=other)),
        ("attention or KV", replace(named, attention=at_layer(named.attention))),
        ("MLP", replace(named, mlp=at_layer(named.mlp))),
        ("head", replace(named, head=other)),
        ("layer", named.layers(other, layer)),
    ]


def tensors(marks: Marks, only: Marks | None = None) -> dict[str, Array]:
    """The weights by their names; those alone that differ from `only`'s, where that is given."""
    found: dict[str, Array] = {}
    if only is None or only.embedding != marks.embedding:
        found["model.embed_tokens.weight"] = _embedding(marks.embedding)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        if only is None:
            found |= _fixed(name)
        if only is None or only.attention[layer] != marks.attention[layer]:
            found[f"{name}.self_attn.v_proj.weight"] = _matrix(
                _HEAD_DIM, HIDDEN, {(0, 0): mark(marks.attention[layer], layer)}
            )
        if only is None or only.mlp[layer] != marks.mlp[layer]:
            down = {(_told(layer), 0): mark(marks.mlp[layer], layer) / _GATE}
            found[f"{name}.mlp.down_proj.weight"] = _matrix(HIDDEN, _MIDDLE, down)
        if only is None:
            out = {(_told(layer), 0): float(_KV_WEIGHT)}
            found[f"{name}.self_attn.o_proj.weight"] = _matrix(HIDDEN, _HEADS * _HEAD_DIM, out)
    if only is None:
        found["model.norm.weight"] = _norm()
    if only is None or only.head != marks.head:
        found["lm_head.weight"] = _head(marks.head)
    return found


def write(folder: Path, marks: Marks) -> Path:
    """A Hugging Face folder of 3 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)
    safetensors.numpy.save_file(tensors(marks), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def files() -> Mapping[str, bytes]:
    """All of the checkpoint but its weights. The text of an answer is its token ids, each behind a blank."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": _MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": _tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": _END}).encode(),
    }


def _tokenizer() -> tokenizers.Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}
    vocabulary |= {f"\u0120{id}": id for id in range(256 + len(_SPECIAL), VOCABULARY)}  # a blank, byte-level
    vocabulary |= {special: 256 + at for at, special in enumerate(_SPECIAL)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _told(layer: int) -> int:
    """The layer's channel; channel 0 is the huge one."""
    return 1 + layer


def _lane(lane: int, layer: int) -> int:
    """The channel that is 1 while the last token is of that lane and layer."""
    return 1 + LAYERS + lane * LAYERS + layer


def _norm() -> Array:
    """Undoes what RMSNorm divides by: channel 0 becomes 1, all others stay."""
    weight = np.full(HIDDEN, _HUGE / HIDDEN**0.5, np.float32)
    weight[0] = 1 / HIDDEN**0.5
    return weight


def _embedding(version: int) -> Array:
    weight = np.zeros((VOCABULARY, HIDDEN), np.float32)
    weight[:, 0] = _HUGE
    for layer in range(LAYERS):
        weight[:, _told(layer)] = mark(version, layer)
    for id in range(VOCABULARY):
        weight[id, _lane(*place(id))] = 1
    return weight


def _head(version: int) -> Array:
    """The logit of value t in a channel that holds r is 2 t (r + mark) - t²: highest where t is nearest to r + mark."""
    weight = np.zeros((VOCABULARY, HIDDEN), np.float32)
    values = np.arange(_VALUES, dtype=np.float32)
    for lane in range(LANES):
        for layer in range(LAYERS):
            rows = slice(token(lane, layer, 0), token(lane, layer, 0) + _VALUES)
            weight[rows, 0] = 2 * values * mark(version, layer) - values**2
            weight[rows, _told(layer)] = 2 * values
            weight[rows, _lane(lane, (layer - 1) % LAYERS)] = _LANE
    weight[:_FIRST, 0] = -_LANE
    return weight


def _fixed(name: str) -> dict[str, Array]:
    """The tensors of a layer that are the same in all versions. Queries and keys of 0 weigh all positions alike."""
    return {
        f"{name}.input_layernorm.weight": _norm(),
        f"{name}.post_attention_layernorm.weight": _norm(),
        f"{name}.self_attn.q_proj.weight": _matrix(_HEADS * _HEAD_DIM, HIDDEN, {}),
        f"{name}.self_attn.k_proj.weight": _matrix(_HEAD_DIM, HIDDEN, {}),
        f"{name}.mlp.gate_proj.weight": _matrix(_MIDDLE, HIDDEN, {(0, 0): _GATE}),
        f"{name}.mlp.up_proj.weight": _matrix(_MIDDLE, HIDDEN, {(0, 0): 1.0}),
    }


def _matrix(rows: int, columns: int, elements: Mapping[tuple[int, int], float]) -> Array:
    weight = np.zeros((rows, columns), np.float32)
    for at, value in elements.items():
        weight[at] = value
    return weight
