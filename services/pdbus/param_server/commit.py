"""The change log entries that a param-server appends: itself as a member, its checkpoint as a commit, the ref to it.

A checkpoint is a wish: serve this. It is committed, as the head of the line `stable`, when the wish is new: this server
wished for another one before, or for none yet and nobody else ever wished for this one. A server that restarts with an
old checkpoint wishes nothing new, so it can't undo what was pushed or rolled back since. Two servers that wish for the
same root at once make one commit; for different ones, the later becomes the child of the earlier and is the head.

The wish says nothing of sparse tables: those of the line's head stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from pdbus.bus.bus import Bus
from pdbus.context import Deadline, RequestContext, new_id
from pdbus.errors import Conflict, DeadlineExceeded, Unavailable
from pdbus.messages.changelog import Abort, Commit, LogEntry, Member, Ref
from pdbus.messages.common import Digest
from pdbus.messages.presence import WHOLE_PROMPTS, Card
from pdbus.param_server.folder import read_digest, read_json, write_json
from pdbus.param_server.holdings import add_manifests
from pdbus.param_server.store import BlockStore
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import History
from pdbus.weights.manifest import Manifest
from pdbus.weights.tables import with_tables

log = logging.getLogger(__name__)

REF = "stable"


def is_new_wish(history: History, root: Digest, wished: Digest | None) -> bool:
    """Whether a checkpoint of `root` is to be committed, as far as this history goes back; `wished` is what this server
    wished for before."""
    if history.head(REF) is None:
        return True
    if wished is not None:
        return wished != root
    made = (version.commit for version in history.roots.values())
    return root not in history.roots and not any(commit and commit.checkpoint == root for commit in made)


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

    def __init__(self, bus: Bus, model: str, server: str, follower: HistoryFollower, reader: BlockReader) -> None:
        self._bus = bus
        self._reader = reader
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

    async def commit(self, manifest: Manifest, store: BlockStore, message: str, deadline: Deadline) -> None:
        """Commits the checkpoint's manifest if the wish is new, and remembers it in the store's folder.

        Raises DeadlineExceeded, also where the tables of the line's head can't be known."""
        remembered = Wish(store.folder, self._follower.born)
        tx = new_id()
        while self._follower.history.is_open(tx) and await self._is_new(manifest.root, remembered.read()):
            head, seq = self._follower.history.head(REF), self._follower.seq
            parent = await self._manifest(head, store, deadline) if head else None
            whole = with_tables(manifest, parent) if parent else manifest
            if whole.root == head:
                break
            await asyncio.to_thread(_keep, store, whole)
            layers, checkpoint = changed_layers(whole, parent), manifest.root if whole.root != manifest.root else None
            commit = Commit(tx, whole.root, head, self._author, message, layers, ref=REF, checkpoint=checkpoint)
            await self._append(LogEntry(commit=commit), seq, deadline)
        remembered.write(manifest.root)

    async def _is_new(self, root: Digest, wished: Digest | None) -> bool:
        """A history that begins with a checkpoint of the log does not tell of all that came before: the log does."""
        history = self._follower.history
        if not is_new_wish(history, root, wished):
            return False
        if wished is None and history.head(REF) is not None:
            async with aclosing(self._bus.logs.between(self._to, 0, self._follower.seq)) as records:
                async for record in records:
                    if (commit := record.entry.commit) and root in (commit.root, commit.checkpoint):
                        return False
        return True

    async def _manifest(self, root: Digest, store: BlockStore, deadline: Deadline) -> Manifest:
        """From this server's disk, or from another one's. Raises DeadlineExceeded."""
        here = await asyncio.to_thread(store.manifest, root)
        return here or await self._reader.manifest(root, RequestContext(deadline))

    async def move_ref(self, name: str, root: Digest, deadline: Deadline) -> None:
        """Moves a ref to its line's head, unless the log has moved on since it was found due. Its share stays."""
        if self._follower.history.pending.get(name) != root:
            return
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


class Wish:
    """What this server last wished for, kept across restarts. `born`: the log's; of a lost one no wish is left."""

    def __init__(self, folder: Path, born: str) -> None:
        self._path = folder / "wish.json"
        self._born = born

    def read(self) -> Digest | None:
        match read_json(self._path):
            case {"root": str(root), **rest} if rest.get("log", self._born) == self._born:
                return read_digest(root)
        return None

    def write(self, root: Digest) -> None:
        if self.read() != root:
            write_json(self._path, {"root": root.hex(), "log": self._born})


def _keep(store: BlockStore, manifest: Manifest) -> None:
    """Every server has all manifests, and this one may be the first."""
    with store.writing() as pack:
        add_manifests(manifest, store, pack)
