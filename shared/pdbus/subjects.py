"""Every subject of the bus, each bound once to its message types and its kind.

    Rpc       one reply                          StreamRpc  a stream of replies to the caller's inbox
    Event     fan-out, may be lost               Log        JetStream: durable, ordered, replayable
    Work      JetStream work queue               Bulk       credit-controlled frames

Call a subject with its tokens to address it: `PREFILL_RUN(worker="p-0")`. Tokens are percent-encoded, so that a name
can never add a level or a wildcard.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, TypeVar

from pdbus.errors import InvalidRequest
from pdbus.messages import (
    bulk,
    cache,
    changelog,
    debug,
    decode,
    features,
    invalidator,
    jobs,
    param_server,
    prefill,
    presence,
    router,
    rows,
    updates,
    workers,
)
from pdbus.subject_tokens import AnyToken, decode_token, encode_token

Q = TypeVar("Q")
R = TypeVar("R")

ANY: Final = AnyToken("*")
"""As a token: every value (for subscriptions)."""


@dataclass(frozen=True)
class Subject:
    """A template such as `pd.v1.prefill.{worker}.run`."""

    template: str

    @cached_property
    def wanted(self) -> set[str]:
        """Names of its tokens."""
        return {key for _, key, _, _ in string.Formatter().parse(self.template) if key}

    def name(self, **tokens: str) -> str:
        """The concrete subject. ANY stays a wildcard; a missing or unknown token is a programming error (TypeError)."""
        if self.wanted != tokens.keys():
            raise TypeError(f"{self.template} takes the tokens {sorted(self.wanted)}, not {sorted(tokens)}")
        return self.template.format_map(
            {k: v if isinstance(v, AnyToken) else encode_token(v) for k, v in tokens.items()}
        )

    def tokens(self, name: str) -> dict[str, str] | None:
        """The tokens of a concrete subject, or None where it is not one of these."""
        parts, template = name.split("."), self.template.split(".")
        if len(parts) != len(template):
            return None
        found: dict[str, str] = {}
        for part, slot in zip(parts, template, strict=True):
            if slot.startswith("{"):
                found[slot[1:-1]] = decode_token(part)
            elif part != slot:
                return None
        return found


@dataclass(frozen=True)
class To(Generic[Q, R]):
    """A subject with its tokens filled in."""

    subject: Rpc[Q, R] | StreamRpc[Q, R]
    name: str


@dataclass(frozen=True)
class ToEvent(Generic[Q]):
    subject: Event[Q] | Log[Q] | Work[Q]
    name: str


@dataclass(frozen=True)
class Rpc(Subject, Generic[Q, R]):
    request: type[Q]
    reply: type[R]
    queue: str | None = None

    def __call__(self, **tokens: str) -> To[Q, R]:
        return To(self, self.name(**tokens))


@dataclass(frozen=True)
class StreamRpc(Subject, Generic[Q, R]):
    request: type[Q]
    reply: type[R]
    queue: str | None = None

    def __call__(self, **tokens: str) -> To[Q, R]:
        return To(self, self.name(**tokens))


@dataclass(frozen=True)
class Event(Subject, Generic[Q]):
    message: type[Q]

    def __call__(self, **tokens: str) -> ToEvent[Q]:
        return ToEvent(self, self.name(**tokens))


@dataclass(frozen=True)
class Log(Subject, Generic[Q]):
    message: type[Q]
    stream: str

    def __call__(self, **tokens: str) -> ToEvent[Q]:
        return ToEvent(self, self.name(**tokens))


@dataclass(frozen=True)
class Work(Subject, Generic[Q]):
    message: type[Q]
    stream: str
    durable: str
    ack_wait_s: float = 30.0
    """Whoever says nothing for so long while it works has died: another gets the message."""

    def __call__(self, **tokens: str) -> ToEvent[Q]:
        return ToEvent(self, self.name(**tokens))


@dataclass(frozen=True)
class Bulk(Subject):
    """Frames carry their own headers (bus/bulk_frames.py)."""


INFER = StreamRpc("pd.v1.infer.{model}", router.InferRequest, router.InferReply, queue="router")
EMBED = Rpc("pd.v1.embed.{model}", router.EmbedRequest, router.EmbedReply, queue="router")
FEATURES = Rpc("pd.v1.features.{model}", features.FeaturesRequest, features.FeaturesReply, queue="router")
FEATURE_SOURCE = Rpc("{subject}", features.SourceRequest, features.SourceReply)
"""A caller's own service, at the subject that the router's settings name: `To(FEATURE_SOURCE, subject)`."""
REF_STATS = Rpc("pd.v1.refstats.{router}", router.RefStatsWanted, router.RefStats)
"""To one router: what requests met, by ref, so that a canary can be held against stable."""
TOKENS = Event("pd.v1.tokens.{router}", router.TokenFrame)
CANCEL = Event("pd.v1.cancel", workers.Cancel)

PREFILL_RUN = Rpc("pd.v1.prefill.{worker}.run", prefill.PrefillRun, workers.Accepted)
PREFILL_RESEND = Rpc("pd.v1.prefill.{worker}.resend", workers.Resend, workers.ResendReply)
PREFILL_EMBED = Rpc("pd.v1.prefill.{worker}.embed", prefill.Embed, prefill.Embedded)
"""Prefill workers of an encoder serve nothing else."""
DECODE_RESERVE = Rpc("pd.v1.decode.{worker}.reserve", decode.Reserve, decode.Lease)
DECODE_RUN = Rpc("pd.v1.decode.{worker}.run", decode.DecodeRun, workers.Accepted)
DECODE_RESEND = Rpc("pd.v1.decode.{worker}.resend", workers.Resend, workers.ResendReply)
DECODE_ADOPT = Rpc("pd.v1.decode.{worker}.adopt", decode.Adopt, decode.Adopted)
DECODE_PAGES = Rpc("pd.v1.decode.{worker}.pages", decode.PagesWanted, decode.PagesFound)
"""Between decode workers, for answers that move (decode/moving.py)."""
DRAIN = Rpc("pd.v1.{service}.{id}.drain", workers.Drain, workers.Draining)
"""To one process of any kind."""

KVINDEX = Event("pd.v1.kvindex.{worker}", router.KvIndex)
"""From prefill and decode workers, so that routers send a request to where its prefix is."""
KVINDEX_SNAPSHOT = Rpc("pd.v1.kvindex.{worker}.snapshot", router.KvIndexWanted, router.KvIndexSnapshot)

WEIGHT_BLOCKS = Rpc(
    "pd.v1.weights.{model}.{shard}.blocks",
    param_server.BlocksRequest,
    param_server.BlocksReply,
    queue="owners",
)
"""To whichever owner of a virtual shard (0 to 63) holds all of it."""
WEIGHT_BLOCKS_OF = Rpc("pd.v1.weights.{model}.at.{server}.blocks", param_server.BlocksRequest, param_server.BlocksReply)
"""To one named replica, while it is not in the shard's group or the group answered `not_found`."""
WEIGHTS_STAGE = Rpc("pd.v1.weights.{model}.at.{server}.stage", param_server.Stage, param_server.StageReply)
WEIGHTS_PREPARE = Rpc("pd.v1.weights.{model}.at.{server}.prepare", param_server.Prepare, param_server.PrepareReply)
"""Updates go to each owner by name: they have to be on all of them."""
UPDATE_JOIN = Rpc("pd.v1.weights.{model}.tx.{tx}.join", updates.PartJoin, updates.PartTerms)
UPDATE_STAGED = Rpc("pd.v1.weights.{model}.tx.{tx}.staged", updates.PartStaged, updates.PartTaken)
"""To part 0 of an update of several processes. `tx`: the id that they share."""

