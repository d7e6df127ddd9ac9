"""Chat templates: Jinja in its sandbox, with the helpers that Hugging Face gives them, and bounds on what they may do.

A template is part of a model and so of a version, and comes from whoever pushes weights: it must not reach anything
outside, nor keep a thread or the memory busy. Turns of all loops together, the length of the output and products of
large values are bounded by the size of the input.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from pdbus.errors import InvalidRequest
from pdbus.router.openai_schema import ChatMessage

_LOOP_TURNS = 20_000
_OUTPUT_CHARS = 100_000
_LARGEST_PRODUCT = 1_000_000


class TooMuchWork(SecurityError):
    """The template does more than an input of this size can need."""


class ChatTemplate:
    """A compiled template. Rendering keeps no state and may run in any thread."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """Raises InvalidRequest for a template that doesn't compile."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.filters[_TURNS] = _count_turns
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequest(f"the model's chat template does not compile: {error}") from None
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
            _TURNS: _Budget(_LOOP_TURNS + 4 * size),
        }
        try:
            return _bounded(self._template.generate(variables), _OUTPUT_CHARS + 8 * size)
        except InvalidRequest:
            raise
        except Exception as error:  # whatever a template can do wrong is the request's error, and no other's
            raise InvalidRequest(f"the chat template failed: {_reason(error)}", param="messages") from None


_TURNS = "_pdbus_turns"


class _Budget:
    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooMuchWork("its loops run too long")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop counted and products bounded."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise TooMuchWork("it formats by %")
        if operator == "**" and not (abs(left) <= 1000 and abs(right) <= 16):
            raise TooMuchWork("its powers are too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and len(sequence) * times > _LARGEST_PRODUCT:
                    raise TooMuchWork("its products are too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TURNS, [], [], None, None, lineno=loop.lineno)
        return template


class _Counted:
    """An iterable that spends the budget; it keeps its length, which `loop.last` and `loop.length` ask for."""

    def __init__(self, inner: Iterable[Any], budget: _Budget) -> None:
        self._items = inner if isinstance(inner, Sequence | Mapping) else list(_spending(inner, budget))
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _spending(self._items, self._budget)


def _spending(items: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        budget.spend()
        yield item


@pass_context
def _count_turns(context: jinja2.runtime.Context, iterable: Any) -> Any:
    if isinstance(iterable, jinja2.Undefined):
        return iterable
    budget = context.get(_TURNS)
    return _Counted(iterable, budget if isinstance(budget, _Budget) else _Budget(_LOOP_TURNS))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    ensure_ascii, sort_keys = bool(options.get("ensure_ascii")), bool(options.get("sort_keys"))
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_mapping(message: ChatMessage) -> dict[str, str]:
    found = {"role": message.role, "content": message.content}
    return found if message.name is None else {**found, "name": message.name}


def _reason(error: Exception) -> str:
    return str(error)[:300] if isinstance(error, jinja2.TemplateError) else type(error).__name__
