"""The HTTP front: OpenAI's endpoints, health, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from opentelemetry.trace import SpanKind

from pdbus.context import Deadline, RequestContext
from pdbus.errors import PdbusError
from pdbus.router.answer import Answer
from pdbus.router.demand import unread_demand
from pdbus.router.frontend import Frontend
from pdbus.router.http_body import closing_told, read_body
from pdbus.router.http_caller import read_caller, trace_of, unread_caller
from pdbus.router.http_errors import describe
from pdbus.router.http_events import events
from pdbus.router.http_listen import listen, tls_of
from pdbus.router.http_middleware import Handler, errors_told, identified
from pdbus.router.identity import Identities
from pdbus.router.observe import Observed, observed, operation_of
from pdbus.router.openai_schema import Endpoint, parse_json
from pdbus.router.settings import RouterSettings
from pdbus.router.telling import whole

log = logging.getLogger(__name__)
wire_log = logging.getLogger(f"{__name__}.wire")
"""aiohttp's own, of connections."""

_IDLE_S = 75.0
"""For a connection without a request, one whose head never ends included."""
_CLOSE_S = 1.0
_LAST_S = 2.0
"""For a stream's last event to leave; a client that does not read by then is cut off."""
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _EventStream(web.StreamResponse):
    """Its head leaves with its first event: a write of its own would cost as much as an event's."""

    _send_headers_immediately = False


class HttpServer:
    """Listens once made by `serve_http`."""

    def __init__(self, site: web.SockSite, scheme: str, host: str, port: int) -> None:
        self._site = site
        named = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        self.url = f"{scheme}://{named}:{port}"
        """Where others reach it."""

    async def stop_listening(self) -> None:
        """New connections are refused; open ones go on."""
        await self._site.stop()


@asynccontextmanager
async def serve_http(
    frontend: Frontend,
    embeddings: Handler,
    more: Iterable[web.RouteDef],
    identities: Identities,
    settings: RouterSettings,
) -> AsyncIterator[HttpServer]:
    """`more`: routes beside those that answer at once.

    Raises OSError where the address can't be had, InvalidRequest for a certificate that can't be used."""
    host, port, tls = settings.http_host, settings.http_port, tls_of(settings.http_cert, settings.http_key)
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[errors_told, identified(identities)])
    app.on_response_prepare.append(closing_told)
    routes = [
        web.post("/v1/chat/completions", _generate(frontend, "chat.completions")),
        web.post("/v1/completions", _generate(frontend, "completions")),
        web.post("/v1/embeddings", embeddings),
        *more,
    ]
    expecting = {"expect_handler": _expected}
    app.add_routes([web.RouteDef(it.method, it.path, it.handler, {**it.kwargs, **expecting}) for it in routes])
    # A handler is cancelled as soon as its client is gone: so everything it holds is freed everywhere.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CLOSE_S,
        keepalive_timeout=_IDLE_S,
        auto_decompress=False,  # read_body does it, within bounds
        logger=wire_log,
    )
    wire_log.addFilter(_of_ours)
    await runner.setup()
    try:
        listening = listen(host, port)
        site = web.SockSite(runner, listening, backlog=1024, ssl_context=tls)
        await site.start()
        yield HttpServer(site, "https" if tls else "http", host, listening.getsockname()[1])
    finally:
        await runner.cleanup()


def _of_ours(record: logging.LogRecord) -> bool:
    """Not what a client did wrong: anybody could fill the log with it, and its headers, a key among them, are in it."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError | UnicodeError)


async def _expected(http: web.Request) -> None:
    """As aiohttp's own, which fails where it repeats a header that is no text."""
    if http.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the header Expect may say 100-continue and nothing else")
    await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    http.writer.output_size = 0


def _generate(frontend: Frontend, endpoint: Endpoint) -> Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        unread = unread_caller(http)
        _shed(frontend, http.content_length or 0, endpoint, unread.ctx)
        request = parse_json(endpoint, await read_body(http))
        caller = read_caller(http, unread, request.timeout_s)
        with observed(request, frontend.metrics, SpanKind.SERVER, trace_of(http)) as seen:
            async with frontend.answer(request, caller) as answer:
                headers = {"x-request-id": caller.ctx.request_id, "X-Result-Cache": answer.source}
                if request.stream:
                    return await _stream(http, answer, caller.ctx.deadline, headers, seen)
                told = msgspec.json.encode(await whole(answer))
                seen.whole(answer)
                return web.Response(body=told, content_type="application/json", headers=headers)

    return handle


def _shed(frontend: Frontend, body_bytes: int, endpoint: Endpoint, ctx: RequestContext) -> None:
    """Refuses what can't be served before anything of its body is read."""
    try:
        frontend.admission.check(unread_demand(body_bytes, ctx), ctx.deadline)
    except PdbusError as error:
        frontend.metrics.edge.finished(operation_of(endpoint), 0.0, error.code)
        raise


async def _stream(
    http: web.Request, answer: Answer, deadline: Deadline, headers: dict[str, str], seen: Observed
) -> web.StreamResponse:
    """Server-sent events, one write for all that came at once. The status waits for the first token: until then an
    error is an ordinary one; later it is the stream's last event."""
    response, last = _EventStream(headers=_STREAM_HEADERS | headers), b""
    try:
        async with deadline.timeout():  # a client that does not read holds its slot no longer either
            async for told in events(answer):
                if not response.prepared:
                    await response.prepare(http)
                if answer.told:
                    last = told
                else:
                    await response.write(told)
    except ConnectionError:
        seen.error = "cancelled"
        return response
    except Exception as error:
        if not response.prepared:
            raise
        status, body = describe(error)
        seen.error = body.error.code
        log.log(logging.ERROR if status == 500 else logging.INFO, "a stream failed: %s", error)
        await _last(http, response, b"data: %b\n\n" % msgspec.json.encode(body))
        return response
    await _last(http, response, last)
    seen.whole(answer)
    return response


async def _last(http: web.Request, response: web.StreamResponse, event: bytes) -> None:
    try:
        async with asyncio.timeout(_LAST_S):
            await response.write_eof(event)
    except (TimeoutError, ConnectionError):
        if http.transport is not None:
            http.transport.abort()
