"""The change log entries that a param-server appends: itself as a member, its checkpoint as a commit, the ref to it.

A checkpoint is a wish: serve this. It is committed, as the head of the line `stable`, when the wish is new: its root is
in no commit yet, or this server wished for another one before. A server that restarts with an old checkpoint wishes
nothing new, so it can't undo what was pushed or rolled back since. Two servers that wish for the same root at once make
one commit; for different ones, the later becomes the child of the earlier and is the head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdbus.bus.bus import Bus
from pdbus.context import Deadline, new_id
from pdbus.errors import Conflict, DeadlineExceeded, Unavailable
from pdbus.messages.changelog import Abort, Commit, LogEntry, Member, Ref
from pdbus.messages.common import Digest
from pdbus.messages.presence import WHOLE_PROMPTS, Card
from pdbus.param_server.folder import read_json, write_json
from pdbus.param_server.store import BlockStore
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import History
from pdbus.weights.manifest import Manifest

log = logging.getLogger(__name__)

REF = "stable"


def is_new_wish(history: History, root: Digest, wished: Digest | None) -> bool:
    """Whether a checkpoint of `root` is to be committed; `wished` is what this server wished for before."""
    if history.head(REF) == root:
        return False
    return root not in history.roots or (wished is not None and wished != root)


def due_refs(history: History, prefill: Sequence[Card], decode: Sequence[Card]) -> Mapping[str, Digest]:
    """The refs that are to move now, and where to: heads that wait, and that workers can serve. These are one of each
    kind, or a decode worker that reads all prompts itself, or an encoder's prefill worker."""

    def ready(root: Digest) -> bool:
        reading, writing = ([card for card in cards if _serves(card, root)] for cards in (prefill, decode))
        if any(card.embeds for card in reading):
            return True
        return bool(writing) and (bool(reading) or any(card.local_tokens >= WHOLE_PROMPTS for card in writing))

    return {line: head for line, head in history.pending.items() if ready(head)}


def _serves(card: Card, root: Digest) -> bool:
    return card.state == "ready" and root in card.roots


def changed_layers(manifest: Manifest, parent: Manifest | None) -> tuple[tuple[str, Digest], ...]:
    """Layers whose digests differ from the parent's; all of them where the parent isn't known."""
    known = {layer.name: layer.digest for layer in parent.layers} if parent else {}
    return tuple((layer.name, layer.digest) for layer in manifest.layers if known.get(layer.name) != layer.digest)


class LogWriter:
    """Appends what this server has to say."""

    def __init__(self, bus: Bus, model: str, server: str, follower: HistoryFollower) -> None:
        self._bus = bus
        self._to = CHANGELOG(model=model)
        self._server = server
        self._follower = follower

    @property
    def _author(self) -> str:
        return f"param-server {self._server}"

    async def join(self, deadline: Deadline) -> None:
        """Becomes a member, unless it is one already."""
        while self._server not in self._follower.history.members:
            await self._append(LogEntry(member=Member(self._server, "join")), None, deadline)

    async def commit(
        self, manifest: Manifest, store: BlockStore, message: str, precision: str, deadline: Deadline
    ) -> None:
        """Commits the checkpoint's manifest if the wish is new, and remembers it in the store's folder."""
        remembered = _Wish(store.folder)
        tx = new_id()
        while is_new_wish(history := self._follower.history, manifest.root, remembered.read()):
            head = history.head(REF)
            layers = changed_layers(manifest, store.manifest(head) if head else None)
            commit = Commit(tx, manifest.root, head, self._author, message, layers, precision, REF)
            await self._append(LogEntry(commit=commit), self._follower.seq, deadline)
        remembered.write(manifest.root)

    async def move_ref(self, name: str, root: Digest, deadline: Deadline) -> None:
        """Moves a ref to its line's head, unless the log has moved on since it was found due. Its share stays."""
        share = self._follower.history.shares.get(name)
        ref = Ref(name, root, self._author, "workers have it ready", share)
        await self._append(LogEntry(ref=ref), self._follower.seq, deadline)

    async def lead(self, name: str, root: Digest, why: str, deadline: Deadline) -> None:
        """Makes the version the head of a line, unless the log has moved on; the ref follows when workers are ready."""
        ref = Ref(name, root, self._author, why, self._follower.history.shares.get(name), now=False)
        await self._append(LogEntry(ref=ref), self._follower.seq, deadline)

    async def abort(self, tx: str, reason: str, deadline: Deadline) -> None:
        """Ends a transaction that has no commit by its deadline; where one comes first, the abort is void."""
        await self._append(LogEntry(abort=Abort(tx, reason, DeadlineExceeded.code)), None, deadline)

    async def _append(self, entry: LogEntry, expected_seq: int | None, deadline: Deadline) -> None:
        """Appends and follows the log up to its end. Whether the entry got in, the history tells: a failed compare and
        an outcome that got lost look the same to the caller, who decides anew by what is in the log then."""
        deadline.check("the change log could be written")
        try:
            await self._bus.logs.append(
                self._to, entry, expected_seq=expected_seq, message_id=entry.message_id, deadline=deadline
            )
        except Conflict:
            log.info("the change log moved on; looking again")
        except Unavailable as error:
            log.warning("the change log may not have taken an entry: %s", error.message)
        await self._follower.caught_up(deadline)


class _Wish:
    """What this server last wished for, kept across restarts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "wish.json"

    def read(self) -> Digest | None:
        root = read_json(self._path).get("root")
        return bytes.fromhex(root) if isinstance(root, str) else None

    def write(self, root: Digest) -> None:
        if self.read() != root:
            write_json(self._path, {"root": root.hex()})
