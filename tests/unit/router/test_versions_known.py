"""Which version a name means, and that what refs name is loaded, again where it failed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from loadtest.simulated_version import COMPUTE_CLASS, PAGE_FORMAT, SimulatedVersions, meta_files, scope, version
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from pdbus.kv.prefix import page_keys
from pdbus.messages.common import Digest
from pdbus.router.models import Models
from pdbus.router.placement import Kind
from pdbus.router.version import build_version
from pdbus.weights.manifest import Manifest
from tests.support.router_rig import until

ROOTS = [version(number).root for number in range(2)]
SALT = b"s"
KIND = Kind(PAGE_FORMAT, COMPUTE_CLASS)


class Flaky(SimulatedVersions):
    """Its blocks can't be had at first."""

    failures = 0

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        if self.failures:
            self.failures -= 1
            raise Unavailable("nobody serves the blocks")
        return await super().manifest(root, ctx)


@pytest.fixture
def versions() -> Flaky:
    return Flaky(version(0), version(1))


@pytest.fixture
async def models(versions: Flaky) -> AsyncIterator[Models]:
    with ThreadPoolExecutor(1) as executor:
        async with Models("toy", versions, versions, executor) as made:
            yield made


async def test_names(models: Models, versions: Flaky):
    assert models.resolve(None) == models.resolve("stable") == ROOTS[0]
    assert models.resolve(ROOTS[1].hex()) == models.resolve("root-" + ROOTS[1].hex()[:8]) == ROOTS[1]
    for name in ("nothing", "", "*", "zz" * 20, "ab" * 32):
        with pytest.raises(NotFound):
            models.resolve(name)
    with pytest.raises(NotFound):
        models.check_name("another")


async def test_a_name_is_refused_once_the_log_was_read_to_its_end(
    models: Models, versions: Flaky, monkeypatch: pytest.MonkeyPatch
):
    """A job whose ref was just made elsewhere must not fail for good because NATS is away for a moment."""
    with pytest.raises(NotFound):
        await models.check_ref("new", Deadline.after(30))

    async def away(deadline: Deadline) -> None:
        raise DeadlineExceeded("no answer")

    async def read(deadline: Deadline) -> None:
        versions.move("new", ROOTS[1])

    monkeypatch.setattr(versions, "caught_up", away)
    with pytest.raises(Unavailable):
        await models.check_ref("new", Deadline.after(30))
    await models.check_ref("stable", Deadline.after(30))
    monkeypatch.setattr(versions, "caught_up", read)
    await models.check_ref("new", Deadline.after(30))


async def test_what_a_ref_names_is_loaded_before_it_is_asked_for(models: Models, versions: Flaky):
    await until(lambda: ROOTS[0] in models.loaded)
    assert ROOTS[1] not in models.loaded
    versions.move("canary", ROOTS[1])
    await until(lambda: ROOTS[1] in models.loaded)


async def test_a_commit_of_weights_costs_no_vocabulary(models: Models):
    first, second = [await models.get(root, Deadline.after(30)) for root in ROOTS]
    assert (first.root, second.root) == tuple(ROOTS)
    assert second.tokenizer is first.tokenizer
    keys = [one.prefix_keys(range(40), KIND, SALT).cut(0) for one in (first, second)]
    assert keys[0] != keys[1]


async def test_a_load_that_failed_is_tried_again(versions: Flaky, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdbus.router.models._AGAIN_S", 0.05)
    versions.failures = 3
    with ThreadPoolExecutor(1) as executor:
        async with Models("toy", versions, versions, executor) as models:
            await until(lambda: ROOTS[0] in models.loaded)


async def test_a_request_tells_why_its_version_can_not_be_loaded(models: Models, versions: Flaky):
    await until(lambda: ROOTS[0] in models.loaded)
    versions.failures = 1
    with pytest.raises(Unavailable):
        await models.get(ROOTS[1], Deadline.after(30))
    assert (await models.get(ROOTS[1], Deadline.after(30))).root == ROOTS[1]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"\xff"])
def test_files_that_can_not_be_used_are_refused(file: str, content: bytes | None):
    meta = meta_files()
    del meta[file]
    if content is not None:
        meta[file] = content
    if (file, content) == ("tokenizer_config.json", b"{}"):
        build_version(ROOTS[0], meta, {})
        return
    with pytest.raises(InvalidRequest):
        build_version(ROOTS[0], meta, {})


def test_versions_with_the_same_tokenizer_file_share_one():
    """The library frees a used one's cache only with the threads that it was used in: else each commit that changes a
    template or a stop token would cost its megabytes."""
    meta = meta_files()
    first = build_version(ROOTS[0], meta, {})
    other = {"tokenizer_config.json": b'{"eos_token": "x"}', "chat_template.jinja": b"{{ messages }}"}
    second = build_version(ROOTS[1], meta | other, {}, [first])
    assert second.tokenizer.bytes is first.tokenizer.bytes
    assert second.tokenizer.special_texts["eos_token"] == "x" != first.tokenizer.special_texts["eos_token"]
    tokenizer = json.loads(meta["tokenizer.json"])
    changed = meta | {"tokenizer.json": json.dumps(tokenizer, indent=1).encode()}
    assert build_version(ROOTS[1], changed, {}, [first]).tokenizer.bytes is not first.tokenizer.bytes


@pytest.mark.parametrize("template", [None, b"{% for %}", b"{{ x | nothing }}", b"\xff{%"])
def test_without_a_usable_template_there_are_still_completions(template: bytes | None):
    meta = meta_files()
    del meta["chat_template.jinja"]
    if template is not None:
        meta["chat_template.jinja"] = template
    assert isinstance(build_version(ROOTS[0], meta, {}).template, InvalidRequest)


async def test_keys_are_those_of_the_workers(models: Models):
    """LESSONS, first table, 20: byte for byte, or nothing would ever be found."""
    tokens = list(range(53))
    for root, manifest in ((root, version(number)) for number, root in enumerate(ROOTS)):
        worker = page_keys(tokens, replace(scope(manifest), salt=SALT))
        keys = (await models.get(root, Deadline.after(30))).prefix_keys(tokens, KIND, SALT)
        assert [keys.cut(page) for page in range(len(keys))] == [key.digest[:8] for key in worker]
        assert len(keys) == 3


async def test_the_page_with_the_last_token_is_computed_in_any_case(models: Models):
    one = await models.get(ROOTS[0], Deadline.after(30))
    assert [len(one.prefix_keys(range(n), KIND, SALT)) for n in (1, 16, 17, 32, 33)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("kind", [KIND, Kind("kv9-of-tomorrow", "c")])
async def test_equal_beginnings_meet(models: Models, kind: Kind):
    """Also on another version, whose lower layers may be the same; those of another tenant do not."""
    one, two = [await models.get(root, Deadline.after(30)) for root in ROOTS]
    tokens = list(range(40))
    key = one.prefix_keys(tokens, kind, SALT).beginning
    assert one.prefix_keys([*tokens[:16], 99], kind, SALT).beginning == key
    assert one.prefix_keys([99, *tokens], kind, SALT).beginning != key
    assert one.prefix_keys(tokens, kind, b"other").beginning != key
    assert one.prefix_keys(tokens[:5], kind, SALT).beginning != one.prefix_keys(tokens[:6], kind, SALT).beginning
    assert two.prefix_keys(tokens, kind, SALT).beginning == key
    if kind == KIND:
        assert two.prefix_keys(tokens, kind, SALT).cut(0) != one.prefix_keys(tokens, kind, SALT).cut(0)
