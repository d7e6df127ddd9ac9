"""Which session a request belongs to: while canaries run, one version serves all of it."""

from __future__ import annotations

from pdbus.canonical import digest
from pdbus.router.openai_schema import GenerateRequest


def session_of(request: GenerateRequest, tenant: str, session: str | None) -> bytes:
    """Names a session, by what is known of it: the caller's word, the user, or how the conversation begins."""
    if named := named_session(tenant, session, request.user):
        return named
    first = next((at for at, message in enumerate(request.messages) if message.role == "user"), 0)
    begins = [message.content for message in request.messages[: first + 1]] or [str(request.prompts[0])[:1024]]
    return digest(["begins", tenant, begins])


def named_session(tenant: str, session: str | None, user: str | None) -> bytes | None:
    """By the caller's word, or the user. None where nobody says what the request belongs to."""
    named = session or user
    return None if named is None else digest(["session", tenant, named])
