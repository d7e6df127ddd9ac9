"""What each kind of process may do on the bus (grants.py), in NATS's terms: subjects to publish and to subscribe to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pdbus import subjects as s
from pdbus.grants import GRANTS, Grant
from pdbus.nats_access import OPEN_INBOX
from pdbus.subjects import ANY, Bulk, Log, StreamRpc, Subject, Work

_JS = "$JS.API"


@dataclass(frozen=True)
class Replies:
    """A user may publish `most` times to the reply subject of a message that it got, within `seconds`.

    The server remembers each subject until then, and goes through all of them at each message once they are more than
    4,096: so who answers does it once, and who reads streams has the few seconds between two signs of life."""

    most: int
    seconds: int


ANSWERS: Final = Replies(1, 660)
"""Of who serves requests: they live for ten minutes at most (context.py), and each has one answer."""
LEAVES: Final = Replies(100, 10)
"""Of who reads streams: it tells the sender that nobody reads any more, once for each frame that still comes."""

ANSWERS_AND_LEAVES: Final = Replies(LEAVES.most, ANSWERS.seconds)
"""Of who does both, and of neither much."""


@dataclass(frozen=True)
class Permissions:
    """Of one user, as NATS has them."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    replies: Replies | None
    """None: into any inbox."""


def permissions(kind: str, inbox: str, feature_subject: str = "") -> Permissions:
    """Of a user of that kind whose replies come below `inbox`. `feature_subject`: as the routers' setting."""
    grant = GRANTS[kind]
    publish = {*_published(kind, grant, feature_subject), *_jetstream(grant)}
    subscribe = {f"{inbox}.>", *_heard(kind, grant, feature_subject)}
    if grant.answers_any:
        publish.add(f"{OPEN_INBOX}.>")
    return Permissions(tuple(sorted(publish)), tuple(sorted(subscribe)), _replies(grant))


def _replies(grant: Grant) -> Replies | None:
    if grant.answers_any:
        return None
    if not any(isinstance(subject, StreamRpc) for subject in grant.calls):
        return ANSWERS
    return ANSWERS_AND_LEAVES if grant.serves else LEAVES


def _published(kind: str, grant: Grant, feature_subject: str) -> Iterator[str]:
    yield from _names((*grant.calls, *grant.appends, *grant.puts), feature_subject)
    for subject in grant.sends:
        yield _own(s.PRESENCE, service=kind) if subject is s.PRESENCE else _any(subject)
    if any(isinstance(subject, Bulk) for subject in grant.hears):
        yield _any(s.CREDIT)
    if grant.asks_services:
        yield from ("$SRV.>", f"{_JS}.INFO", _any(s.DEBUG))


def _heard(kind: str, grant: Grant, feature_subject: str) -> Iterator[str]:
    heard = (*grant.serves, *grant.hears, *grant.follows)
    yield from _names((subject for subject in heard if subject is not s.DRAIN), feature_subject)
    if s.DRAIN in grant.serves:
        yield _own(s.DRAIN, service=kind)
    if any(isinstance(subject, Bulk) for subject in grant.sends):
        yield _any(s.CREDIT)
    if grant.service:
        yield from ("$SRV.*", f"$SRV.*.{kind}", f"$SRV.*.{kind}.*", _own(s.DEBUG, service=kind))


def _jetstream(grant: Grant) -> Iterator[str]:
    for log in grant.follows:
        yield f"{_JS}.STREAM.INFO.{log.stream}"
    for log in {*grant.follows, *grant.appends}:
        yield f"{_JS}.STREAM.MSG.GET.{log.stream}"
    for log in grant.tails:
        yield f"{_JS}.CONSUMER.CREATE.{log.stream}"
        yield f"{_JS}.CONSUMER.CREATE.{log.stream}.>"
        yield f"{_JS}.CONSUMER.DELETE.{log.stream}.*"
        yield f"$JS.FC.{log.stream}.>"
    for log in grant.purges:
        yield f"{_JS}.STREAM.PURGE.{log.stream}"
    for queue in grant.puts:
        yield f"{_JS}.STREAM.MSG.GET.{queue.stream}"
    for queue in grant.takes:
        yield f"{_JS}.CONSUMER.DURABLE.CREATE.{queue.stream}.*"
        yield f"{_JS}.CONSUMER.CREATE.{queue.stream}.>"
        yield f"{_JS}.CONSUMER.MSG.NEXT.{queue.stream}.*"
        yield f"$JS.ACK.{queue.stream}.>"
    if grant.service or grant.ensures:  # whoever may not make the streams looks whether they are there
        yield from (f"{_JS}.STREAM.INFO.{stream}" for stream in streams())
    if grant.ensures:
        yield from (f"{_JS}.STREAM.CREATE.{stream}" for stream in streams())
        # Whoever changes how a stream is kept can have it emptied, or copied to where he listens
        own = {log.stream for log in grant.appends} | {queue.stream for queue in grant.puts}
        kept = own if grant.service else streams()
        yield from (f"{_JS}.STREAM.UPDATE.{stream}" for stream in kept)


def streams() -> set[str]:
    return {subject.stream for subject in s.all_subjects().values() if isinstance(subject, Log | Work)}


def _names(wanted: Iterable[Subject], feature_subject: str) -> Iterator[str]:
    for subject in wanted:
        if subject is not s.FEATURE_SOURCE:
            yield _any(subject)
        elif feature_subject:
            yield feature_subject


def _any(subject: Subject) -> str:
    return _own(subject)


def _own(subject: Subject, **tokens: str) -> str:
    return subject.name(**dict.fromkeys(subject.wanted, ANY) | tokens)
