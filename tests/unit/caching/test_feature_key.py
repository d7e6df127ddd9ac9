"""What keys of features hold: everything that an embedding's numbers depend on, and its tenant."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching.feature_key import embedding_key, feature_name, named_key, source_root
from pdbus.canonical import content_digest, salted_digest

EMBEDDING: dict[str, Any] = {
    "tenant": "t",
    "salt": b"s" * 32,
    "root": b"\x01" * 32,
    "compute_class": "c",
    "ids": (1, 2, 300),
}
NAMED: dict[str, Any] = {"model": "m", "subject": "a.b", "item": "item"}

fields = st.fixed_dictionaries(
    {
        "tenant": st.text(max_size=4),
        "salt": st.binary(max_size=4),
        "root": st.binary(max_size=4),
        "compute_class": st.text(max_size=4),
        "ids": st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    }
)


@given(fields, fields)
def test_no_two_different_texts_share_a_key(one: dict[str, Any], other: dict[str, Any]):
    assert (embedding_key(**one) == embedding_key(**other)) == (one == other)


def test_every_field_joins_the_key():
    others = {"tenant": "u", "salt": b"t" * 32, "root": b"\x02" * 32, "compute_class": "d", "ids": (1, 2, 301)}
    keys = {embedding_key(**EMBEDDING).key} | {
        embedding_key(**EMBEDDING | {name: value}).key for name, value in others.items()
    }
    assert len(keys) == 6
    named = {named_key(**NAMED).key} | {named_key(**NAMED | {name: "x"}).key for name in NAMED}
    assert len(named) == 4
    assert not keys & named


def test_a_key_is_the_digest_of_what_is_stored_with_the_entry():
    named, embedded = named_key(**NAMED), embedding_key(**EMBEDDING)
    assert named.key == content_digest(named.material)
    assert embedded.key == salted_digest(EMBEDDING["salt"], embedded.material)
    assert EMBEDDING["salt"] not in embedded.material


def test_keys_are_the_same_in_every_process():
    assert embedding_key(**EMBEDDING).key.hex() == "437d9663033b8763ef334b0d3968007a7c13ddb254b593327748fcfa2b4a9d4b"
    assert named_key(**NAMED).key.hex() == "af58316a425d41d0b8018bf2c14b3b6eecf8845ddcf871a3ea87feabaf81298e"


def test_only_features_of_a_service_have_names_and_a_name_is_its_item_s_whatever_the_subject():
    assert embedding_key(**EMBEDDING).name == ""
    assert named_key(**NAMED).name == named_key(**NAMED | {"subject": "c"}).name == feature_name("m", "item")
    names = [feature_name(model, item) for model, item in itertools.product(("m", "n"), ("item", "other"))]
    assert len(set(names)) == 4
    assert feature_name("ab", "c") != feature_name("a", "bc")
    assert all(len(name) <= 256 for name in names), "cache nodes take no longer ones"


def test_a_service_stands_for_a_root_of_its_own():
    assert len({source_root("m", "a"), source_root("m", "b"), source_root("n", "a")}) == 3
    assert len(source_root("m", "a")) == 32
