from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.kv.format import PageFormat
from pdbus.kv.prefix import LayerGroup, PrefixScope, child_key, page_keys

SCOPE = PrefixScope(
    kv_root=bytes(range(32)),
    group=LayerGroup(0, 29),
    settings={"rope_theta": 100000.0, "sliding_window": None},
    compute_class="cpu-x",
    page_format=PageFormat(30, 3, 64),
    salt=b"anonymous",
)
GOLDEN = (
    "81d10729095c6fccd92e16304ca8c5404bc616e6cd71731db76eeabf6e80e52d",
    "e61f5338e8037a70ab1b07a53c06167bf0a7a3efe8b314c634db6ee397d5f13e",
    "25ff3ccc16a97ededb7003fe06009b41e14949688f4227c0a51b408f659094d2",
)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_golden_vectors() -> None:
    """Fixed for ever: a change here makes every cache and every worker of another version miss."""
    keys = page_keys(range(40), SCOPE)
    assert (SCOPE.digest().hex(), *(key.digest.hex() for key in keys)) == GOLDEN


def test_golden_vectors_in_a_process_of_its_own() -> None:
    code = (
        "from pdbus.kv.format import PageFormat; from pdbus.kv.prefix import *;"
        "print(page_keys(range(16), PrefixScope(bytes(range(32)), LayerGroup(0, 29), "
        "{'sliding_window': None, 'rope_theta': 100000.0}, 'cpu-x', PageFormat(30, 3, 64), b'anonymous'"
        "))[0].digest.hex())"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        == (GOLDEN[1])
    )


@given(token_ids)
def test_only_full_pages_have_keys(tokens: list[int]) -> None:
    keys = page_keys(tokens, SCOPE)
    assert len(keys) == len(tokens) // 16
    assert [token for key in keys for token in key.tokens] == tokens[: len(keys) * 16]


@given(token_ids, token_ids)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(left: list[int], right: list[int]) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    pairs = list(zip(page_keys(left, SCOPE), page_keys(right, SCOPE), strict=False))
    assert [a.digest == b.digest for a, b in pairs] == [16 * (page + 1) <= common for page in range(len(pairs))]


@given(st.lists(st.integers(0, 1), min_size=48, max_size=48), st.integers(0, 47))
def test_one_token_changes_its_page_and_all_after_it(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], 1 - tokens[at], *tokens[at + 1 :]]
    same = [a.digest == b.digest for a, b in zip(page_keys(tokens, SCOPE), page_keys(changed, SCOPE), strict=True)]
    assert same == [page < at // 16 for page in range(3)]


@pytest.mark.parametrize(
    "change",
    [
        {"kv_root": bytes(32)},
        {"group": LayerGroup(0, 28)},
        {"group": LayerGroup(1, 29)},
        {"settings": {"rope_theta": 10000.0, "sliding_window": None}},
        {"settings": {"rope_theta": 100000.0, "sliding_window": 4096}},
        {"settings": {"rope_theta": 100000.0}},
        {"compute_class": "cuda-x"},
        {"page_format": PageFormat(30, 3, 32)},
        {"salt": b"another tenant"},
        {"salt": b""},
    ],
    ids=str,
)
def test_every_part_of_the_scope_changes_every_key(change: dict[str, object]) -> None:
    other = page_keys(range(32), dataclasses.replace(SCOPE, **change))  # type: ignore[arg-type]
    assert all(a.digest != b.digest for a, b in zip(page_keys(range(32), SCOPE), other, strict=True))


def test_fields_do_not_run_into_each_other() -> None:
    left = dataclasses.replace(SCOPE, compute_class="ab", salt=b"c")
    right = dataclasses.replace(SCOPE, compute_class="a", salt=b"bc")
    assert left.digest() != right.digest()


def test_a_growing_sequence_keys_its_next_page_alone() -> None:
    first, second = page_keys(range(32), SCOPE)
    assert child_key(SCOPE.digest(), range(16)) == first.digest
    assert child_key(first.digest, range(16, 32)) == second.digest


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_impossible_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token id"):
        page_keys([token] * 16, SCOPE)
