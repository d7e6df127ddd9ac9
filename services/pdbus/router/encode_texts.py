"""Texts to token ids by the tokenizers library, whatever a pushed tokenizer.json says."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from pdbus.errors import InvalidRequest

_PANIC = "pyo3_runtime"
"""The module of the library's PanicException: a BaseException, which can't be imported."""


def encode_texts(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], *, param: str, special: bool = True
) -> list[tuple[int, ...]]:
    """`special`: with the special tokens around each. Raises InvalidRequest that names `param` for a text that is none,
    or that this tokenizer has no tokens for."""
    try:
        # The batch form is the one that lets go of the interpreter's lock.
        return [tuple(encoded.ids) for encoded in tokenizer.encode_batch(list(texts), add_special_tokens=special)]
    except (UnicodeEncodeError, TypeError):
        raise InvalidRequest("a text holds a lone surrogate, which is no character", param=param) from None
    except BaseException as error:  # the library raises plain Exception, and panics where a file contradicts itself
        if isinstance(error, Exception) or type(error).__module__ == _PANIC:
            raise InvalidRequest(f"this version's tokenizer can't read the text: {error}", param=param) from None
        raise
