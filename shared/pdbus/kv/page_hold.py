"""The only way to own pages of a table (kv/pages.py), and to give them back exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from pdbus.kv.prefix import PageKey

if TYPE_CHECKING:
    from pdbus.kv.pages import PageTable


class PageHold:
    """Owns pages, in the order of a sequence's tokens, until `release`. Made by `PageTable.hold`.

    A context manager; releasing again does nothing, and a released hold takes no more pages (RuntimeError)."""

    def __init__(self, table: PageTable, tenant: str) -> None:
        self._table, self._tenant = table, tenant
        self._pages: list[int] = []
        self._released = False

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    @property
    def released(self) -> bool:
        return self._released

    def match(self, keys: Sequence[PageKey]) -> int:
        """Takes the longest findable run of pages from the first key on; returns how many. Only into an empty hold."""
        self._check_empty()
        return self._took(self._table._take_cached(keys))

    def match_lower(self, keys: Sequence[PageKey]) -> int:
        """As `match`, of pages that were published with these as `lower` keys: to copy from them."""
        self._check_empty()
        return self._took(self._table._take_lower(keys))

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` more pages, all or none. Their content is undefined. Raises Overloaded."""
        self._check_open()
        pages = self._table._take_new(count)
        self._took(pages)
        return tuple(pages)

    def release(self) -> None:
        if not self._released:
            self._released = True
            pages, self._pages = self._pages, []
            self._table._give_back(pages)
            self._table._count(self._tenant, -len(pages))

    def __enter__(self) -> PageHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _took(self, pages: list[int]) -> int:
        self._pages += pages
        self._table._count(self._tenant, len(pages))
        return len(pages)

    def _check_empty(self) -> None:
        self._check_open()
        if self._pages:
            raise RuntimeError("a prefix can only be matched before other pages are taken")

    def _check_open(self) -> None:
        if self._released:
            raise RuntimeError("this hold was released")
