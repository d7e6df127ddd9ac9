"""One version of the model as the router needs it: its tokenizer, template, configuration and the keys of its pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pdbus.canonical import digest
from pdbus.errors import InvalidRequest
from pdbus.kv.format import PAGE_TOKENS, PageFormat
from pdbus.kv.prefix import PrefixScope
from pdbus.messages.common import Digest
from pdbus.model.config import ModelConfig
from pdbus.model.encoder_config import EncoderConfig
from pdbus.model.families import config_of
from pdbus.model.scope import prefix_scope
from pdbus.router.chat_template import ChatTemplate
from pdbus.router.encoder_version import EncoderVersion, TextIds
from pdbus.router.placement import Kind
from pdbus.router.prefixes import PrefixKeys
from pdbus.router.tokenizer import Tokenizer, stop_ids


@dataclass(frozen=True)
class Version:
    """One root, ready to tokenize for."""

    root: Digest
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | InvalidRequest
    """Or why there is none."""
    stop_ids: tuple[int, ...]
    tensors: Mapping[str, Digest]
    """Digests of the weights."""
    _scopes: dict[Kind, PrefixScope] = field(default_factory=dict)

    def prefix_keys(self, tokens: Sequence[int], kind: Kind, salt: bytes) -> PrefixKeys:
        """The keys of the prompt's pages, as workers of that kind have them."""
        scope = self._scope(kind)
        if scope is None:
            return PrefixKeys(tokens, digest([*kind, salt]), PAGE_TOKENS, salt)
        return PrefixKeys(tokens, replace(scope, salt=salt).digest(), scope.page_format.page_tokens, salt)

    def _scope(self, kind: Kind) -> PrefixScope | None:
        """None for pages in a layout of another version of this program: nothing of theirs can be found."""
        if kind not in self._scopes:
            try:
                layout = PageFormat.parse(kind.page_format)
            except InvalidRequest:
                return None
            self._scopes[kind] = prefix_scope(self.config, self.tensors, layout, kind.compute_class)
        return self._scopes[kind]


AnyVersion: TypeAlias = Version | EncoderVersion


def build_version(
    root: Digest, meta: Mapping[str, bytes], tensors: Mapping[str, Digest], known: Sequence[AnyVersion] = ()
) -> AnyVersion:
    """Slow: parses a vocabulary, unless one of the `known` versions has it. Raises InvalidRequest where a file is
    missing or can't be used."""
    missing = {"config.json", "tokenizer.json", "tokenizer_config.json"} - meta.keys()
    if missing:
        raise InvalidRequest(f"the version lacks {', '.join(sorted(missing))}")
    config = config_of(meta)
    if isinstance(config, EncoderConfig):
        return EncoderVersion(root, config, _texts(meta["tokenizer.json"], known))
    others = (version.tokenizer for version in known if isinstance(version, Version))
    tokenizer = Tokenizer(meta["tokenizer.json"], _object(meta, "tokenizer_config.json"), others)
    ends = stop_ids(_object(meta, "generation_config.json"), tokenizer)
    template = _template(meta.get("chat_template.jinja"), tokenizer)
    return Version(root, config, tokenizer, template, ends, dict(tensors))


def with_weights(version: AnyVersion, root: Digest, tensors: Mapping[str, Digest]) -> AnyVersion:
    """Another root that differs from this version in weights only: the vocabulary is not parsed again."""
    if isinstance(version, EncoderVersion):
        return replace(version, root=root)
    return replace(version, root=root, tensors=dict(tensors), _scopes={})


def _texts(tokenizer_json: bytes, known: Sequence[AnyVersion]) -> TextIds:
    return TextIds(tokenizer_json, (version.tokenizer for version in known if isinstance(version, EncoderVersion)))


def _object(meta: Mapping[str, bytes], file: str) -> dict[str, Any]:
    try:
        content = json.loads(meta.get(file, b"{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file} is not a JSON object")
    return content


def _template(source: bytes | None, tokenizer: Tokenizer) -> ChatTemplate | InvalidRequest:
    """A version whose template can't be used still serves completions."""
    if not source:
        return InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
    try:
        return ChatTemplate(source.decode("utf-8", "replace"), tokenizer.special_texts)
    except InvalidRequest as error:
        return error
