"""Versions in other precisions, as the change log asks for them and tells of them. Pure; a part of History.

A conversion is asked for once, of one version, or for every head of a line from then on. What was made of what, commits
tell: their `source` and `precision`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from pdbus.messages.changelog import Checkpoint, Commit, Convert, Ref
from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class Due:
    """A version that shall be made of `root`, or, where it was made before, become the head of `ref`."""

    root: Digest
    precision: str
    ref: str


class Conversions:
    """Mutable; History alone changes it."""

    def __init__(self) -> None:
        self.made: dict[tuple[Digest, str], Digest] = {}
        """(version in fp32, precision) -> the version made of it last, whether or not that still lives."""
        self.sources: dict[Digest, tuple[Digest, str]] = {}
        """The other way round: what a version was first made of, and its precision."""
        self.following: dict[str, Convert] = {}
        """By the ref that they keep."""
        self._once: dict[Due, None] = {}

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> Self:
        """As they were when the checkpoint was made, as far as that matters from then on."""
        self = cls()
        for convert in checkpoint.conversions:
            self.ask(convert)
        self.made = {(source, precision): root for source, precision, root in checkpoint.derived}
        self.sources = {root: (source, precision) for root, source, precision in checkpoint.sources}
        return self

    def asked(self, live: Collection[Digest]) -> tuple[Convert, ...]:
        """What `restored` asks again: what shall be made once of versions that live, then what follows a line."""
        once = (Convert(due.precision, due.ref, "", root=due.root) for due in self._once if due.root in live)
        return (*once, *self.following.values())

    def due(self, heads: Mapping[str, Digest], live: Collection[Digest]) -> tuple[Due, ...]:
        """What is asked for and isn't there. `heads`: of lines; `live`: the versions that are."""
        asked = dict(self._once)
        for ref, follow in self.following.items():
            head = heads.get(follow.line)
            if head is not None and head not in self.sources and not self._heads(heads, ref, head, follow.precision):
                asked[Due(head, follow.precision, ref)] = None
        return tuple(due for due in asked if due.root in live and (due.ref or self._made(due) not in live))

    def ask(self, convert: Convert) -> None:
        if convert.root is not None:
            self._once[Due(convert.root, convert.precision, convert.ref)] = None
        elif convert.line and convert.ref and convert.line != convert.ref:
            self.following[convert.ref] = convert

    def committed(self, commit: Commit) -> None:
        if commit.source is None:
            return
        self.made[commit.source, commit.precision] = commit.root
        self.sources.setdefault(commit.root, (commit.source, commit.precision))
        self._once.pop(Due(commit.source, commit.precision, commit.ref), None)

    def moved(self, ref: Ref) -> None:
        """A ref that is removed is kept no longer; one that was moved to a version has it, whoever moved it."""
        if ref.root is None:
            self.following.pop(ref.name, None)
        elif ref.root in self.sources:
            source, precision = self.sources[ref.root]
            self._once.pop(Due(source, precision, ref.name), None)

    def ended(self, root: Digest) -> None:
        """The version is no more, or was not: if a commit brings it, that alone tells what it was made of."""
        if self.sources.pop(root, None):
            self.made = {pair: made for pair, made in self.made.items() if made != root}
        for due in [due for due in self._once if due.root == root]:
            del self._once[due]

    def _made(self, due: Due) -> Digest | None:
        return self.made.get((due.root, due.precision))

    def _heads(self, heads: Mapping[str, Digest], ref: str, source: Digest, precision: str) -> bool:
        """Whether what was made of `source` is the head of `ref`."""
        made = self.made.get((source, precision))
        return made is not None and heads.get(ref) == made
