"""Weight updates and caches: each public fault of systems like this one, and what would show it here.

The table and its numbers: the second one of LESSONS.md.
"""

from __future__ import annotations

from tests.support.lessons import caught_by

AFTER_UPDATES = "integration/workers/test_prefix_after_updates"


def test_01_the_root_is_in_the_key():
    """lmdeploy#4917, NeMo-RL#4018, vllm#9744: KV survives an update, and is told as cached."""
    caught_by(AFTER_UPDATES, "a_prompt_is_cached_across_an_update_where_its_kv_is_the_same_and_only_there")
    caught_by("integration/workers/test_answers", "two_versions_are_served_side_by_side_and_never_mixed")


def test_02_every_tier_carries_the_root():
    """sglang#26792: the disk tier gives stale pages back."""
    caught_by("unit/cache/test_disk_tier", "another_life_serves_what_was_there_but_nothing_of_a_buried_root")
    caught_by(
        "integration/cache/test_cache_disk",
        "a_restart_serves_what_was_there_and_nothing_that_was_deleted_before_or_meanwhile",
    )
    caught_by("unit/caching/test_disk", "what_is_deleted_stays_so_in_the_next_life")


def test_03_what_is_not_done_is_no_success():
    """vllm#42694, #57970: a reset misses a store, `None` counts as done. Impossible: correctness needs no reset (keys
    carry the root); and a delete that a node does not confirm is not settled, but comes again."""
    caught_by("integration/invalidator/test_invalidator", "a_crash_at_any_step_loses_and_repeats_nothing")
    caught_by("unit/invalidator/test_audit", "a_planted_violation_is_found_and_told")
    caught_by("unit/peers_cache/test_cache_ring", "no_entry_of_another_root_is_given")


def test_04_a_running_answer_publishes_under_its_own_version():
    """miles#2783: hits keep stale prefixes alive, finishing requests put them back."""
    caught_by(AFTER_UPDATES, "answers_on_several_versions_share_steps_and_each_is_its_own")
    caught_by("integration/workers/test_invalidations", "its_cached_pages_are_dropped_and_no_others")
    caught_by("unit/kv/test_pages", "dropped_pages_stay_with_their_owners_and_are_found_by_nobody")


def test_05_nothing_ever_needs_to_be_idle():
    """sglang#14062, #12099, AReaL#140, reef#207: a flush is refused, or claimed, while requests are pending."""
    caught_by("integration/workers/test_local", "a_version_that_is_deleted_meanwhile_leaves_nothing")
    caught_by("integration/loadtest/test_consistency", "no_answer_mixes_versions_whatever_breaks")


def test_06_every_derived_cache_is_registered():
    """vllm#44939, #46125: the embedding cache is stale after a reset."""
    caught_by("unit/invalidator/test_audit", "every_kind_of_entry_is_registered")
    caught_by(
        "integration/embeddings/test_http_embeddings",
        "a_new_version_s_vectors_come_at_once_and_the_old_ones_again_after_a_rollback",
    )


def test_07_content_and_never_a_name():
    """vllm#42125, #30931: an adapter reloaded under its name finds old KV. Impossible: there are no adapters, and what
    stands in a key is the digest of the weights."""
    caught_by("unit/kv/test_roots", "swapped_tensors_differ")
    caught_by("unit/model/test_llama_versions", "nothing_is_reused_without_a_digest")


def test_08_fields_of_a_key_are_typed_and_delimited():
    """vllm#44701, #45549: an adapter's name collides with a salt."""
    caught_by("unit/caching/test_result_key", "swapping_two_fields_changes_the_key")
    caught_by("unit/kv/test_prefix", "fields_do_not_run_into_each_other")
    caught_by("unit/caching/test_feature_key", "no_two_different_texts_share_a_key")


def test_09_a_buffer_is_its_senders_until_all_of_it_was_taken():
    """sglang#6626: a buffer is used again before the last rank has copied it."""
    caught_by("unit/engine/test_core", "with_a_hand_over_each_layer_is_told_and_pages_stay_until_they_are_discarded")
    caught_by("unit/kv/test_pool_codec", "an_export_is_a_copy")
    caught_by("unit/bus/test_bulk_faults", "every_item_arrives_once_and_in_order")


def test_10_what_is_derived_is_part_of_the_version():
    """sglang#28676, #14178, vllm#48251, #29341, #32718: derived tensors and graphs keep old weights."""
    caught_by("unit/model/test_native_patch", "patched_is_fresh")
    caught_by("unit/model/test_streamed", "a_newer_version_shares_pieces_and_is_as_one_made_from_nothing")
    caught_by("unit/model/test_llama_versions", "any_changed_tensor_shows_and_the_old_version_stays_as_it_was")


