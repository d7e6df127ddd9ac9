"""Hand-off, leases, cancellation, routing: each public fault of systems like this one, and what would show it here.

The table and its numbers: the first one of LESSONS.md. "Impossible" names what would have to be changed to make it
possible at all; the tests below it hold that.
"""

from __future__ import annotations

from tests.support.lessons import caught_by


def test_01_every_hold_needs_a_local_lease():
    """vllm#46283: blocks of an aborted decode stay where prefill died. Here the decode worker's lease is its own."""
    caught_by("integration/workers/test_cancel", "in_the_hand_over_and_then_prefill_dies")
    caught_by("integration/workers/test_handover", "a_lease_without_progress_ends")
    caught_by("integration/workers/test_faults", "a_prefill_worker_that_dies_frees_its_lease")


def test_02_every_reject_path_releases():
    """vllm#41269: decode refuses before admission, prefill holds its KV for minutes."""
    caught_by(
        "integration/workers/test_refusals", "a_run_that_decode_refuses_leaves_nothing_at_prefill", "reservations"
    )
    caught_by("integration/router/test_router_faults", "a_refusal_that_all_would_give_is_told")


def test_03_no_one_reads_what_another_may_free():
    """vllm#21570: prefill times out, decode reads freed blocks. Impossible: pages are pushed into pages that the
    receiver has leased; nobody reads a peer's memory. What comes after the lease is refused."""
    caught_by("integration/workers/test_handover", "frames_for_no_lease_are_refused", "a_lease_without_progress_ends")
    caught_by("unit/decode/test_leases", "a_lease_ends_without_progress_and_not_once_it_is_complete")


def test_04_fail_closed_and_bind_request_hashes_and_generation():
    """vllm#52234: a failed read of KV gives text all the same; a stale ticket the previous prompt's answer."""
    caught_by("integration/workers/test_handover", "a_hand_over_that_lies_fails_its_attempt_and_nothing_else")
    caught_by("integration/workers/test_handover", "a_run_that_differs_from_the_reservation_is_refused")
    caught_by("unit/engine/test_attempts", "no_attempt_is_admitted_twice_nor_after_a_newer_one_or_its_cancel")
    caught_by("unit/engine/test_prefix_tier", "a_gap_or_a_broken_page_ends_what_is_found")
    caught_by("unit/kv/test_pages", "a_hit_is_compared_with_its_tokens")


def test_05_a_writers_life_is_not_the_requests():
    """sglang#24527: pages are freed and used again while prefill still writes."""
    caught_by("integration/workers/test_cancel", "in_the_middle_of_the_hand_over")
    caught_by("integration/workers/test_handover", "a_second_sender_can_not_write_into_a_lease")
    caught_by("unit/engine/test_core", "pages_that_are_being_filled_stay_until_they_are_discarded")
    caught_by("unit/engine/test_preemption", "pages_that_the_event_loop_uses_are_never_taken")
    caught_by("unit/engine/test_prefix_tier", "a_page_that_is_reclaimed_before_it_is_written_is_left_out")


def test_06_lengths_are_checked_at_the_edge_and_travel_with_the_ticket():
    """sglang#30233: prefill gives an oversize input up, decode goes on from incomplete KV."""
    caught_by("e2e/test_default_precision", "a_prompt_of_the_whole_context_is_answered_and_one_more_token_is_refused")
    caught_by("unit/engine/test_tickets", "a_wrong_field_is_refused")
    caught_by("unit/decode/test_leases", "a_final_frame_that_does_not_fit_is_corrupt")
    caught_by("unit/decode/test_leases", "a_final_frame_before_all_layers_is_corrupt")


def test_07_paired_legs_share_their_fate():
    """aibrix#2289, sglang#29017: prefill fails, decode hangs for minutes."""
    caught_by("integration/workers/test_faults", "a_prefill_worker_that_dies_frees_its_lease")
    caught_by("integration/workers/test_faults", "leaving_tells_routers_to_go_elsewhere")
    caught_by("integration/router/test_router_faults", "a_worker_that_dies_in_mid_answer")
    caught_by("integration/router/test_router_faults", "a_worker_that_hangs_is_left_after_its_cards_stop")


