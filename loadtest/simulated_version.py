"""A version without weights for simulated workers: the id of a token is its byte."""

from __future__ import annotations

import json
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdbus.canonical import content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.errors import NotFound
from pdbus.kv.format import PageFormat
from pdbus.kv.prefix import PrefixScope
from pdbus.messages.changelog import Commit, Forget, LogEntry, Ref
from pdbus.messages.common import Digest
from pdbus.model.config import from_hf
from pdbus.model.scope import prefix_scope
from pdbus.weights.history import History
from pdbus.weights.layer import Tensor, is_computed, layer_of, meta_tensor
from pdbus.weights.manifest import Manifest

CONTEXT_TOKENS = 512
PAGE_FORMAT = "kv1-l2-t16-h1-d4-fp32"
COMPUTE_CLASS = "simulated"
END_OF_TURN = 257
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def meta_files() -> dict[str, bytes]:
    """The checkpoint's files."""
    return {
        "config.json": json.dumps(_CONFIG).encode(),
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": END_OF_TURN}).encode(),
        "chat_template.jinja": _TEMPLATE.encode(),
    }


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, without merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def version(number: int = 0) -> Manifest:
    """Another root for each number. Its weights are names and digests only."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2))]
    weights = [Tensor(name, "fp32", (1,), (content_digest(f"{name} {number}".encode()),)) for name in names]
    files = [
        Tensor(meta_tensor(name), "u8", (len(content),), (content_digest(content),))
        for name, content in meta_files().items()
    ]
    return Manifest.build([*weights, *files])


def scope(manifest: Manifest) -> PrefixScope:
    """What page keys of this version hang on, with no salt yet."""
    tensors = {name: tensor.digest for name, tensor in manifest.tensors.items() if is_computed(layer_of(name))}
    return prefix_scope(from_hf(_CONFIG), tensors, PageFormat.parse(PAGE_FORMAT), COMPUTE_CLASS)


class SimulatedVersions:
    """Stands for the change log's follower and for the reader of blocks: versions that are there at once."""

    def __init__(self, *manifests: Manifest) -> None:
        self.history = History()
        self.confirmed_age_s = 0.0
        self.unread: list[tuple[str, Digest]] = []
        """Refs that are in the log already and not in `history`."""
        self._manifests = {manifest.root: manifest for manifest in manifests}
        self._callbacks: list[Callable[[History], object]] = []
        for root in self._manifests:
            self._append(LogEntry(commit=Commit(root.hex(), root, None, "simulated", "", ())))
        self.move("stable", manifests[0].root)

    def move(self, ref: str, root: Digest) -> None:
        """Appends a ref entry."""
        self._append(LogEntry(ref=Ref(ref, root, "simulated")))

    def forget(self, root: Digest) -> None:
        """Gives up a version that no ref names."""
        self._append(LogEntry(forget=Forget((root,), "simulated")))

    async def caught_up(self, deadline: Deadline) -> None:
        """As HistoryFollower's."""
        while self.unread:
            self.move(*self.unread.pop(0))

    def on_change(self, callback: Callable[[History], object]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        try:
            return self._manifests[root]
        except KeyError:
            raise NotFound(f"no version {root.hex()[:12]}") from None

    async def meta(self, root: Digest, ctx: RequestContext) -> dict[str, bytes]:
        await self.manifest(root, ctx)
        return meta_files()

    def _append(self, entry: LogEntry) -> None:
        self.history.apply(self.history.seq + 1, 0, entry)
        for callback in tuple(self._callbacks):
            callback(self.history)
