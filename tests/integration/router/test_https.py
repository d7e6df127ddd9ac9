"""HTTP by TLS alone, 1.2 and newer, where the settings name a certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme

from pdbus.errors import InvalidRequest
from pdbus.router.settings import RouterSettings
from pdbus.settings import SettingsError
from tests.support.completing import complete
from tests.support.router_rig import rig


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> dict[str, Path]:
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return {"http_cert": cert, "http_key": key}


def trusting(authority: trustme.CA, newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if newest is not None:
        context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, newest
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_requests_by_tls_and_no_other_way(authority: trustme.CA, certificate: dict[str, Path]) -> None:
    async with rig(**certificate) as r:
        assert r.url.startswith("https://")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(authority))) as http:
            assert (await complete(http, r, max_tokens=3))["choices"]
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get(f"{r.url}/healthz")
            with pytest.raises(aiohttp.ClientError):
                await stranger.get(r.url.replace("https", "http") + "/healthz")
        old = trusting(authority, ssl.TLSVersion.TLSv1_1)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=old)) as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"{r.url}/healthz")


async def test_a_certificate_that_can_not_be_used_is_told_at_the_start(certificate: dict[str, Path]) -> None:
    certificate["http_key"].write_text("nothing")
    with pytest.raises(InvalidRequest, match="PDBUS_HTTP_CERT"):
        async with rig(**certificate):
            pass


@pytest.mark.parametrize("lacking", ["http_cert", "http_key"])
def test_one_without_the_other_is_refused(certificate: dict[str, Path], lacking: str) -> None:
    del certificate[lacking]
    with pytest.raises(SettingsError, match="go together"):
        RouterSettings(**certificate)  # type: ignore[arg-type]