ROWS = Log("pd.v1.rows.{model}.{table}", rows.RowsUpdate, stream="PD_ROWS")
"""The row log of a sparse table."""
TABLE_READ = Rpc("pd.v1.tables.{model}.at.{server}.read", rows.TableRead, rows.TableRows)
"""By name: a reader has to know how far each replica is."""
WEIGHTS_HEAT = Rpc("pd.v1.weights.{model}.at.{server}.heat", param_server.HeatWanted, param_server.HeatReply)
"""For people and tools: what of the model is read and changed most."""

CACHE_GET = Rpc("pd.v1.cache.{node}.get", cache.CacheGet, cache.CacheGetReply)
CACHE_PUT = Rpc("pd.v1.cache.{node}.put", cache.CachePut, cache.CachePutReply)
CACHE_DELETE = Rpc("pd.v1.cache.{node}.delete", cache.CacheDelete, cache.CacheDeleteReply)
CACHE_SCAN = Rpc("pd.v1.cache.{node}.scan", cache.CacheScan, cache.CacheScanReply)

PRESENCE = Event("pd.v1.presence.{service}.{id}", presence.Card)
DEBUG = Rpc("pd.v1.debug.{service}.{id}", debug.HoldingsWanted, debug.Holdings)
"""To one process: what it holds."""
CHANGELOG = Log("pd.v1.changelog.{model}", changelog.LogEntry, stream="PD_CHANGELOG")
CHECKPOINTS = Log("pd.v1.checkpoints.{model}", changelog.Checkpoint, stream="PD_CHECKPOINTS")
"""The newest two of each change log."""
BRANCH = Log("pd.v1.branch.{model}.{branch}", updates.BranchEntry, stream="PD_BRANCHES")
"""Staging branches: what is sealed is purged."""
INVALIDATED = Log("pd.v1.invalidated", workers.Invalidated, stream="PD_INVALIDATED")
DELETES = Work("pd.v1.deletes.{model}", invalidator.DueDelete, stream="PD_DELETES", durable="invalidator")

