"""permissions.py: nothing is forgotten, and nobody has more than somebody looked at."""

from __future__ import annotations

import pytest

from pdbus.bus.memory import matches
from pdbus.grants import GRANTS, SOURCE, Grant
from pdbus.permissions import ANSWERS, LEAVES, permissions
from pdbus.subjects import CREDIT, DEBUG, Log, Subject, Work, all_subjects

INBOX = "_INBOX.UABC"
SERVICES = [kind for kind, grant in GRANTS.items() if grant.service]


def _sent(grant: Grant) -> set[int]:
    return {id(subject) for subject in (*grant.calls, *grant.sends, *grant.appends, *grant.puts)}


def _heard(grant: Grant) -> set[int]:
    return {id(subject) for subject in (*grant.serves, *grant.hears, *grant.follows, *grant.takes)}


@pytest.mark.parametrize(("name", "subject"), all_subjects().items())
def test_every_subject_has_somebody_who_sends_and_somebody_who_listens(name: str, subject: Subject) -> None:
    """A new one comes with an entry in GRANTS."""
    if subject in (CREDIT, DEBUG):
        return  # follows from bulk streams, and from being a service
    assert any(id(subject) in _sent(grant) for grant in GRANTS.values()), f"nobody may send to {name}"
    assert any(id(subject) in _heard(grant) for grant in GRANTS.values()), f"nobody may listen to {name}"


@pytest.mark.parametrize("kind", GRANTS)
def test_no_kind_has_a_wildcard_over_subjects_of_others(kind: str) -> None:
    allowed = permissions(kind, INBOX, "own.features")
    for pattern in (*allowed.publish, *allowed.subscribe):
        assert pattern not in (">", "*", "pd.>", "pd.v1.>", "$JS.>", "$JS.API.>", "$SYS.>")
        if pattern.endswith(">"):
            inboxes = pattern == "_INBOX.>" and pattern in allowed.publish and kind == "router"
            own = (f"{INBOX}.", "$SRV.", "$JS.ACK.PD_", "$JS.FC.PD_", "$JS.API.CONSUMER.CREATE.PD_")
            assert inboxes or pattern.startswith(own)


@pytest.mark.parametrize("kind", GRANTS)
def test_nobody_deletes_what_a_log_keeps(kind: str) -> None:
    streams = {subject.stream for subject in all_subjects().values() if isinstance(subject, Log | Work)}
    verbs = ("STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.RESTORE", "STREAM.LEADER.STEPDOWN")
    for wanted in (f"$JS.API.{verb}.{stream}" for verb in verbs for stream in streams):
        if kind == "operator" and wanted in ("$JS.API.STREAM.PURGE.PD_BRANCHES", "$JS.API.STREAM.PURGE.PD_ROWS"):
            continue  # of what was sealed: those who push are the ones who seal
        assert not any(matches(pattern, wanted) for pattern in permissions(kind, INBOX).publish)


def test_a_caller_asks_and_nothing_else() -> None:
    allowed = permissions("client", INBOX)
    jobs = [f"pd.v1.jobs.*.{verb}" for verb in ("cancel", "state", "submit", "watch")]
    assert allowed.publish == ("pd.v1.embed.*", "pd.v1.features.*", "pd.v1.infer.*", *jobs)
    assert allowed.subscribe == (f"{INBOX}.>",)
    assert allowed.replies == LEAVES


def test_nobody_serves_by_the_few_seconds_of_a_reader() -> None:
    for kind, grant in GRANTS.items():
        replies = permissions(kind, INBOX).replies
        assert not grant.serves or kind == "router" or (replies and replies.seconds == ANSWERS.seconds)


def test_who_commits_is_a_short_list() -> None:
    able = {kind for kind in GRANTS if "pd.v1.changelog.*" in permissions(kind, INBOX).publish}
    assert able == {"param_server", "operator"}


def test_only_routers_touch_jobs_their_results_and_files() -> None:
    """A caller asks a router, which knows whose they are: nobody can put in, read or end what is another's."""
    logs = ("pd.v1.results.t.j", "pd.v1.batches.t.b", "pd.v1.files.t.f")
    for name in ("pd.v1.jobs.m", "pd.v1.jobs.progress.t.j", *logs):
        for kind in GRANTS.keys() - {"router"}:
            allowed = permissions(kind, INBOX)
            assert not any(matches(pattern, name) for pattern in (*allowed.publish, *allowed.subscribe))
            for stream in ("PD_JOBS", "PD_RESULTS", "PD_BATCHES", "PD_FILES"):
                assert f"$JS.API.STREAM.MSG.GET.{stream}" not in allowed.publish


def test_no_service_changes_how_another_s_stream_is_kept() -> None:
    """By that it could empty it, or have the server copy a tenant's files to where it listens."""
    own = {"param_server": {"PD_CHANGELOG", "PD_CHECKPOINTS"}, "invalidator": {"PD_INVALIDATED", "PD_DELETES"}}
    verb = "$JS.API.STREAM.UPDATE."
    for kind in GRANTS.keys() - {"operator"}:
        able = {p.removeprefix(verb) for p in permissions(kind, INBOX).publish if p.startswith(verb)}
        assert able == own.get(kind, set())


def test_presence_is_told_of_oneself() -> None:
    for kind in SERVICES:
        told = [pattern for pattern in permissions(kind, INBOX).publish if pattern.startswith("pd.v1.presence.")]
        assert told == [f"pd.v1.presence.{kind}.*"]


def test_the_subject_of_a_callers_own_service_is_the_one_that_was_named_or_none() -> None:
    for kind in ("router", SOURCE):
        without, named = permissions(kind, INBOX), permissions(kind, INBOX, "shop.features")
        added = {*named.publish, *named.subscribe} - {*without.publish, *without.subscribe}
        assert added == {"shop.features"}
        assert "*" not in {*without.publish, *without.subscribe}
