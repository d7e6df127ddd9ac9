"""How each stream of JetStream is kept: for how long, how much of it, and what gives way when it is full."""

from __future__ import annotations

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from pdbus.subjects import (
    ANY,
    BATCH_JOBS,
    BATCHES,
    BRANCH,
    CHANGELOG,
    CHECKPOINTS,
    DELETES,
    FILES,
    INVALIDATED,
    JOBS,
    RESULTS,
    ROWS,
)

BRANCH_ENTRIES = 32_768
"""Unsealed, of one branch; the next one is refused."""
_BRANCH_BYTES = 4 << 30
"""Of all branches together."""
JOBS_KEPT_S = 48 * 3600
"""A job runs within a day, and its result is readable for another; what waits for it is never kept longer."""


def stream_configs() -> list[StreamConfig]:
    """How each stream is kept."""
    return [
        StreamConfig(
            name=CHANGELOG.stream,
            subjects=[CHANGELOG.name(model=ANY)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            deny_delete=True,
            deny_purge=True,
            duplicate_window=600,
        ),
        StreamConfig(
            name=CHECKPOINTS.stream,
            subjects=[CHECKPOINTS.name(model=ANY)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_msgs_per_subject=2,
            duplicate_window=600,
        ),
        StreamConfig(
            name=BRANCH.stream,
            subjects=[BRANCH.name(model=ANY, branch=ANY)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_msgs_per_subject=BRANCH_ENTRIES,
            discard_new_per_subject=True,
            max_bytes=_BRANCH_BYTES,
            discard=DiscardPolicy.NEW,  # a push that has no room is refused, and pushes before it stay
            duplicate_window=600,
        ),
        StreamConfig(
            name=INVALIDATED.stream,
            subjects=[INVALIDATED.name()],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_age=24 * 3600,  # a cache that was away for longer starts empty
            duplicate_window=600,
        ),
        StreamConfig(
            name=DELETES.stream,
            subjects=[DELETES.name(model=ANY)],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_bytes=64 << 20,
            discard=DiscardPolicy.NEW,  # a reminder that has no room is an error, never a silent loss
            duplicate_window=600,
        ),
        StreamConfig(
            name=ROWS.stream,
            subjects=[ROWS.name(model=ANY, table=ANY)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_bytes=1 << 30,  # the server sets so much disk aside; some 15 million rows of 16 numbers
            discard=DiscardPolicy.NEW,  # full, it takes no update before old ones are sealed and purged
            duplicate_window=120,
        ),
        *(
            StreamConfig(
                name=queue.stream,
                subjects=[queue.name(model=ANY)],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                max_age=JOBS_KEPT_S,
                max_bytes=512 << 20,
                discard=DiscardPolicy.NEW,  # what was accepted stays; more is refused
                duplicate_window=600,
            )
            for queue in (JOBS, BATCH_JOBS)
        ),
        *(
            StreamConfig(
                name=kept.stream,
                subjects=[kept.name(**dict.fromkeys(kept.wanted, ANY))],
                retention=RetentionPolicy.LIMITS,
                storage=StorageType.FILE,
                max_age=JOBS_KEPT_S,
                max_bytes=1 << 30,
                discard=DiscardPolicy.NEW,  # a result is not given up before its time for a newer one
                allow_rollup_hdrs=kept is not RESULTS,  # a deleted file's content goes at once
                duplicate_window=120,
            )
            for kept in (RESULTS, BATCHES, FILES)
        ),
    ]