JOBS = Work("pd.v1.jobs.{model}", jobs.JobWork, stream="PD_JOBS", durable="router", ack_wait_s=5.0)
"""Put in by routers only, which know whose it is: a caller asks them by JOB_SUBMIT."""
BATCH_JOBS = Work("pd.v1.batchjobs.{model}", jobs.BatchWork, stream="PD_BATCHJOBS", durable="router", ack_wait_s=5.0)
RESULTS = Log("pd.v1.results.{tenant}.{job}", jobs.JobEntry, stream="PD_RESULTS")
BATCHES = Log("pd.v1.batches.{tenant}.{batch}", jobs.BatchEntry, stream="PD_BATCHES")
FILES = Log("pd.v1.files.{tenant}.{file}", jobs.FileEntry, stream="PD_FILES")
JOB_PROGRESS = Event("pd.v1.jobs.progress.{tenant}.{job}", jobs.JobProgress)
"""Of jobs and of batches, among routers; a caller asks one of them by JOB_WATCH."""
JOB_SUBMIT = Rpc("pd.v1.jobs.{model}.submit", jobs.JobSubmit, jobs.JobTold, queue="router")
JOB_STATE = Rpc("pd.v1.jobs.{model}.state", jobs.JobWanted, jobs.JobTold, queue="router")
JOB_CANCEL = Rpc("pd.v1.jobs.{model}.cancel", jobs.JobWanted, jobs.JobTold, queue="router")
JOB_WATCH = StreamRpc("pd.v1.jobs.{model}.watch", jobs.JobWanted, jobs.JobTold, queue="router")
"""Its state, again and again as it changes, until it has ended."""

KV = Bulk("pd.v1.kv.{worker}.{session}.{attempt}")
"""Prefill to decode; the lease names it."""
TRANSFER = Bulk("pd.v1.bulk.{address}.{stream}")
"""Everything else that is bulk, to the bulk address of its receiver."""


def transfer_to(address: str, stream: str) -> str:
    """The subject of a stream that a peer named. Raises InvalidRequest where it named none."""
    if not address or not stream:
        raise InvalidRequest("a bulk stream is named by an address and a number")
    return TRANSFER.name(address=address, stream=stream)


CREDIT = Event("pd.v1.credit.{address}", bulk.Credit)
"""To the bulk address of a sender."""


def all_subjects() -> dict[str, Subject]:
    """Every subject of this module by its name here."""
    return {name: value for name, value in globals().items() if isinstance(value, Subject)}
