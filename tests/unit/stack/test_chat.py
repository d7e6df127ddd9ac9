"""`pdbus chat` against a small server that misbehaves on purpose."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from pdbus.errors import Unavailable
from pdbus.stack import chat as chat_module
from pdbus.stack.chat import Chat, Refused, connect, converse


class Server:
    """Answers chat requests with what `answers` holds: (status, headers, text) in turn, the last one for good."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], str]] = [(200, {}, _events("Hel", "lo"))]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.api_keys: list[str | None] = []
        self.url = ""


def _events(*texts: str, end: str = "data: [DONE]\n\n") -> str:
    chunks = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(chat_module, "_FIRST_BACKOFF_S", 0.01)
    fake = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.api_keys.append(self.headers["authorization"])
            self._answer(200, {}, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            fake.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            fake.keys.append(self.headers["idempotency-key"])
            fake.api_keys.append(self.headers["authorization"])
            self._answer(*(fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]))

        def _answer(self, status: int, headers: dict[str, str], text: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    http.shutdown()
    http.server_close()
    thread.join()


def _connected(server: Server) -> Chat:
    chat = Chat(server.url)
    chat.connect()
    return chat


def test_the_answer_streams_and_joins_the_conversation(server: Server) -> None:
    chat = _connected(server)
    assert list(chat.ask("Hi")) == ["Hel", "lo"]
    list(chat.ask("More"))
    assert server.asked[0]["model"] == "m"
    assert server.asked[0]["stream"] is True
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "More"},
    ]


def test_an_api_key_goes_with_every_request_and_none_without(server: Server) -> None:
    for key in ("pdk-1-x", None):
        chat = Chat(server.url, api_key=key)
        chat.connect()
        list(chat.ask("Hi"))
    assert server.api_keys == ["Bearer pdk-1-x"] * 2 + [None] * 2


def test_what_is_retryable_is_retried_with_one_key(server: Server) -> None:
    server.answers = [(503, {}, ""), (429, {"retry-after": "0"}, ""), (200, {}, _events("ok"))]
    assert list(_connected(server).ask("Hi")) == ["ok"]
    assert len(server.asked) == 3
    assert len(set(server.keys)) == 1


def test_an_error_of_the_caller_is_told_and_not_retried(server: Server) -> None:
    server.answers = [(400, {}, json.dumps({"error": {"message": "too long"}})), (200, {}, _events("ok"))]
    chat = _connected(server)
    with pytest.raises(Refused, match="too long"):
        list(chat.ask("Hi"))
    list(chat.ask("Again"))
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Again"}]


def test_a_server_that_stays_away_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_RETRY_FOR_S", 0.2)
    server.answers = [(503, {}, json.dumps({"error": {"message": "no worker"}}))]
    with pytest.raises(Unavailable, match="no worker"):
        list(_connected(server).ask("Hi"))


def test_an_error_in_mid_stream_is_told(server: Server) -> None:
    server.answers = [(200, {}, _events("He", end='data: {"error": {"message": "worker lost"}}\n\n'))]
    with pytest.raises(Unavailable, match="worker lost"):
        list(_connected(server).ask("Hi"))


def test_an_answer_that_is_stopped_keeps_what_was_said(server: Server) -> None:
    chat = _connected(server)
    texts = chat.ask("Hi")
    assert next(texts) == "Hel"
    texts.close()
    list(chat.ask("Go on"))
    assert server.asked[-1]["messages"][1] == {"role": "assistant", "content": "Hel"}


def test_one_question_prints_the_answer_and_leaves(server: Server) -> None:
    output = io.StringIO()
    chat, console = Chat(f"{server.url}/v1"), Console(file=output)
    connect(chat, console)
    assert converse(chat, "Hi", console) == 0
    assert output.getvalue() == "Hello\n"


def test_a_conversation_goes_on_after_an_error_until_the_input_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [(400, {}, json.dumps({"error": {"message": "too [long]"}})), (200, {}, _events("fine"))]
    questions = iter(["first", "", "second"])

    def read(*_: object, **__: object) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    output = io.StringIO()
    console = Console(file=output)
    monkeypatch.setattr("builtins.input", read)
    assert converse(_connected(server), None, console) == 0
    assert "too [long]" in output.getvalue()
    assert "fine" in output.getvalue()
    assert len(server.asked) == 2
