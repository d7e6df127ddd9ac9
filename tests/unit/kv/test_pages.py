from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from pdbus.errors import Overloaded
from pdbus.kv.page_hold import PageHold
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import PageKey

ROOTS = (b"root a", b"root b")


def chain(root: bytes, branch: int, length: int) -> tuple[PageKey, ...]:
    """Keys of a prompt; branches of a root share their first two pages."""
    names = [0 if depth < 2 else branch for depth in range(length)]
    return tuple(
        PageKey(root + bytes((depth, *names[: depth + 1])), (depth, names[depth]), root) for depth in range(length)
    )


def lower(key: PageKey) -> PageKey:
    """Of what the page is below some layer, which all roots have in common."""
    return PageKey(b"lower" + key.digest[len(key.kv_root) :], key.tokens, b"lower")


def filled(table: PageTable, keys: tuple[PageKey, ...]) -> PageHold:
    """A hold that computed and published all pages of `keys`."""
    hold = table.hold()
    for page, key in zip(hold.allocate(len(keys)), keys, strict=True):
        table.publish(page, key)
    return hold


class Sequences(RuleBasedStateMachine):
    """Random sequences that match, grow, publish and end, while roots are dropped: nothing is ever owned twice over,
    lost, or found under a key that it was not published under."""

    holds = Bundle("holds")

    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.table = PageTable(total)
        self.living: list[tuple[PageHold, tuple[PageKey, ...]]] = []
        self.content: dict[int, PageKey | None] = {}
        """What was last written to each page, as the pool would hold it."""

    @rule(target=holds, root=st.sampled_from(ROOTS), branch=st.integers(0, 2), length=st.integers(0, 6))
    def begin(self, root: bytes, branch: int, length: int) -> tuple[PageHold, tuple[PageKey, ...]]:
        keys, hold = chain(root, branch, length), self.table.hold()
        findable = self.table.matching(keys)
        assert hold.match(keys) == findable
        for page, key in zip(hold.pages, keys, strict=False):
            assert self.content[page] == key, "a matched page holds what its key says"
        self.living.append((hold, keys))
        return hold, keys

    @rule(sequence=holds, count=st.integers(0, 5))
    def grow(self, sequence: tuple[PageHold, tuple[PageKey, ...]], count: int) -> None:
        hold, _ = sequence
        others = {page for other, _ in self.living for page in other.pages}
        before, fits = hold.pages, self.table.can_allocate(count)
        if not fits:
            with pytest.raises(Overloaded):
                hold.allocate(count)
            assert hold.pages == before, "all or none"
            return
        new = hold.allocate(count)
        assert hold.pages == before + new
        assert not others & set(new), "a new page belongs to nobody else"
        for page in new:
            self.content[page] = None

    @rule(sequence=holds)
    def fill(self, sequence: tuple[PageHold, tuple[PageKey, ...]]) -> None:
        hold, keys = sequence
        for page, key in zip(hold.pages, keys, strict=False):
            if self.content[page] is None:
                self.content[page] = key
            elif self.content[page] != key:
                return
            published = self.table.publish(page, key, [lower(key)])
            assert key in self.table
            assert published or self.table.matching([key]) == 1

    @rule(root=st.sampled_from(ROOTS), branch=st.integers(0, 2), length=st.integers(0, 6))
    def copy_lower(self, root: bytes, branch: int, length: int) -> None:
        keys = [lower(key) for key in chain(root, branch, length)]
        findable = self.table.matching_lower(keys)
        with self.table.hold() as sources:
            assert sources.match_lower(keys) == findable
            found = [self.content[page] for page in sources.pages]
            assert [key and lower(key) for key in found] == keys[:findable], "the same below the layer"
            self.table.check([sources, *(hold for hold, _ in self.living)])

    @rule(sequence=consumes(holds))
    def end(self, sequence: tuple[PageHold, tuple[PageKey, ...]]) -> None:
        hold, _ = sequence
        hold.release()
        hold.release()
        assert hold.pages == ()
        self.living = [entry for entry in self.living if entry[0] is not hold]

    @rule(root=st.sampled_from(ROOTS))
    def drop_root(self, root: bytes) -> None:
        self.table.drop_root(root)
        assert self.table.matching(chain(root, 0, 1)) == 0

    @rule(key=st.builds(chain, st.sampled_from(ROOTS), st.integers(0, 2), st.just(4)))
    def drop_one(self, key: tuple[PageKey, ...]) -> None:
        self.table.drop([key[-1].digest])
        assert key[-1] not in self.table

    @precondition(lambda self: hasattr(self, "table"))
    @invariant()
    def sound(self) -> None:
        self.table.check(hold for hold, _ in self.living)
        owned = {page for hold, _ in self.living for page in hold.pages}
        assert self.table.used == len(owned)
        assert self.table.used + self.table.available == self.table.total

    def teardown(self) -> None:
        for hold, _ in getattr(self, "living", []):
            hold.release()
        if hasattr(self, "table"):
            assert self.table.used == 0, "everything returns to its idle level"
            self.table.check(())


