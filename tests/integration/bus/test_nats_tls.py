"""TLS to NATS: asked for by PDBUS_NATS_CA, it is had or nothing is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from pdbus.bus.bus import connect
from pdbus.context import RequestContext
from pdbus.errors import Unavailable
from pdbus.messages.router import EmbedReply, EmbedRequest
from pdbus.nats_access import NatsAccess
from pdbus.stack.nats_server import _stop, _wait_for_url, find_nats_server
from pdbus.subjects import EMBED


def _write(authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path]:
    issued = authority.issue_cert("127.0.0.1", common_name=name)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return cert, key


@asynccontextmanager
async def _server(folder: Path, ca: Path, cert: Path, key: Path) -> AsyncIterator[str]:
    """One that verifies its clients too."""
    ports, log = folder / "ports", folder / "nats.log"
    ports.mkdir()
    (folder / "nats.conf").write_text(
        f'listen: "127.0.0.1:-1"\ntls {{cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true}}\n'
    )
    process = await asyncio.create_subprocess_exec(
        str(find_nats_server()), "-c", str(folder / "nats.conf"), "-l", str(log), "--ports_file_dir", str(ports)
    )
    try:
        yield await _wait_for_url(process, ports, log)
    finally:
        await _stop(process)


async def _echo(message: EmbedRequest, ctx: RequestContext) -> EmbedReply:
    return EmbedReply(b"r" * 32, len(message.input), b"", 0, 0)


async def test_both_ends_show_certificates_and_large_messages_come_whole(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    server, client = (_write(authority, tmp_path, name) for name in ("server", "client"))
    access = NatsAccess(ca=ca, cert=client[0], key=client[1])
    async with _server(tmp_path, ca, *server) as url, connect(url, name="tls", access=access) as bus:
        async with await bus.serve(EMBED(model="m"), _echo):
            texts = tuple("x" * 1000 for _ in range(900))
            reply = await bus.call(EMBED(model="m"), EmbedRequest(texts), RequestContext.after(30))
            assert reply.dimensions == 900
        other = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(str(other))
        for wrong in (NatsAccess(), NatsAccess(ca=ca), NatsAccess(ca=other, cert=client[0], key=client[1])):
            with pytest.raises(Unavailable):
                async with connect(url, name="stranger", access=wrong, wait_s=0.5):
                    pass


async def test_a_server_without_it_gets_nothing(nats_url: str, tmp_path: Path) -> None:
    """Who stands in between could have taken it away: then the key's signature and all that follows would be theirs."""
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    with pytest.raises(Unavailable, match="TLS was asked for"):
        async with connect(nats_url, name="tls", access=NatsAccess(ca=ca), wait_s=0.5):
            pass
