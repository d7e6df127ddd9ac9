"""What of a History goes into a checkpoint, and when one is due. Pure."""

from __future__ import annotations

from pdbus.messages.changelog import Checkpoint, KeptVersion
from pdbus.weights.history import History
from pdbus.weights.log_state import LIVE_S, Version

EVERY = 1000
"""Entries of the model's change log between two checkpoints."""
KEPT_S = 13 * 3600.0
"""Of versions that are dead: invalidators that were away for so long still find out what to delete."""
_MOST_VERSIONS = 8192
_MOST_COMMITS = 128
_MOST_GONE = 2048
_MOST_ENDED = 1024


def is_due(history: History, last: Checkpoint | None, log: str) -> bool:
    """Whether the change log of that birth has EVERY entries more than its last checkpoint tells of."""
    known = last.entries if last and last.log == log else 0
    return history.entries - known >= EVERY


def checkpoint_of(history: History, log: str, *, commits: int = _MOST_COMMITS) -> Checkpoint:
    """The state of `history`, which follows the log of that birth.

    All versions that live are in it, and of the dead the latest, as many as a message holds. Wanted ones bring their
    commits along, and so do the newest `commits`; those of others stay in the log, which nobody purges: it is the
    lineage of every answer that was ever given."""
    versions = list(history.roots.values())
    chosen = {version.root for version in _kept(history, versions)}
    live, conversions = history.live, history.conversions
    told = set(history.wanted).union(version.root for version in versions[len(versions) - commits :])
    return Checkpoint(
        log,
        history.seq,
        history.time_ns,
        history.entries,
        tuple(history.refs.items()),
        tuple(history.heads.items()),
        tuple(history.shares.items()),
        history.members,
        tuple(_told(version, version.root in told) for version in versions if version.root in chosen),
        history.ended[-_MOST_ENDED:],
        history.sealed,
        history.forgotten,
        tuple(_told(version, False) for version in list(history.gone.values())[-_MOST_GONE:]),
        conversions.asked(live),
        tuple((source, precision, root) for (source, precision), root in conversions.made.items() if root in live),
        tuple((root, *made_of) for root, made_of in conversions.sources.items() if root in live),
    )


def _kept(history: History, versions: list[Version]) -> list[Version]:
    def age_s(version: Version) -> float:
        return (history.time_ns - version.left.time_ns) / 1e9 if version.left else 0.0

    live = [version for version in versions if age_s(version) <= LIVE_S]
    dead = sorted((version for version in versions if LIVE_S < age_s(version) <= KEPT_S), key=age_s)
    return live + dead[: max(_MOST_VERSIONS - len(live), 0)]


def _told(version: Version, with_commit: bool) -> KeptVersion:
    left = (version.left.seq, version.left.time_ns) if version.left else None
    at = (version.at.seq, version.at.time_ns)
    return KeptVersion(version.root, at, left, version.commit if with_commit else None)