Sequences.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSequences = Sequences.TestCase


def test_a_prefix_is_shared_and_not_computed_again() -> None:
    table, keys = PageTable(8), chain(b"r", 1, 4)
    first = filled(table, keys)
    second = table.hold()
    assert second.match(chain(b"r", 2, 4)) == 2
    assert second.pages == first.pages[:2]
    assert table.used == 4


def test_pages_stay_findable_after_release_until_they_are_needed() -> None:
    table, keys = PageTable(4), chain(b"r", 1, 4)
    filled(table, keys).release()
    assert (table.used, table.available, table.cached, table.matching(keys)) == (0, 4, 4, 4)
    with table.hold() as hold:
        hold.allocate(1)
        assert table.matching(keys) == 3, "the deepest page goes first: its prefix is of use without it"
    assert table.matching(keys) == 3


def test_the_least_recently_used_goes_first() -> None:
    table = PageTable(4)
    old, new = chain(b"a", 0, 2), chain(b"b", 0, 2)
    filled(table, old).release()
    filled(table, new).release()
    with table.hold() as again:
        again.match(old)
    with table.hold() as hold:
        hold.allocate(2)
        assert (table.matching(old), table.matching(new)) == (2, 0)


def test_a_hit_is_compared_with_its_tokens() -> None:
    table, (key,) = PageTable(1), chain(b"r", 0, 1)
    filled(table, (key,))
    forged = PageKey(key.digest, (9, 9), key.kv_root)
    assert forged not in table
    assert table.hold().match([forged]) == 0


def test_what_a_page_is_below_a_layer_is_found_under_any_root_as_long_as_the_page_is() -> None:
    table = PageTable(3)
    (old,), (new,) = chain(b"root a", 0, 1), chain(b"root b", 0, 1)
    with table.hold() as first, table.hold() as second:
        for hold, key in ((first, old), (second, new)):
            table.publish(hold.allocate(1)[0], key, [lower(key)])
        kept = second.pages
    for dropped, pages in ((old, kept), (new, ())):
        table.drop([dropped.digest])
        with table.hold() as sources:
            sources.match_lower([lower(new)])
            assert sources.pages == pages
        table.check(())
    other = PageKey(lower(old).digest, (9, 9), b"lower")
    with table.hold() as first:
        table.publish(first.allocate(1)[0], old, [lower(old)])
        assert (table.matching_lower([lower(old)]), table.matching_lower([other])) == (1, 0)


def test_two_that_computed_the_same_page_keep_one_findable() -> None:
    table, (key,) = PageTable(2), chain(b"r", 0, 1)
    first, second = filled(table, (key,)), table.hold()
    (page,) = second.allocate(1)
    assert not table.publish(page, key)
    second.release()
    assert table.available == 1
    first.release()
    assert (table.available, table.cached) == (2, 1)


def test_dropped_pages_stay_with_their_owners_and_are_found_by_nobody() -> None:
    table, keys = PageTable(4), chain(b"r", 0, 2)
    hold = filled(table, keys)
    assert table.drop_root(b"r") == 2
    assert table.matching(keys) == 0
    assert table.used == 2
    hold.release()
    assert (table.used, table.cached) == (0, 0)


def test_only_what_is_owned_can_be_published_and_only_once() -> None:
    table, (key, other) = PageTable(2), chain(b"r", 0, 2)
    with pytest.raises(ValueError, match="owned by nobody"):
        table.publish(0, key)
    hold = table.hold()
    (page,) = hold.allocate(1)
    assert table.publish(page, key)
    assert table.publish(page, key)
    with pytest.raises(ValueError, match="another key"):
        table.publish(page, other)


def test_a_released_hold_takes_nothing_more() -> None:
    table = PageTable(2)
    hold = table.hold()
    hold.release()
    with pytest.raises(RuntimeError, match="released"):
        hold.allocate(1)
    with pytest.raises(RuntimeError, match="released"):
        hold.match(())


def test_an_error_inside_the_hold_releases_it() -> None:
    table = PageTable(2)
    hold = table.hold()
    hold.allocate(2)
    with pytest.raises(Overloaded), hold:
        hold.allocate(1)
    assert table.available == 2


def test_a_prefix_is_matched_before_anything_else_is_taken() -> None:
    hold = PageTable(2).hold()
    hold.allocate(1)
    with pytest.raises(RuntimeError, match="before other pages"):
        hold.match(())