def test_08_ids_are_the_servers():
    """sglang#40125: two clients with one id crash the scheduler."""
    caught_by("integration/router/test_router_infer", "one_id_of_many_callers_names_none_of_their_requests")
    caught_by("integration/workers/test_refusals", "one_id_sent_many_times_at_once_is_one_request")
    caught_by("unit/engine/test_attempts", "an_attempt_is_new_once")


def test_09_a_cancel_at_every_state_releases():
    """dynamo#7489, #13855: a cancel in mid-transfer leaks; so does decode that is never dispatched after prefill."""
    caught_by(
        "integration/workers/test_cancel",
        "before_anything_came",
        "in_the_moment_in_which_it_is_taken",
        "while_it_queues",
        "when_only_decode_knows_of_it",
        "in_the_middle_of_the_hand_over",
        "while_it_is_decoded",
    )
    caught_by(
        "integration/workers/test_local_ends", "cancelled_while_its_prefix_is_looked_up", "cancelled_in_mid_prompt"
    )
    caught_by("integration/router/test_router_ends", "a_lost_cancel_is_repeated_until_it_is_answered")


def test_10_a_client_that_left_holds_up_nobody():
    """dynamo#14507: the next short request waits up to 54 s for a prefill that nobody wants."""
    caught_by("integration/workers/test_cancel", "a_burst_of_cancels_leaves_nothing_and_the_next_answer_comes_soon")
    caught_by("integration/workers/test_local_ends", "a_burst_of_cancels_leaves_nothing_and_the_next_answer_comes_soon")
    caught_by("unit/engine/test_core", "a_cancel_leaves_a_pass_in_its_middle")
    caught_by("integration/router/test_router_ends", "a_client_that_goes_away_frees_everything_everywhere")


def test_11_reaping_needs_no_admission_and_health_is_progress():
    """TensorRT-LLM#12313: a full pool is never reaped again, and /health says 200."""
    caught_by("integration/workers/test_handover", "a_lease_without_progress_ends")
    caught_by("integration/workers/test_cancel", "a_burst_of_cancels_leaves_nothing_and_the_next_answer_comes_soon")
    caught_by("unit/engine/test_scheduler", "deadlines_are_looked_at_in_every_turn")
    caught_by("unit/engine/test_core", "an_engine_that_dies_says_so_and_gives_everything_back")
    caught_by("integration/router/test_router_http", "not_ready_without_workers")


def test_12_drained_is_without_streams_and_leases():
    """dynamo#4917, #13559: scaling down aborts what still runs."""
    caught_by("integration/stack/test_life_cycle", "a_signal_ends_it_in_the_stated_order")
    caught_by("integration/router/test_router_http", "the_way_out")
    caught_by("integration/bus/test_rpc", "draining_finishes_what_runs")
    caught_by("integration/workers/test_faults", "leaving_tells_routers_to_go_elsewhere")


def test_13_one_writer_for_each_key():
    """dynamo#7753: several publishers overwrite one load. Impossible: a card is of one process, at a subject that only
    that one may write, and a late card of a former life is ignored."""
    caught_by("unit/bus/test_fleet_table", "each_of_many_publishers_has_its_own_load")
    caught_by("unit/bus/test_fleet_table", "a_new_life_replaces_the_old_one_whose_late_cards_are_ignored")
    caught_by("unit/bus/test_permissions_table", "presence_is_told_of_oneself")


def test_14_load_spreads():
    """dynamo#589, #737, #7836: a shared prompt pins one worker while others are idle."""
    caught_by("integration/router/test_router_placement", "a_hot_prefix_does_not_pin_one_worker")
    caught_by("unit/router/test_placement", "one_hot_prompt_spreads_over_all_workers", "equal_load_is_shared_at_random")


def test_15_a_new_life_begins_anew():
    """llm-d-router#2853: an engine restarts at sequence 0, blocks of its former life stay in the index."""
    caught_by("integration/router/test_router_placement", "a_restarted_worker_has_nothing")
    caught_by("unit/router/test_kv_follower", "a_gap_is_repaired", "a_new_life_is_asked_anew")
    caught_by("unit/router/test_kv_index", "whatever_gets_lost_and_comes_late_a_table_that_lacks_nothing_is_right")


