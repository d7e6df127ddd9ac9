"""The page table: which pages of the pool are owned, cached or free. Integers only; the bytes are in kv/pool.py.

Every page is in exactly one of three states:

    owned   by one or more holds. Only its first owner writes into it, and only until it is published.
    cached  owned by nobody, still findable by its prefix key; kept in order of last use, reclaimed oldest first.
    free    holds nothing.

A published page is immutable: it may be shared by any number of holds and is never written again. A page can be
published only when it is full, and only under one key. Dropping a key makes its page unfindable at once; the bytes stay
valid for the holds that own it, and the page becomes free with the last of them.

One thread mutates a table (the engine's). A hold is the only way to own pages, and it gives each of them back exactly
once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from pdbus.errors import Overloaded
from pdbus.kv.changes import Changes
from pdbus.kv.page_hold import PageHold
from pdbus.kv.prefix import PageKey
from pdbus.messages.common import Digest


class PageTable:
    """Owns the numbers 0 to `total` - 1."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page table needs at least one page, not {total}")
        self.total = total
        self.changes = Changes()
        """Keys that became findable, or no longer are."""
        self._free = list(range(total - 1, -1, -1))
        self._owners = [0] * total
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[Digest, int] = {}
        self._lower_of: dict[int, tuple[Digest, ...]] = {}
        self._page_of_lower: dict[Digest, int] = {}
        """Findable pages by their keys up to some layers; of several the one that was published last."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages in state cached, least recently used first."""
        self._held: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Pages owned by holds."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones, and cached ones that nobody owns."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def hold(self, tenant: str = "") -> PageHold:
        """A new, empty owner. `tenant`: for whom; nobody, where it is the worker's own."""
        return PageHold(self, tenant)

    @property
    def held(self) -> Mapping[str, int]:
        """Pages by the tenant that holds some, for whatever: a shared one counts for each hold."""
        return self._held

    def matching(self, keys: Sequence[PageKey]) -> int:
        """How many pages from the first on are findable, without owning them. In another thread: a hint."""
        return next((at for at, key in enumerate(keys) if key not in self), len(keys))

    def matching_lower(self, keys: Sequence[PageKey]) -> int:
        """How many pages from the first on were published with these as `lower` keys."""
        for at, key in enumerate(keys):
            page = self._page_of_lower.get(key.digest)
            if page is None or self._key_of[page].tokens != key.tokens:
                return at
        return len(keys)

    def __contains__(self, key: PageKey) -> bool:
        page = self._page_of.get(key.digest)
        known = None if page is None else self._key_of.get(page)
        return known is not None and known.tokens == key.tokens

    @property
    def keys(self) -> list[Digest]:
        """Of all findable pages."""
        return list(self._page_of)

    def publish(self, page: int, key: PageKey, lower: Sequence[PageKey] = ()) -> bool:
        """Makes a full, owned page findable. False where the key already has a page: then this one stays private.

        `lower`: keys of what it is below some layers. By these `PageHold.match_lower` finds it.

        Raises ValueError where the page isn't owned, or is published under another key."""
        if self._owners[page] == 0:
            raise ValueError(f"page {page} is owned by nobody: its content may be anything")
        if page in self._key_of:
            if self._key_of[page] != key:
                raise ValueError(f"page {page} is published under another key")
            return True
        if key.digest in self._page_of:
            return False
        self._page_of[key.digest] = page
        self._key_of[page] = key
        if lower:
            self._lower_of[page] = tuple(one.digest for one in lower)
            self._page_of_lower |= dict.fromkeys(self._lower_of[page], page)
        self.changes.note(key.digest, True)
        return True

    def drop(self, keys: Iterable[Digest]) -> int:
        """Makes these pages unfindable; those that nobody owns become free. Returns how many were findable."""
        pages = [self._page_of[key] for key in set(keys) if key in self._page_of]
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
        return len(pages)

    def drop_root(self, kv_root: Digest) -> int:
        """`drop` for all pages made from this KV-relevant root."""
        return self.drop([key.digest for key in self._key_of.values() if key.kv_root == kv_root])

    def check(self, holds: Iterable[PageHold]) -> None:
        """Raises AssertionError unless the table and all its living holds agree. For tests, and when idle."""
        owners = [0] * self.total
        for hold in holds:
            for page in hold.pages:
                owners[page] += 1
        assert owners == self._owners, "reference counts differ from the holds"
        owned = {page for page, count in enumerate(owners) if count}
        states = (owned, set(self._cached), set(self._free))
        assert len(self._free) == len(states[2]), "a page is free twice"
        assert sum(map(len, states)) == self.total == len(set().union(*states)), "a page has no state, or two"
        assert {key.digest: page for page, key in self._key_of.items()} == self._page_of, "keys and pages differ"
        assert states[1] <= self._key_of.keys(), "a cached page can't be found"
        assert not states[2] & self._key_of.keys(), "a free page can be found"
        lower = set(self._page_of_lower.values())
        assert lower <= self._lower_of.keys() <= self._key_of.keys(), "what can't be found has lower keys"

    def _take_new(self, count: int) -> list[int]:
        if not self.can_allocate(count):
            raise Overloaded(f"{count} KV pages are wanted and {self.available} of {self.total} are available")
        # In the order of memory: those that lie in one run there are read and written as one.
        pages = sorted(self._free.pop() if self._free else self._reclaim() for _ in range(count))
        for page in pages:
            self._owners[page] = 1
        return pages

    def _take_cached(self, keys: Sequence[PageKey]) -> list[int]:
        return self._taken([self._page_of[key.digest] for key in keys[: self.matching(keys)]])

    def _take_lower(self, keys: Sequence[PageKey]) -> list[int]:
        return self._taken([self._page_of_lower[key.digest] for key in keys[: self.matching_lower(keys)]])

    def _taken(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._owners[page] += 1
            self._cached.pop(page, None)
        return pages

    def _give_back(self, pages: Sequence[int]) -> None:
        # Deepest first: a prefix outlives its continuations, which are of no use without it.
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _count(self, tenant: str, pages: int) -> None:
        if tenant:
            self._held[tenant] += pages
            if not self._held[tenant]:
                del self._held[tenant]

    def _reclaim(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page).digest
        del self._page_of[key]
        for lower in self._lower_of.pop(page, ()):
            if self._page_of_lower.get(lower) == page:
                del self._page_of_lower[lower]
        self.changes.note(key, False)
