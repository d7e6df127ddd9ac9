"""Who may do what on the bus: one table from the kind of a process to the subjects that it needs, and no more.

NATS enforces it (permissions.py): `pdbus keys nats` writes it out as one user's permissions for each kind
(stack/nats_accounts.py). A subject of subjects.py that nobody here may send to, or listen to, fails a test: so does a
new one until it is entered.

Not told apart are processes of one kind, and whose bulk streams are whose: the addresses of those are random, and only
services may listen for any. And NATS asks nobody where a consumer delivers to: who takes from a queue could have what
it put there handed to any listener, such as a card of another kind. No log takes it (a test says so).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdbus import subjects as s
from pdbus.subjects import Bulk, Event, Log, Rpc, StreamRpc, Work

SOURCE = "features"
"""The kind of a caller's own feature service (PDBUS_FEATURE_SUBJECT)."""

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
    """Makes the streams. A service changes how those are kept that it writes to, an operator all."""
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
        tails=_JOB_LOGS,
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
