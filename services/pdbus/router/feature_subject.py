"""A caller's own service as a source of features: any responder at a NATS subject, without this library.

    request  {"keys": ["item-1", "item-2"]}                  msgpack; without keys it asks for the version only
    reply    {"version": "7", "values": [bytes, None]}       one value for each key; None: no such item

Its version is what validates cached entries. It is known for `CONFIRMED_WITHIN_S`, and asked for again after that:
so for no longer an older version is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from pdbus.bus.bus import Bus
from pdbus.caching.feature_key import FeatureKey, named_key, source_root
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, InvalidRequest, NotFound, TooLarge
from pdbus.messages.features import LONGEST_KEY, MOST_KEYS, FeaturesReply, FeaturesRequest, SourceReply, SourceRequest
from pdbus.router.cache_control import CacheControl
from pdbus.router.feature_source import Feature
from pdbus.router.features import FeatureCache
from pdbus.router.identity import Identities
from pdbus.router.quotas import Quotas
from pdbus.subjects import FEATURE_SOURCE, To

CONFIRMED_WITHIN_S = 5.0
_KEYS_AT_ONCE = 128
_MESSAGES_AT_ONCE = 4


class SubjectSource:
    """A FeatureSource whose items are the caller's own keys."""

    kind = "subject"

    def __init__(self, bus: Bus, model: str, subject: str) -> None:
        self.root = source_root(model, subject)
        self._bus, self._model, self._subject = bus, model, subject
        self._to: To[SourceRequest, SourceReply] = To(FEATURE_SOURCE, subject)
        self._version = ""
        self._told_s = float("-inf")
        """When the last answer that told the version was asked for."""
        self._asking = asyncio.Lock()

    def key(self, item: str) -> FeatureKey:
        return named_key(model=self._model, subject=self._subject, item=item)

    def valid(self, value: bytes) -> bool:
        return True

    async def version(self, ctx: RequestContext) -> str:
        """Raises what the service does; Unavailable where nobody serves the subject."""
        try:
            async with ctx.deadline.timeout(), self._asking:
                if time.monotonic() - self._told_s > CONFIRMED_WITHIN_S:
                    await self._ask((), ctx)
        except TimeoutError:
            raise DeadlineExceeded("the feature service did not tell its version in time") from None
        return self._version

    async def fetch(self, items: Sequence[str], ctx: RequestContext) -> Sequence[Feature]:
        at_once = asyncio.Semaphore(_MESSAGES_AT_ONCE)

        async def ask(keys: tuple[str, ...]) -> list[Feature]:
            async with at_once:
                reply = await self._ask(keys, ctx)
            return [Feature(reply.version, value) for value in reply.values]

        parts = [tuple(items[at : at + _KEYS_AT_ONCE]) for at in range(0, len(items), _KEYS_AT_ONCE)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(part)) for part in parts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [feature for task in tasks for feature in task.result()]

    async def _ask(self, keys: tuple[str, ...], ctx: RequestContext) -> SourceReply:
        asked_s = time.monotonic()
        # No tenant: what it answers is kept for all of them.
        reply = await self._bus.call(self._to, SourceRequest(keys), RequestContext(ctx.deadline, ctx.request_id))
        if len(reply.values) != len(keys):
            raise Corrupt(f"the feature service answered {len(reply.values)} of {len(keys)} keys")
        if asked_s >= self._told_s:
            self._version, self._told_s = reply.version, asked_s
        return reply


class FeaturesHandler:
    """The handler of the FEATURES subject. `source`: None where the settings name none."""

    def __init__(
        self, source: SubjectSource | None, features: FeatureCache, identities: Identities, quotas: Quotas
    ) -> None:
        self._source, self._features = source, features
        self._identities, self._quotas = identities, quotas

    async def __call__(self, message: FeaturesRequest, ctx: RequestContext) -> FeaturesReply:
        identity = self._identities.of(ctx.api_key)
        if self._source is None:
            raise NotFound("no feature service is set here (PDBUS_FEATURE_SUBJECT)")
        if len(message.keys) > MOST_KEYS:
            raise TooLarge(f"at most {MOST_KEYS} keys in one request", param="keys")
        if any(not 1 <= len(key) <= LONGEST_KEY for key in message.keys):
            raise InvalidRequest(f"a key has 1 to {LONGEST_KEY} characters", param="keys")
        own, cache = replace(ctx, tenant=identity.tenant, api_key=None), CacheControl.parse(message.cache_control)
        with self._quotas.hold(identity, 1):
            found = await self._features.get(self._source, message.keys, own, cache)
        return FeaturesReply(found.version, found.values, found.hits)
