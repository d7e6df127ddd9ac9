"""A canary of an encoder takes sessions, and never some of the vectors that a caller compares with others."""

from __future__ import annotations

import aiohttp
import pytest

from pdbus.client import Client
from tests.support.encoder_rig import MODEL, EncoderRig, ask

SESSIONS = [f"session {number}" for number in range(16)]


async def served(http: aiohttp.ClientSession, session: str, text: str, **body: str) -> bytes:
    status, answer, _ = await ask(http, {"X-Session-Id": session} if session else None, input=text, **body)
    assert status == 200
    return bytes.fromhex(answer["system_fingerprint"].removeprefix("root-"))


async def test_a_session_stays_on_its_version_however_it_is_named(http: aiohttp.ClientSession, r: EncoderRig):
    stable, canary = r.source.root_of["a"], r.source.root_of["b"]
    r.versions.move("canary", canary, share=0.5)
    client = Client(r.bus, MODEL, timeout_s=20)
    roots = [await served(http, session, "a fox") for session in SESSIONS]
    assert set(roots) == {stable, canary}
    assert [await served(http, session, "a red apple") for session in SESSIONS] == roots
    assert [await served(http, "", "a fox", user=session) for session in SESSIONS] == roots
    assert [(await client.embed(["a pear"], session=session)).root for session in SESSIONS] == roots


async def test_who_names_no_session_has_all_vectors_of_one_version(http: aiohttp.ClientSession, r: EncoderRig):
    r.versions.move("canary", r.source.root_of["b"], share=1.0)
    assert await served(http, SESSIONS[0], "a fox") == r.source.root_of["b"]
    for text in ("a fox", "a red apple", "numbers 1 2 3"):
        assert await served(http, "", text) == r.source.root_of["a"]
    assert (await Client(r.bus, MODEL, timeout_s=20).embed(["a fox"])).root == r.source.root_of["a"]


@pytest.mark.parametrize("name", ["stable", "root"])
async def test_a_version_that_is_named_is_served_to_every_session(
    http: aiohttp.ClientSession, r: EncoderRig, name: str
):
    stable = r.source.root_of["a"]
    r.versions.move("canary", r.source.root_of["b"], share=1.0)
    model = f"{MODEL}@{stable.hex() if name == 'root' else name}"
    assert await served(http, SESSIONS[0], "a fox", model=model) == stable