def test_16_the_living_are_chosen_from_before_anything_is_scored():
    """dynamo#11646: affinity pins requests to a dead worker."""
    caught_by("integration/router/test_router_placement", "the_worker_with_the_hottest_prefix_dies")
    caught_by("unit/router/test_placement", "only_ready_workers_of_the_version_are_usable")


def test_17_what_was_sent_since_the_last_report_counts():
    """llm-d-router#2066: reports are 50 ms old, dispatch takes 1 ms, the gate overshoots."""
    caught_by("unit/router/test_loads", "a_burst_between_two_cards_counts")
    caught_by("unit/router/test_placement", "what_a_decode_worker_was_given_since_its_card_counts_as_part_of_the_rest")


def test_18_the_version_is_in_every_key():
    """sglang#26792, vllm#42695, #49261, lmdeploy#4917: weights change, KV of the old ones is still found."""
    caught_by(
        "integration/workers/test_prefix_after_updates",
        "a_prompt_is_cached_across_an_update_where_its_kv_is_the_same_and_only_there",
    )
    caught_by("unit/kv/test_prefix", "every_part_of_the_scope_changes_every_key")
    caught_by("unit/kv/test_roots", "it_covers_exactly_what_kv_depends_on")
    caught_by("integration/router/test_http_versions", "answers_of_another_version_are_never_taken")


def test_19_what_is_read_is_checked_after_it_was_read():
    """Mooncake#850, #4239, sglang#40409: a lease shorter than the transfer, and a clear that spares what is leased.
    Entries have no leases: a reader keeps the bytes that it began with, and a delete takes every entry."""
    caught_by("unit/caching/test_disk", "a_reader_keeps_what_it_has_when_the_file_goes")
    caught_by("unit/caching/test_disk", "damage_costs_what_is_damaged_and_never_gives_other_bytes")
    caught_by("unit/cache/test_cache_handlers", "a_transfer_that_raced_an_invalidation_is_not_kept")
    caught_by("unit/cache/test_disk_tier", "deleting_reaches_what_waits_and_what_is_on_the_disk")
    caught_by("unit/caching/test_fill_races", "every_interleaving_of_a_fill_with_three_events")


def test_20_hashes_are_the_same_in_every_process():
    """LMCache#1139, #2136: seeds by process, and no hits without a word."""
    caught_by("unit/kv/test_prefix", "golden_vectors_in_a_process_of_its_own")
    caught_by("unit/caching/test_result_key", "golden_vector")
    caught_by("unit/caching/test_feature_key", "keys_are_the_same_in_every_process")
    caught_by("unit/router/test_versions_known", "keys_are_those_of_the_workers")


def test_runner_up_pins_go_with_the_request():
    """LMCache#5006, vllm#44100: pins leak on abort. The workers' rig asserts after every test that none is left."""
    caught_by("integration/workers/test_cancel", "while_it_is_decoded", "in_the_middle_of_the_hand_over")
    caught_by("unit/engine/test_versions", "a_pin_keeps_a_version_until_it_is_released")


def test_runner_up_another_attempt_goes_on_where_the_answer_is():
    """dynamo#7930, #14378: migration resets the grammar, drops withheld stop text. Stop strings are the router's, and
    its output outlives attempts; there is no grammar."""
    caught_by("integration/router/test_router_faults", "a_stop_string_that_a_dying_worker_has_half_told_still_ends_it")
    caught_by("integration/workers/test_answers", "a_later_attempt_goes_on_with_the_same_text")


def test_runner_up_nothing_is_divided_by_an_idle_minute():
    """dynamo#6985, #9294: a planner's NaN at no load, and oscillation. Impossible: nothing starts or ends workers here;
    what is measured of load is never divided by it."""
    caught_by("unit/engine/test_pace", "a_step_without_a_measurable_time_breaks_nothing")
    caught_by("unit/decode/test_threshold", "whatever_was_measured_it_stays_within_its_limits")


def test_runner_up_an_empty_node_attracts_no_more_than_its_share():
    """Mooncake#3688: a store node that restarts empty gets all writes. Keys go by a ring, not by room."""
    caught_by("unit/caching/test_ring", "load_is_even", "a_joining_node_takes_about_its_share")
