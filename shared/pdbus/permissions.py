"""Who may do what on the bus: one table from the kind of a process to the subjects that it needs, and no more.

NATS enforces it: `pdbus keys nats` writes it out as one user's permissions for each kind (stack/nats_accounts.py). A
subject of subjects.py that nobody here may send to, or listen to, fails a test: so does a new one until it is entered.

Not told apart are processes of one kind, and whose bulk streams are whose: the addresses of those are random, and only
services may listen for any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdbus import subjects as s
from pdbus.nats_access import OPEN_INBOX
from pdbus.subjects import ANY, Bulk, Event, Log, Rpc, StreamRpc, Subject, Work

SOURCE = "features"
"""The kind of a caller's own feature service (PDBUS_FEATURE_SUBJECT)."""
_JS = "$JS.API"

AnyRpc = Rpc[Any, Any] | StreamRpc[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What one kind of process does on the bus."""

    serves: tuple[AnyRpc, ...] = ()
    calls: tuple[AnyRpc, ...] = ()
    sends: tuple[Event[Any] | Bulk, ...] = ()
    hears: tuple[Event[Any] | Bulk, ...] = ()
    follows: tuple[Log[Any], ...] = ()
    tails: tuple[Log[Any], ...] = ()
    """Of those that it follows: at their pace, by consumers of its own."""
    appends: tuple[Log[Any], ...] = ()
    purges: tuple[Log[Any], ...] = ()
    """Of what became part of a version."""
    puts: tuple[Work[Any], ...] = ()
    takes: tuple[Work[Any], ...] = ()
    ensures: bool = False
    """Makes the streams, and changes how they are kept."""
    service: bool = True
    """Tells of itself: by presence, and by the NATS services API."""
    answers_any: bool = False
    """May publish into every inbox. Others only to where a message asked them to (Replies); routers stream."""
    asks_services: bool = False
    """`nats micro list` and the like, and what each process holds."""


_PRESENT = (s.PRESENCE,)
_READS_WEIGHTS = (s.WEIGHT_BLOCKS, s.WEIGHT_BLOCKS_OF)
_CACHES = (s.CACHE_GET, s.CACHE_PUT)
_RECEIVES = (s.TRANSFER,)
_VERSIONS = (s.CHANGELOG, s.CHECKPOINTS)
_ASKED = (s.INFER, s.EMBED, s.FEATURES, s.JOB_SUBMIT, s.JOB_STATE, s.JOB_CANCEL, s.JOB_WATCH)
_JOB_LOGS = (s.RESULTS, s.BATCHES, s.FILES)
_JOB_QUEUES = (s.JOBS, s.BATCH_JOBS)

GRANTS: Final[Mapping[str, Grant]] = {
    "router": Grant(
        serves=(*_ASKED, s.REF_STATS, s.DRAIN),
        calls=(
            s.PREFILL_RUN, s.PREFILL_RESEND, s.PREFILL_EMBED, s.DECODE_RUN, s.DECODE_RESEND, s.KVINDEX_SNAPSHOT,
            *_READS_WEIGHTS, *_CACHES, s.CACHE_DELETE, s.FEATURE_SOURCE,
        ),
        sends=(*_PRESENT, s.CANCEL, s.TRANSFER, s.JOB_PROGRESS),
        hears=(*_PRESENT, s.TOKENS, s.KVINDEX, *_RECEIVES, s.JOB_PROGRESS),
        follows=(*_VERSIONS, *_JOB_LOGS),
        appends=_JOB_LOGS,
        puts=_JOB_QUEUES,
        takes=_JOB_QUEUES,
        answers_any=True,
    ),
    "prefill": Grant(
        serves=(s.PREFILL_RUN, s.PREFILL_RESEND, s.PREFILL_EMBED, s.KVINDEX_SNAPSHOT, s.DRAIN),
        calls=(s.DECODE_RESERVE, *_READS_WEIGHTS, *_CACHES),
        sends=(*_PRESENT, s.TOKENS, s.CANCEL, s.KVINDEX, s.KV, s.TRANSFER),
        hears=(*_PRESENT, s.CANCEL, *_RECEIVES),
        follows=(*_VERSIONS, s.INVALIDATED),
    ),
    "decode": Grant(
        serves=(
            s.DECODE_RESERVE, s.DECODE_RUN, s.DECODE_RESEND, s.DECODE_ADOPT, s.DECODE_PAGES, s.KVINDEX_SNAPSHOT,
            s.DRAIN,
        ),
        calls=(s.DECODE_ADOPT, s.DECODE_PAGES, *_READS_WEIGHTS, *_CACHES),
        sends=(*_PRESENT, s.TOKENS, s.CANCEL, s.KVINDEX, s.TRANSFER),
        hears=(*_PRESENT, s.CANCEL, s.KV, *_RECEIVES),
        follows=(*_VERSIONS, s.INVALIDATED),
    ),
    "cache": Grant(
        serves=(s.CACHE_GET, s.CACHE_PUT, s.CACHE_DELETE, s.CACHE_SCAN, s.DRAIN),
        sends=(*_PRESENT, s.TRANSFER),
        hears=(*_PRESENT, *_RECEIVES),  # presence: for its own health check
        follows=(s.INVALIDATED,),
    ),
    "param_server": Grant(
        serves=(*_READS_WEIGHTS, s.WEIGHTS_STAGE, s.WEIGHTS_PREPARE, s.TABLE_READ, s.WEIGHTS_HEAT, s.DRAIN),
        calls=(*_READS_WEIGHTS, s.WEIGHTS_STAGE, s.WEIGHTS_PREPARE),
        sends=(*_PRESENT, s.TRANSFER),
        hears=(*_PRESENT, *_RECEIVES),
        follows=(*_VERSIONS, s.ROWS),
        tails=(s.ROWS,),
        appends=_VERSIONS,
        ensures=True,
    ),
    "invalidator": Grant(
        serves=(s.DRAIN,),
        calls=(s.CACHE_DELETE, s.CACHE_SCAN),
        sends=_PRESENT,
        hears=_PRESENT,
        follows=(*_VERSIONS, s.INVALIDATED),
        appends=(s.INVALIDATED,),
        puts=(s.DELETES,),
        takes=(s.DELETES,),
        ensures=True,
    ),
    "operator": Grant(
        serves=(s.UPDATE_JOIN, s.UPDATE_STAGED),
        calls=(
            *_ASKED, *_READS_WEIGHTS, s.WEIGHTS_STAGE, s.WEIGHTS_PREPARE, s.UPDATE_JOIN, s.UPDATE_STAGED,
            s.TABLE_READ, s.WEIGHTS_HEAT, s.REF_STATS, s.DRAIN,
        ),
        sends=_RECEIVES,
        hears=(*_PRESENT, *_RECEIVES),
        follows=(*_VERSIONS, s.INVALIDATED, s.BRANCH, s.ROWS),
        tails=(s.ROWS,),
        appends=(s.CHANGELOG, s.INVALIDATED, s.BRANCH, s.ROWS),
        purges=(s.BRANCH, s.ROWS),
        ensures=True,
        service=False,
        asks_services=True,
    ),
    "client": Grant(calls=_ASKED, service=False),
    SOURCE: Grant(serves=(s.FEATURE_SOURCE,), service=False),
}  # fmt: skip
"""`operator`: the commands, and whoever pushes weights. `client`: a caller; of many, each has its own key."""


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
        yield from (f"{_JS}.STREAM.{verb}.{stream}" for stream in streams() for verb in ("CREATE", "UPDATE"))


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
