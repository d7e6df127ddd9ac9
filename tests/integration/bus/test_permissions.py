"""The users that `pdbus keys nats` makes, on a real server: what each kind needs it can do, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdbus.bus.bus import Bus, connect
from pdbus.bus.codec import encode
from pdbus.bus.nats import NatsTransport
from pdbus.context import RequestContext
from pdbus.errors import Forbidden, InvalidRequest, NotFound, Unauthorized, Unavailable
from pdbus.grants import GRANTS, SOURCE
from pdbus.messages.changelog import Abort, LogEntry
from pdbus.messages.invalidator import DueDelete
from pdbus.messages.jobs import FileEntry, JobEntry, JobSpec, JobWork
from pdbus.messages.param_server import Stage
from pdbus.messages.router import EmbedReply, EmbedRequest, InferReply, InferRequest
from pdbus.messages.workers import Invalidated
from pdbus.nats_access import NatsAccess
from pdbus.stack.nats_accounts import seed_path, write_accounts
from pdbus.subjects import (
    ANY,
    CHANGELOG,
    DELETES,
    EMBED,
    FILES,
    INFER,
    INVALIDATED,
    JOBS,
    PRESENCE,
    RESULTS,
    WEIGHTS_STAGE,
)
from tests.support.cards import card
from tests.support.secure import SecureNats, secure_nats
from tests.support.signs_of_life import two_replies
from tests.support.until import until

ABORT = LogEntry(abort=Abort("tx", "somebody"))
KINDS = [kind for kind in GRANTS if kind != SOURCE]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureNats]:
    async with secure_nats(tmp_path_factory.mktemp("secure"), ["shop", "crm"]) as made:
        async with made.bus("operator") as bus:
            await bus.logs.ensure()
        yield made


async def js_api(bus: Bus, verb: str) -> None:
    assert isinstance(bus.transport, NatsTransport)
    await bus.transport.client.request(f"$JS.API.{verb}", b"{}", timeout=30)


def ctx() -> RequestContext:
    return RequestContext.after(30)


# ruff: noqa: SIM117 - connections, and below them what is done

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_nobody_without_a_key_comes_in(server: SecureNats, tmp_path: Path) -> None:
    write_accounts(tmp_path)  # of another installation
    for access in (NatsAccess(), NatsAccess(seed=seed_path(tmp_path, "operator"))):
        with pytest.raises(Unauthorized):
            async with connect(server.url, name="stranger", access=access, wait_s=30):
                pass


async def test_a_file_that_is_no_key_is_told_at_once_and_never_shown(server: SecureNats, tmp_path: Path) -> None:
    seed = tmp_path / "key"
    seed.write_text("SUASECRETSECRET")
    for path in (seed, tmp_path / "none"):
        with pytest.raises(InvalidRequest) as told:
            async with connect(server.url, name="x", access=NatsAccess(seed=path)):
                pass
        assert "SECRET" not in str(told.value)


async def test_a_caller_is_answered_in_its_own_inbox(server: SecureNats) -> None:
    async def infer(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        for number in range(5):
            yield InferReply({"n": number})

    async def embed(message: EmbedRequest, ctx: RequestContext) -> EmbedReply:
        return EmbedReply(b"r" * 32, 1, b"1234", 1, 0)

    async with server.bus("router") as router, server.bus("client-shop") as client:
        async with (
            await router.serve(INFER(model="m"), infer),
            await router.serve(EMBED(model="m"), embed),
            client.stream(INFER(model="m"), InferRequest("completions", {}), ctx()) as replies,
        ):
            assert [reply.data["n"] async for reply in replies] == list(range(5))
            assert (await client.call(EMBED(model="m"), EmbedRequest(("x",)), ctx())).dimensions == 1


async def test_a_caller_that_leaves_is_noticed(server: SecureNats, caplog: pytest.LogCaptureFixture) -> None:
    """It may answer the frames that it gets with "nobody reads this", and only those."""
    ended = asyncio.Event()

    async def endless(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        try:
            while True:
                yield InferReply({})
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    async with server.bus("router") as router, server.bus("client") as client:
        async with await router.serve(INFER(model="m"), endless):
            async with client.stream(INFER(model="m"), InferRequest("completions", {}), ctx()) as replies:
                await anext(aiter(replies))
            async with asyncio.timeout(30):
                await ended.wait()
    assert "NATS refused" not in caplog.text


async def test_a_caller_may_ask_for_a_sign_of_life(server: SecureNats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server.bus("router") as router, server.bus("client") as client:
        async with (
            await router.serve(INFER(model="m"), two_replies(monkeypatch)),
            client.stream(INFER(model="m"), InferRequest("completions", {}), ctx()) as replies,
        ):
            assert [reply.data["n"] async for reply in replies] == [0, 1]


@pytest.mark.parametrize("subject", [
    "pd.v1.tokens.*", "pd.v1.tokens.>", "pd.v1.>", ">", "_INBOX.>", "_INBOX.*.>", "pd.v1.infer.*", "pd.v1.presence.*.*",
    "pd.v1.changelog.*", "pd.v1.bulk.*.*", "pd.v1.kv.*.*.*", "$JS.>", "$SRV.PING", "$SYS.>",
])  # fmt: skip
async def test_a_caller_can_listen_to_nothing_but_its_answers(server: SecureNats, subject: str) -> None:
    async with server.bus("client") as client:
        with pytest.raises(Forbidden):
            await client.transport.subscribe(subject, lambda raw: None)


async def test_no_kind_reads_the_inbox_of_another(server: SecureNats) -> None:
    users = [*KINDS, "client-shop", "client-crm"]
    inboxes = {user: server.access(user).inbox() for user in users}
    assert len(set(inboxes.values())) == len(users)
    for user in users:
        async with server.bus(user) as bus:
            for whose, inbox in inboxes.items():
                if whose == user:
                    continue
                with pytest.raises(Forbidden):
                    await bus.transport.subscribe(f"{inbox}.>", lambda raw: None)


async def test_only_who_must_can_commit_or_stage(server: SecureNats) -> None:
    for kind in KINDS:
        async with server.bus(kind) as bus:
            may = kind in ("param_server", "operator")
            try:
                await bus.logs.append(CHANGELOG(model=f"of-{kind}"), ABORT)
                assert may, kind
            except Forbidden:
                assert not may, kind
            stage = Stage("tx", (), 0)
            with pytest.raises(Unavailable if may else Forbidden):  # nobody serves it here
                await bus.call(WEIGHTS_STAGE(model="m", server="p"), stage, ctx())


async def test_only_the_invalidator_and_operators_delete(server: SecureNats) -> None:
    entry = Invalidated("m", "delete_name", name="x")
    for kind in KINDS:
        async with server.bus(kind) as bus:
            if kind in ("invalidator", "operator"):
                await bus.logs.append(INVALIDATED(), entry)
            else:
                with pytest.raises(Forbidden):
                    await bus.logs.append(INVALIDATED(), entry)


async def test_a_caller_reads_no_log_and_touches_no_stream(server: SecureNats) -> None:
    async with server.bus("client") as bus:
        with pytest.raises(Forbidden):
            await bus.logs.last_seq(CHANGELOG(model="m"))
        with pytest.raises(Forbidden):
            await bus.logs.state(INVALIDATED())
        async with asyncio.timeout(30):  # waiting for streams that it may not see would never end
            with pytest.raises(Forbidden):
                await bus.logs.ensure()
        for verb in ("STREAM.DELETE.PD_CHANGELOG", "STREAM.PURGE.PD_CHANGELOG", "STREAM.UPDATE.PD_CHANGELOG"):
            with pytest.raises(Forbidden):
                await js_api(bus, verb)


async def test_no_kind_deletes_a_stream(server: SecureNats) -> None:
    for kind in KINDS:
        async with server.bus(kind) as bus:
            for verb in (
                "STREAM.DELETE.PD_CHANGELOG",
                "STREAM.PURGE.PD_INVALIDATED",
                "STREAM.MSG.DELETE.PD_INVALIDATED",
            ):
                with pytest.raises(Forbidden):
                    await js_api(bus, verb)


async def test_what_a_consumer_delivers_enters_no_log(server: SecureNats) -> None:
    """A router may make consumers of its queues, and NATS asks nobody where they deliver to."""
    async with server.bus("router") as router, server.bus("operator") as operator:
        to, heard = CHANGELOG(model="of-a-queue"), asyncio.Event()
        await operator.transport.subscribe(to.name, lambda raw: heard.set())
        assert isinstance(router.transport, NatsTransport)
        router.transport.send("pd.v1.jobs.strange", encode(ABORT))
        config = {"deliver_subject": to.name, "filter_subject": "pd.v1.jobs.strange", "ack_policy": "explicit"}
        asked = {"stream_name": "PD_JOBS", "config": config | {"durable_name": "strange"}}
        subject = "$JS.API.CONSUMER.DURABLE.CREATE.PD_JOBS.strange"
        await router.transport.client.request(subject, json.dumps(asked).encode(), timeout=30)
        async with asyncio.timeout(30):
            await heard.wait()
        await operator.transport.barrier()
        assert await operator.logs.counts(to) == {}


async def test_a_worker_tells_of_no_other_kind(server: SecureNats) -> None:
    """A card of a router would have every worker cancel that router's work."""
    seen: list[str] = []
    async with server.bus("operator") as listener, server.bus("decode") as decode:
        await listener.subscribe(PRESENCE(service=ANY, id=ANY), lambda message: seen.append(message.service))
        for service in ("router", "decode"):
            await decode.publish(PRESENCE(service=service, id="x"), card(service, "x"))
        await until(lambda: bool(seen))
        assert seen == ["decode"]


