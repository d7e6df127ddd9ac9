"""What a job is named, what may be done with it, and what follows. Pure: times are passed in.

A job is accepted by an entry in the log of results that is appended only if there is none, and ended by one that is
appended only if nothing came after the entry read last. So however many routers work on it, after whatever crash, it
has one result. The queue only says that there may be work: a message that comes twice, or too late, finds the result.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from pdbus.canonical import content_digest, digest
from pdbus.errors import InvalidRequest
from pdbus.messages.common import Digest
from pdbus.messages.jobs import JobEndpoint, JobEntry, JobSpec

LIFE_S: Final = 24 * 3600.0
"""From submission: a job that has not ended by then has failed."""
MOST_DELIVERIES: Final = 10
"""So many routers may die, or be stopped, in the middle of a job."""
LONGEST_KEY: Final = 255
Verdict = Literal["run", "drop", "expired", "given_up"]


def job_id(tenant: str, key: str) -> str:
    """Of the job that is submitted under an idempotency key. Raises InvalidRequest for an unusable key."""
    if not 0 < len(key) <= LONGEST_KEY:
        raise InvalidRequest(f"an idempotency key has 1 to {LONGEST_KEY} characters", param="Idempotency-Key")
    return "job-" + digest(["pdbus job", tenant, key])[:16].hex()


def canonical_body(body: dict[str, Any]) -> bytes:
    """Equal for equal bodies, however they were written."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def body_digest(endpoint: JobEndpoint, body: bytes) -> Digest:
    return digest(["pdbus job body", endpoint, content_digest(body)])


def verdict(work: JobSpec, last: JobEntry | None, deliveries: int, now_s: float) -> Verdict:
    """What to do about a message of the queue. `last`: the log's last entry of that job.

    A message whose body lost against another under the same key is nobody's job."""
    if last is not None and (last.final or last.spec.digest != work.digest):
        return "drop"
    if now_s >= work.expires_s:
        return "expired"
    if deliveries > MOST_DELIVERIES:
        return "given_up"
    return "run"
