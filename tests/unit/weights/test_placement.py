from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdbus.weights.blocks import SHARDS, shard_of
from pdbus.weights.placement import duties, owners, ranked

members = st.sets(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6), max_size=6)


@given(members)
def test_each_shard_has_two_owners_or_as_many_as_there_are_members(servers: set[str]) -> None:
    for shard in range(SHARDS):
        assert len(set(owners(shard, servers))) == min(2, len(servers))
        assert set(ranked(shard, servers)) == servers


@given(members, st.text("abc", min_size=1, max_size=3))
def test_a_new_member_takes_shards_only_for_itself(servers: set[str], new: str) -> None:
    for shard in range(SHARDS):
        before, after = owners(shard, servers), owners(shard, servers | {new})
        assert set(after) <= {*before, new}


def test_three_members_share_the_shards_about_evenly() -> None:
    load = Counter(server for shard in range(SHARDS) for server in owners(shard, ["a", "b", "c"]))
    assert min(load.values()) >= 32
    assert owners(0, ["a", "b", "c"]) == ("c", "a")  # golden: every process must agree


@given(members, st.data())
def test_every_shard_is_held_by_someone_present(servers: set[str], data: st.DataObject) -> None:
    present = data.draw(st.sets(st.sampled_from(sorted(servers)))) if servers else set()
    if present:
        held = set().union(*(duties(server, servers, present) for server in present))
        assert held == set(range(SHARDS))


@given(members, st.data())
def test_presence_only_adds_duties(servers: set[str], data: st.DataObject) -> None:
    if servers:
        me = data.draw(st.sampled_from(sorted(servers)))
        present = data.draw(st.sets(st.sampled_from(sorted(servers))))
        assert duties(me, servers, present) >= duties(me, servers, servers)


def test_a_server_outside_the_membership_has_no_duties_while_members_are_present() -> None:
    assert duties("x", ["a"], ["a"]) == frozenset()


def test_one_large_matrix_is_spread_over_all_members() -> None:
    for count in (2, 3, 4, 6):
        servers = [f"param-server-{number}" for number in range(count)]
        first = Counter(
            owners(shard_of("model.layers.7.mlp.up_proj.weight", index), servers)[0] for index in range(600)
        )
        assert set(first) == set(servers)
        assert max(first.values()) < 2 * 600 / count
