"""What a new stack tells its user to type."""

from __future__ import annotations

import json
import shlex

import pytest

from pdbus.stack.up import example_call


@pytest.mark.parametrize("embeds", [False, True])
def test_the_example_is_a_request_that_a_shell_takes_apart_as_meant(embeds: bool) -> None:
    words = shlex.split(example_call("http://127.0.0.1:8000", "it's", embeds=embeds, asks_keys=False))
    assert words[:2] == ["curl", f"http://127.0.0.1:8000/v1/{'embeddings' if embeds else 'chat/completions'}"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert not any("authorization" in word for word in words)


def test_where_keys_are_asked_for_it_shows_where_one_goes() -> None:
    words = shlex.split(example_call("http://127.0.0.1:8000", "m", embeds=False, asks_keys=True))
    assert "authorization: Bearer $PDBUS_API_KEY" in words
