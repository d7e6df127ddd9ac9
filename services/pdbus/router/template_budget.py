"""What the rendering of a chat template may still do: turns, paid by what is made and by what is looked through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

CHARS_PER_TURN = 64
_ITEMS_PER_TURN = 8
_MOST_BITS = 4096


class TooMuchWork(SecurityError):
    """The template does more than an input of this size can need."""


class Budget:
    """Turns that a rendering has left. `most_chars`: of any text."""

    def __init__(self, turns: int, most_chars: int) -> None:
        self._left = turns
        self._most_chars = most_chars

    def spend(self, turns: int = 1) -> None:
        self._left -= turns
        if self._left < 0:
            raise TooMuchWork("it does more than an input of this size can need")

    def pay(self, value: Any) -> Any:
        """For a value that was just made: one turn, or as many as it would have parts and characters written out."""
        match value:
            case str() | bytes():
                if len(value) > self._most_chars:
                    raise TooMuchWork("its texts are too long")
                self.spend(1 + len(value) // CHARS_PER_TURN)
            case range():
                self.spend(1 + len(value))
            case Mapping():
                self.spend()
                for key, item in value.items():
                    self._pay_part(key)
                    self._pay_part(item)
            case list() | tuple() | set():
                self.spend()
                for item in value:
                    self._pay_part(item)
            case int() if value.bit_length() > _MOST_BITS:
                raise TooMuchWork("its numbers are too large")
            case _:
                self.spend()
        return value

    def scan(self, value: Any) -> Any:
        """For looking through a value, not into its parts."""
        match value:
            case str() | bytes():
                self.spend(1 + len(value) // CHARS_PER_TURN)
            case list() | tuple() | set() | range() | Mapping():
                self.spend(1 + len(value) // _ITEMS_PER_TURN)
            case _:
                self.spend()
        return value

    def _pay_part(self, value: Any) -> None:
        if isinstance(value, Namespace):  # the one thing that could grow after it was paid
            raise TooMuchWork("it puts a namespace into a list")
        self.pay(value)