def test_11_a_base_is_what_was_acknowledged():
    """slime#2104: a failed delta is swallowed, its sender ahead for ever."""
    caught_by("integration/param_server/test_updates", "a_wrong_idea_of_what_was_there_costs_bytes_and_not_the_result")
    caught_by("unit/weights/test_delta", "a_base_of_another_size_is_refused")


def test_12_success_is_a_digest_that_matches():
    """tokenspeed#1373: 200 OK, and uninitialised memory is loaded. One of the bad servers sends zeros."""
    caught_by("unit/peers/test_block_reader", "a_bad_server_costs_time_but_never_a_wrong_byte")
    caught_by("unit/peers/test_block_reader", "with_only_bad_servers_the_reader_fails_and_says_why")
    caught_by("unit/peers/test_model_cache", "a_damaged_block_is_fetched_again")


def test_13_a_delta_names_its_base():
    """trl#5932, SkyRL#1902: a pruned chain is replayed on a wrong base. Impossible: versions are sets of blocks by
    digest, not chains."""
    caught_by("integration/param_server/test_checkpoints", "a_late_joiner_begins_with_the_newest_checkpoint")
    caught_by("unit/weights/test_checkpointing", "from_a_checkpoint_on_everything_that_lives_is_as_from_the_start")


def test_14_numbers_of_versions_are_durable():
    """miles#2244: a failover resets the counter, and staleness is negative."""
    caught_by("integration/param_server/test_dead_coordinators", "a_coordinator_dies_at_every_step")
    caught_by("integration/param_server/test_updates", "a_transaction_outlives_a_restart_of_its_server")
    caught_by("integration/bus/test_logs", "a_log_made_anew_is_never_taken_for_the_old_one")


def test_15_ready_is_to_hold_the_version():
    """miles#1724: a recovered engine gets traffic before it is in step."""
    caught_by("unit/router/test_placement", "only_ready_workers_of_the_version_are_usable")
    caught_by(
        "integration/param_server/test_param_server",
        "the_ref_moves_only_once_a_worker_of_each_kind_has_the_version_ready",
    )


def test_16_pinned_once_and_carried_through():
    """AReaL#1569, rllm#622: the version is read after the answer, and mislabels it."""
    caught_by("integration/router/test_http_versions", "a_ref_that_moves_while_a_request_waits_is_followed")
    caught_by("integration/router/test_router_faults", "tokens_of_a_foreign_root_alone_are_never_shown")
    caught_by("integration/workers/test_watermark", "no_answer_has_a_part_of_another_version")


def test_17_nobody_pauses():
    """prime-rl#2325, sglang#22620, AReaL#1160: deadlocks of a pause, paused for ever. Impossible: an update pauses
    nothing; whoever dies in one is aborted after its deadline by anybody."""
    caught_by("integration/param_server/test_dead_coordinators", "a_coordinator_dies_at_every_step")
    caught_by(
        "integration/param_server/test_shared_updates", "killed_processes_leave_the_old_version_and_the_others_are_told"
    )


def test_18_only_what_changed_is_there_twice():
    """vllm#15254, vime#190, HugeCTR#412: old, new and KV outgrow the memory."""
    caught_by("unit/engine/test_versions", "unchanged_layers_are_shared_between_versions")
    caught_by("unit/engine/test_worker_memory", "a_load_takes_little_more_than_the_packed_weights")
    caught_by("unit/model/test_streamed", "what_stays_in_memory_is_within_the_budget")


def test_19_a_new_field_changes_the_key_until_it_is_declared_neutral():
    """litellm#9844, instructor#2585, OrcaRouter-Lite#84: fields are missing in the key, an omitted one counts as 0."""
    caught_by(
        "unit/caching/test_result_key", "an_undeclared_field_is_refused", "an_absent_field_differs_from_every_value"
    )
    caught_by("unit/router/test_openai_schema", "every_field_joins_the_result_key_or_is_declared_otherwise")


def test_20_tenants_are_apart_and_fills_are_fenced():
    """litellm#29955, #19575, #29086, semantic-router#2134, hindsight#2315, logto#9428: hits across tenants, ignored
    namespaces, a flight that fills again what was deleted."""
    caught_by(
        "integration/router/test_two_tenants", "results_of_another_are_not_found", "a_prefix_of_another_saves_no_time"
    )
    caught_by(
        "integration/embeddings/test_embeddings_of_two_tenants", "a_text_of_another_is_neither_found_nor_waited_for"
    )
    caught_by("unit/caching/test_fill_races", "every_interleaving_of_a_fill_with_three_events")
    caught_by("unit/router/test_flights", "an_item_that_was_deleted_since_is_not_joined")
