"""Chat templates: Jinja in its sandbox, with the helpers that Hugging Face gives them, and bounds on what they may do.

A template is part of a model and so of a version, and comes from whoever pushes weights: it must not reach anything
outside, nor keep a thread or the memory busy (template_bounds.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from pdbus.errors import InvalidRequest
from pdbus.router.openai_schema import ChatMessage
from pdbus.router.template_bounds import BUDGET, BoundedEnvironment
from pdbus.router.template_budget import Budget, TooMuchWork

_TURNS = 200_000
_TURNS_PER_CHAR = 16
_OUTPUT_CHARS = 100_000


class ChatTemplate:
    """A compiled template. Rendering keeps no state and may run in any thread."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """Raises InvalidRequest for a template that doesn't compile."""
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2 passes on what Python says of the code that it makes of a template
            raise InvalidRequest(f"the model's chat template does not compile: {str(error)[:300]}") from None
        self._special_texts = dict(special_texts)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises InvalidRequest for what the template refuses (a role out of turn, say) and for whatever fails in it."""
        size = len(messages) + sum(len(message.content) for message in messages)
        variables: dict[str, Any] = {
            **self._special_texts,
            "messages": [_as_mapping(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            BUDGET: Budget(_TURNS + _TURNS_PER_CHAR * size, _most_chars(size)),
        }
        try:
            return _bounded(self._template.generate(variables), _most_chars(size))
        except InvalidRequest:
            raise
        except Exception as error:  # whatever a template can do wrong is the request's error, and no other's
            raise InvalidRequest(f"the chat template failed: {_reason(error)}", param="messages") from None


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _most_chars(size: int) -> int:
    """Of the output, and of any text on the way, for messages of that size."""
    return _OUTPUT_CHARS + 8 * size


def _bounded(pieces: Iterable[str], most: int) -> str:
    parts: list[str] = []
    for piece in pieces:
        parts.append(piece)
        most -= len(piece)
        if most < 0:
            raise TooMuchWork("its output is too long")
    return "".join(parts)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without jinja2's escaping for HTML: a prompt is no web page."""
    if indent is not None and not 0 <= indent <= 16:
        raise TooMuchWork("it indents too far")
    ensure_ascii, sort_keys = bool(options.get("ensure_ascii")), bool(options.get("sort_keys"))
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_mapping(message: ChatMessage) -> dict[str, str]:
    found = {"role": message.role, "content": message.content}
    return found if message.name is None else {**found, "name": message.name}


def _reason(error: Exception) -> str:
    return str(error)[:300] if isinstance(error, jinja2.TemplateError) else type(error).__name__
