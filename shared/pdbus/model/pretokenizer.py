"""How text is cut before byte-level BPE. A GGUF file gives a name for it only (`tokenizer.ggml.pre`).

The patterns are those of the original tokenizer.json files, as llama.cpp (llama-vocab.cpp) quotes or rewrites them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut. Without a pattern, GPT-2's own (the one built into `ByteLevel`) applies."""

    pattern: str | None = None
    digits_apart: bool = False
    """Every digit is cut off before anything else."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first."""
    whole_words: bool = False
    """A cut piece that is a token stays whole, whatever the merges say."""
    bos: bool = False
    """The beginning token is added where the file doesn't tell."""

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits_apart else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA_BPE = Cut(_LLAMA3, whole_words=True, bos=True)

CUTS = {
    "gpt-2": Cut(),
    "smollm": Cut(digits_apart=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "tekken": Cut(_TEKKEN, whole_words=True, bos=True),  # Mistral Nemo and later
    "qwen2": Cut(_QWEN2, nfc=True),  # Qwen3 too
    "deepseek-r1-qwen": Cut(_QWEN2),
}
