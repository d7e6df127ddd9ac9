"""`pdbus chat`: a conversation with any OpenAI-compatible server, streamed."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from pdbus.context import new_id
from pdbus.errors import PdbusError, Unavailable

_RETRY_STATUS = frozenset({429, 502, 503, 504})
_RETRY_FOR_S = 60.0
_IDLE_S = 120.0
"""Longest silence within an answer."""
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 5.0

Message = dict[str, str]


class Refused(PdbusError):
    """The server answered with an error that asking again won't change."""


class Chat:
    """Keeps the messages of one conversation."""

    def __init__(self, url: str, temperature: float = 0.2, max_tokens: int = 512, api_key: str | None = None) -> None:
        self._api_key = api_key
        self._temperature = temperature
        self._max_tokens = max_tokens
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._secure = parts.scheme == "https"
        self._host = parts.netloc
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._messages: list[Message] = []
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.model = ""
        """The server's first one, once `ask` or `connect` found it."""

    def connect(self, patience_s: float = _RETRY_FOR_S) -> None:
        """Finds the model's name. Raises Unavailable when nobody answers for so long."""
        answer = self._retried("GET", "/v1/models", None, patience_s)
        with closing(answer):
            models = json.loads(answer.read())["data"]
        if not models:
            raise Unavailable(f"{self.url} serves no model")
        self.model = models[0]["id"]

    def ask(self, prompt: str) -> Generator[str, None, None]:
        """Yields the answer's text as it comes. What came joins the conversation, also when the caller stops early.

        Raises Refused or Unavailable; then the conversation is as before."""
        asked = [*self._messages, {"role": "user", "content": prompt}]
        answer = self._retried(
            "POST",
            "/v1/chat/completions",
            {
                "model": self.model,
                "messages": asked,
                "stream": True,
                "temperature": self._temperature,
                "max_tokens": self._max_tokens,
            },
            _RETRY_FOR_S,
        )
        said: list[str] = []
        try:
            with closing(answer):
                for text in _texts(answer):
                    said.append(text)
                    yield text
        finally:
            if said:
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _retried(
        self, method: str, path: str, body: dict[str, Any] | None, patience_s: float
    ) -> http.client.HTTPResponse:
        """Repeats what is retryable, until an answer begins, with one idempotency key."""
        give_up = time.monotonic() + patience_s
        # Closing the answer then closes its connection: that is how an answer is stopped.
        headers = {"content-type": "application/json", "idempotency-key": new_id(), "connection": "close"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        pause = _FIRST_BACKOFF_S
        while True:
            wait_s = pause * random.uniform(0.5, 1.5)  # noqa: S311
            try:
                answer = self._once(method, path, body, headers)
                if answer.status == 200:
                    return answer
                problem = _problem(answer)
                if answer.status == 401:
                    raise Refused(f"{problem}; `pdbus chat` has it from PDBUS_API_KEY")
                if answer.status not in _RETRY_STATUS:
                    raise Refused(problem)
                wait_s = max(wait_s, float(answer.headers.get("retry-after") or 0))
            except (OSError, http.client.HTTPException) as error:
                problem = f"nobody answers at {self.url} ({error})"
            if time.monotonic() + wait_s > give_up:
                raise Unavailable(problem)
            time.sleep(wait_s)
            pause = min(pause * 2, _LONGEST_BACKOFF_S)

    def _once(
        self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=_IDLE_S)
        try:
            connection.request(method, self._path + path, json.dumps(body) if body is not None else None, headers)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _texts(answer: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream of server-sent events."""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise Unavailable(chunk["error"].get("message", "the answer broke off"))
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def _problem(answer: http.client.HTTPResponse) -> str:
    with closing(answer):
        body = answer.read(65536)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status} {answer.reason}"


def connect(chat: Chat, console: Console, nothing: str = "") -> None:
    """Waits a minute for the server, and says so. `nothing`: why there should be none; then without waiting.

    Raises Unavailable."""
    if not nothing:
        with console.status(f"waiting for {escape(chat.url)}"):
            return chat.connect()
    try:
        chat.connect(patience_s=0)
    except Unavailable:
        raise Unavailable(nothing) from None


def converse(chat: Chat, prompt: str | None, console: Console) -> int:
    """One answer to `prompt`, or a conversation until the end of the input. Ctrl-C stops an answer, or leaves.

    `chat` is connected."""
    if prompt is not None:
        _say(chat.ask(prompt), console)
        return 0
    with suppress(ImportError):
        import readline  # noqa: F401 - from here on input() has its editing and history
    console.print(f"[dim]{escape(chat.model)} at {chat.url}. Ctrl-C stops an answer, Ctrl-D leaves.[/]")
    while True:
        try:
            prompt = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if prompt:
            try:
                _say(chat.ask(prompt), console)
            except KeyboardInterrupt:
                console.print("\n[dim]stopped[/]")
            except PdbusError as error:
                console.print(f"[red]{escape(error.message)}[/]")


def _say(texts: Generator[str, None, None], console: Console) -> None:
    with closing(texts):
        for text in texts:
            console.file.write(text)
            console.file.flush()
    console.print()
