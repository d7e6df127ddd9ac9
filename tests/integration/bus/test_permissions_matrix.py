"""Every kind of user tries every subject, on a real server. What each may do stands here a second time, by hand: so a
grant that grows by mistake, or a pattern that is wider than it looks, is seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdbus.bus.nats import NatsTransport
from pdbus.errors import Forbidden
from pdbus.grants import GRANTS
from pdbus.subjects import DEBUG, DRAIN, FEATURE_SOURCE, PRESENCE, all_subjects
from tests.support.secure import SecureNats, secure_nats

KINDS = {
    "R": "router", "P": "prefill", "D": "decode", "C": "cache", "W": "param_server", "I": "invalidator",
    "O": "operator", "U": "client",
}  # fmt: skip
MAY = {
    # subject: (who may send there, who may listen)
    "INFER": ("OU", "R"), "EMBED": ("OU", "R"), "FEATURES": ("OU", "R"), "REF_STATS": ("O", "R"),
    "JOB_SUBMIT": ("OU", "R"), "JOB_STATE": ("OU", "R"), "JOB_CANCEL": ("OU", "R"), "JOB_WATCH": ("OU", "R"),
    "JOB_PROGRESS": ("R", "R"), "TOKENS": ("PD", "R"), "CANCEL": ("RPD", "PD"),
    "PREFILL_RUN": ("R", "P"), "PREFILL_RESEND": ("R", "P"), "PREFILL_EMBED": ("R", "P"),
    "DECODE_RESERVE": ("P", "D"), "DECODE_RUN": ("R", "D"), "DECODE_RESEND": ("R", "D"), "DECODE_ADOPT": ("D", "D"),
    "DECODE_PAGES": ("D", "D"), "KV": ("P", "D"), "KVINDEX": ("PD", "R"), "KVINDEX_SNAPSHOT": ("R", "PD"),
    "WEIGHT_BLOCKS": ("RPDWO", "W"), "WEIGHT_BLOCKS_OF": ("RPDWO", "W"), "WEIGHTS_STAGE": ("WO", "W"),
    "WEIGHTS_PREPARE": ("WO", "W"), "UPDATE_JOIN": ("O", "O"), "UPDATE_STAGED": ("O", "O"),
    "TABLE_READ": ("O", "W"), "WEIGHTS_HEAT": ("O", "W"),
    "CACHE_GET": ("RPD", "C"), "CACHE_PUT": ("RPD", "C"), "CACHE_DELETE": ("RI", "C"), "CACHE_SCAN": ("I", "C"),
    "CHANGELOG": ("WO", "RPDWIO"), "CHECKPOINTS": ("W", "RPDWIO"), "BRANCH": ("O", "O"), "ROWS": ("O", "WO"),
    "INVALIDATED": ("IO", "PDCIO"), "DELETES": ("I", ""), "JOBS": ("R", ""), "BATCH_JOBS": ("R", ""),
    "RESULTS": ("R", "R"), "BATCHES": ("R", "R"), "FILES": ("R", "R"),
    "TRANSFER": ("RPDCWO", "RPDCWO"), "CREDIT": ("RPDCWO", "RPDCWO"),
    "DRAIN": ("O", ""), "DEBUG": ("O", ""), "PRESENCE": ("", "RPDCWIO"),
}  # fmt: skip
"""The last three are of one process: of another kind's, as here, nobody tells and nobody serves."""
NOBODYS = (
    "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "$JS.API.STREAM.DELETE.PD_FILES", "$JS.API.STREAM.NAMES",
    "$JS.API.DIRECT.GET.PD_FILES", "$JS.API.STREAM.SNAPSHOT.PD_FILES", "$JS.API.CONSUMER.CREATE.PD_CHANGELOG",
    "$JS.API.STREAM.CREATE.OTHER", "pd.v1.other", "somebody.else",
)  # fmt: skip
pytestmark = pytest.mark.asyncio(loop_scope="module")


def _name(subject: object) -> str:
    known = {"service": "nobody"} if subject in (DRAIN, DEBUG, PRESENCE) else {}
    assert hasattr(subject, "wanted")
    return str(subject.name(**(dict.fromkeys(subject.wanted, "x") | known)))  # type: ignore[attr-defined]


NAMES = {name: _name(subject) for name, subject in all_subjects().items() if subject is not FEATURE_SOURCE}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureNats]:
    async with secure_nats(Path(tmp_path_factory.mktemp("matrix"))) as made:
        yield made


async def test_the_table_is_whole() -> None:
    assert MAY.keys() == NAMES.keys()
    assert set(KINDS.values()) == GRANTS.keys() - {"features"}


@pytest.mark.parametrize(("letter", "kind"), KINDS.items())
async def test_what_a_kind_may_send_and_hear(server: SecureNats, letter: str, kind: str) -> None:
    refused: set[str] = set()
    async with server.bus(kind) as bus:
        transport = bus.transport
        assert isinstance(transport, NatsTransport)
        transport.on_refused(refused.add)
        inbox = server.access("client" if kind != "client" else "decode").inbox()
        for at in (*NAMES.values(), *NOBODYS, f"{inbox}.1"):
            transport.send(at, b"\xc1")
        await transport.barrier()
        sent = {name for name, at in NAMES.items() if at.lower() not in refused}
        assert sent == {name for name, (send, _) in MAY.items() if letter in send}
        for at in NOBODYS:
            assert at.lower() in refused, at
        assert (f"{inbox}.1".lower() in refused) == (kind != "router"), (
            "into another's inbox answers come by permission"
        )

        heard = await asyncio.gather(*(_hears(transport, at) for at in NAMES.values()))
        assert {name for name, may in zip(NAMES, heard, strict=True) if may} == {
            name for name, (_, hear) in MAY.items() if letter in hear
        }


async def _hears(transport: NatsTransport, at: str) -> bool:
    try:
        subscription = await transport.subscribe(at, lambda raw: None)
    except Forbidden:
        return False
    await subscription.close()
    return True