async def test_the_work_queue_is_the_invalidators(server: SecureNats) -> None:
    due = DueDelete("m", b"r" * 32, 1, False, 1)
    for kind in KINDS:
        async with server.bus(kind) as bus:
            if kind != "invalidator":
                with pytest.raises(Forbidden):
                    await bus.logs.enqueue(DELETES(model="m"), due)
                with pytest.raises(Forbidden):
                    await js_api(bus, "CONSUMER.MSG.NEXT.PD_DELETES.invalidator-m")
                continue
            await bus.logs.enqueue(DELETES(model="m"), due)
            async with asyncio.timeout(30), contextlib.aclosing(bus.logs.work(DELETES(model="m"))) as jobs:
                job = await anext(jobs)
                assert job.message == due
                await job.done()


async def test_jobs_their_results_and_files_are_the_routers(server: SecureNats) -> None:
    spec = JobSpec("t", "j", "completions", b"d" * 32, "", 0.0, 1.0)
    to, file = RESULTS(tenant="t", job="j"), FILES(tenant="t", file="f")
    async with server.bus("router") as bus:
        await bus.logs.enqueue(JOBS(model="m"), JobWork(spec, b"{}"))
        async with asyncio.timeout(30), contextlib.aclosing(bus.logs.work(JOBS(model="m"))) as jobs:
            job = await anext(jobs)
            assert (job.message.spec, job.deliveries) == (spec, 1)
            await bus.logs.append(to, JobEntry("completed", spec, 0.0), expected_seq=0)
            await job.done()
        for number in range(3):
            await bus.logs.append(file, FileEntry(b"%d" % number))
        await bus.logs.append(file, FileEntry(deleted=True), replaces=True)
        assert await bus.logs.counts(file) == {file.name: 1}
    for kind in ("client-shop", "decode", "operator"):
        async with server.bus(kind) as bus:
            with pytest.raises(Forbidden):
                await bus.logs.enqueue(JOBS(model="m"), JobWork(spec, b"{}"))
            with pytest.raises(Forbidden):
                await bus.logs.append(to, JobEntry("cancelled", spec, 0.0))
            with pytest.raises(Forbidden):
                await bus.logs.last(to)


async def test_a_service_that_may_not_make_streams_waits_until_they_are_there(tmp_path: Path) -> None:
    async with secure_nats(tmp_path) as server:
        async with server.bus("decode") as decode, server.bus("param_server") as param_server:
            waiting = asyncio.create_task(decode.logs.ensure())
            await asyncio.sleep(0)
            with pytest.raises(NotFound):
                await decode.logs.state(CHANGELOG(model="m"))
            await param_server.logs.ensure()
            async with asyncio.timeout(30):
                await waiting


async def test_a_request_whose_answer_would_go_elsewhere_is_not_served(server: SecureNats) -> None:
    """Else a caller could have a router publish in its place: here, tokens of nobody's answer."""
    asked: list[EmbedRequest] = []

    async def embed(message: EmbedRequest, ctx: RequestContext) -> EmbedReply:
        asked.append(message)
        return EmbedReply(b"r" * 32, 1, b"1234", 1, 0)

    async with server.bus("router") as router, server.bus("client") as client:
        async with await router.serve(EMBED(model="m"), embed) as served:
            client.transport.send("pd.v1.embed.m", b"\x80", reply="pd.v1.cancel")
            await until(lambda: served.requests == 1)
            assert not asked
            assert served.errors == 1
