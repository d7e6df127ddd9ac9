from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.jetstream import StreamState
from pdbus.cache.logbook import Logbook, Place


def test_it_reads_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    book = Logbook(tmp_path / "log.json")
    assert book.read() is None
    for place in (Place("born", 3), Place("born", 4)):
        book.write(place)
        assert Logbook(tmp_path / "log.json").read() == place
    seqs = ('"x"', "Infinity", "1e999", "[" * 100_000)
    for text in ("", "{", "[]", '{"created": "born"}', *(f'{{"created": "born", "seq": {seq}}}' for seq in seqs)):
        (tmp_path / "log.json").write_text(text)
        assert book.read() is None


@pytest.mark.parametrize(
    ("place", "first", "last", "follows"),
    [
        (Place("born", 5), 1, 9, True),
        (Place("born", 5), 6, 9, True),
        (Place("born", 5), 7, 9, False),  # the sixth is lost
        (Place("born", 5), 6, 5, True),  # old entries went, none came
        (Place("born", 0), 0, 0, True),
        (Place("born", 5), 1, 4, False),  # an older copy of the log
        (Place("other", 5), 1, 9, False),
    ],
)
def test_a_log_that_lost_entries_or_is_another_one_is_known(place: Place, first: int, last: int, follows: bool) -> None:
    assert place.follows_from(StreamState("born", last, first)) == follows
