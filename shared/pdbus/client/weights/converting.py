"""What a caller asks of the param-servers that make versions in other precisions."""

from __future__ import annotations

from pdbus.client.weights.terms import check_ref, me
from pdbus.client.weights.versions import Versions
from pdbus.context import Deadline
from pdbus.errors import InvalidRequest
from pdbus.messages.changelog import Convert, LogEntry
from pdbus.messages.common import Digest
from pdbus.model.convert import PRECISIONS
from pdbus.weights.history import History


class Converting(Versions):
    """Versions, and those in other precisions that the param-servers make of them."""

    async def convert(self, name: str, precision: str, *, ref: str | None = None, follow: bool = False) -> Convert:
        """Asks the param-servers for a version in another precision (fp16, bf16, int8, fp8), to head the line `ref`:
        by default that of `name` with the precision, such as `stable-int8`; none where `name` is no ref. With `follow`,
        now and whenever the line `name` has another head. Raises as `resolve`."""
        asked = asked_conversion(await self.history(), name, precision, ref, follow, me())
        if asked.ref:
            check_ref(asked.ref)
        await self._append(LogEntry(convert=asked))
        return asked

    async def converted(self, root: Digest, precision: str, timeout_s: float) -> Digest:
        """The version that was made of `root`, as soon as it is there. Raises DeadlineExceeded."""
        await self._ready()
        deadline = Deadline.after(timeout_s)
        await self._follower.wait_for(lambda history: history.derived(root, precision) is not None, deadline)
        return self._follower.history.conversions.made[root, precision]


def asked_conversion(
    history: History, name: str, precision: str, ref: str | None, follow: bool, author: str
) -> Convert:
    """The entry that asks for it. Raises NotFound for a version that there isn't, InvalidRequest."""
    if precision not in PRECISIONS:
        raise InvalidRequest(f"versions are made in {', '.join(PRECISIONS)}, not in {precision}", param="precision")
    is_line = name in history.refs or history.head(name) is not None
    line = f"{name}-{precision}" if is_line and ref is None else ref or ""
    if line == name:
        raise InvalidRequest(f"what is made of {name} needs another name", param="ref")
    if follow:
        if not is_line:
            raise InvalidRequest(f"{name} is no ref: only a ref's versions can be followed", param="name")
        return Convert(precision, line, author, line=name)
    root = history.head(name) or history.resolve(name)
    if root in history.conversions.sources:
        raise InvalidRequest(f"version {root.hex()[:12]} was made of another one: convert that", param="name")
    return Convert(precision, line, author, root=root)
