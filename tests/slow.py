"""Tests that take too long for every change: `make promise` runs them, `make test` leaves them out.

By file, what their names begin with. Each has a smaller sibling in the same file that stays.
"""

from __future__ import annotations

from tests.slower_siblings import SIBLINGS

SLOW: dict[str, tuple[str, ...]] = {
    "tests/verification/test_hardest_pairs.py": (
        "test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas[1",
        "test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas[2-1",
        "test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas[2-3",
        "test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas[2-2-1f1b",
        "test_seven_micro_batches_and_a_tied_head_have_the_same_bits_for_any_replicas[2-2-zb-h1-m",
        "test_a_weight_that_is_used_three_times_in_bfloat16[{'schedule': '1f1b'",
        "test_a_weight_that_is_used_three_times_in_bfloat16[{'schedule': 'zb-h1', 'zero_stage': 2}",
        "test_norms_of_a_divided_sequence_under_a_split_backward[3",
        "test_replicas_of_mirrored_devices_do_not_wait_for_each_other[scattered",
        "test_replicas_of_mirrored_devices_do_not_wait_for_each_other[naive-zb-v",
    ),
    "tests/verification/test_zero_optimizers.py": tuple(
        f"test_one_that_looks_across_rows_has_whole_parameters[{name}"
        for name in ("LAMB", "LARS", "Muon", "Shampoo", "clipped", "factored")
    ),
    "tests/verification/test_llama_sequences.py": (
        "test_norms_of_a_llama_under_a_split_backward[3",
    ),
    "tests/runtime/test_stored_activations.py": ("test_where_malloc_keeps_nothing_small",),
    "tests/supervisor/test_remaining.py": (
        "test_the_other_host_commits_when_the_listening_one_is_lost[19",
    ),
    "tests/supervisor/test_stores.py": (
        "test_a_process_that_dies_in_a_write_is_replaced[gems",
        "test_a_process_that_dies_in_a_write_is_replaced[1f1b-22",
    ),
    "tests/bundles/test_rewriting.py": (
        "test_the_text_does_not_grow_with_depth",
        "test_a_bundle_has_its_references_bits_and_is_plain_pytorch_to_rounding[2-choices2",
        "test_a_bundle_has_its_references_bits_and_is_plain_pytorch_to_rounding[2-choices3",
        "test_a_bundle_has_its_references_bits_and_is_plain_pytorch_to_rounding[4",
    ),
    "tests/measure/ops/test_profiler.py": ("test_without_a_model_it_measures_twenty_dear_ops",),
    "tests/tools/test_brute_force.py": ("test_nothing_is_faster_than_auto_in_200_instances",),
    "tests/plan/test_gathered_parts.py": ("test_a_model_of_three_times",),
    "tests/plan/test_levels.py": ("test_a_thousand_devices_are_answered_by_a_pipeline_on_some",),
    "tests/plan/test_together_bounds.py": (
        "test_nothing_that_is_asked_for_is_faster",
        "test_nor_are_some_in_a_hurry[9",
    ),
    "tests/plan/search/test_halves.py": ("test_replicas_are_of_one_schedule",),
    "tests/plan/tensor/test_together.py": (
        "test_replicas_of_groups_are_compared_where_both_are_open",
        *(
            f"test_nothing_is_faster_than_what_is_planned_together[{seed}]"
            for seed in range(26)
            if seed != 4
        ),
    ),
    "tests/verification/test_replicas.py": (
        "test_gradients_of_weights_that_wait_are_summed_too[zb-h1-choices1",
        "test_gradients_of_weights_that_wait_are_summed_too[1f1b",
        "test_norms_that_run_twice",
        "test_batch_norms_statistics_are_those_of_one_process[3",
        "test_batch_norms_statistics_are_those_of_one_process[4",
    ),
    "tests/verification/test_members_as_pipelines.py": (
        "test_gradients_of_weights_wait_as_in_pipelines[4-zb-v",
        "test_gradients_of_weights_wait_as_in_pipelines[4-dualpipe-v",
        "test_gradients_of_weights_wait_as_in_pipelines[4-auto",
        "test_gradients_of_weights_wait_as_in_pipelines[8-zb-h1-choices6",
        "test_scaled_training_has_the_bits_of_members_in_lockstep[replicas",
    ),
    "tests/verification/test_members_sequence.py": (
        "test_a_bundle_has_the_bits_of_its_members_in_lockstep[3",
        "test_a_bundle_has_the_bits_of_its_members_in_lockstep[4",
    ),
    "tests/verification/test_members_uneven.py": (
        "test_a_bundle_has_the_bits_of_its_members_in_lockstep[4",
    ),
    "tests/verification/test_readings.py": ("test_an_iterator_outside_batches_is_refused[train",),
    "tests/verification/test_asynchronous.py": (
        "test_a_bundle_has_the_bits_of_its_recurrence[2",
        "test_a_bundle_has_the_bits_of_its_recurrence[4",
        "test_a_plain_loop_of_the_recurrence_has_the_same_bits[3",
        "test_a_run_that_goes_on_from_a_commit_has_the_same_bits[stash",
        "test_under_2bw_batch_norms",
    ),
    "tests/verification/test_unsharded.py": (
        "test_a_bundle_has_the_bits_of_one_process[2",
        "test_a_bundle_has_the_bits_of_one_process[4",
        "test_any_replicas",
        "test_replicas_may_be_cut_unlike",
        "test_batch_norms_and_weights",
    ),
    "tests/bundles/resplitting/test_by_schedule.py": tuple(
        f"test_a_schedule_goes_along_and_the_weights_are_a_plain_loops[{name}"
        for name in (
            *("auto", "zb-h1", "dualpipe-v", "gems", "state", "gpipe", "list", "1f1b", "weights"),
        )
    ),
    "tests/bundles/test_replicas.py": ("test_weights_that_are_divided", "test_three_processes_sum"),
    "tests/supervisor/test_replay_overlap.py": ("test_devices_that_die_while_steps_overlap",),
    "tests/supervisor/test_gems.py": ("test_no_place_of_a_step",),
    "tests/verification/test_gems.py": (
        "test_a_bundle_has_the_bits_of_one_process[4-choices1",
        "test_a_bundle_has_the_bits_of_one_process[4-choices2",
        "test_a_bundle_has_the_bits_of_one_process[4-choices3",
        "test_it_is_what_a_plain_loop_computes[micro",
        "test_what_a_model_file_says_of_training_goes_with_it[smaller",
        "test_what_a_model_file_says_of_training_goes_with_it[a loss scale that",
        "test_state_and_activations",
        "test_a_tied_weight_may_be_in_any_two_stages[self.head",
    ),
    "tests/supervisor/test_hosts.py": ("test_of_replicas_the_other_hosts_go_on",),
    "tests/supervisor/test_losing.py": (
        "test_three",
        "test_no_place",
        "test_the_last",
        "test_commits",
    ),
    "tests/supervisor/test_peer_states.py": (
        "test_no_place_in_a_buckets_second_phase_is_a_bad_one[zb",
        "test_no_place_around_the_last_gradient",
        "test_states_come",
        "test_another_gives",
        "test_all_begin_again",
        "test_no_place",
    ),
    "tests/supervisor/test_suspicion.py": ("test_a_wrong_activation",),
    "tests/runtime/test_compiled.py": ("test_a_compiled_stage",),
    "tests/verification/test_compiled.py": ("test_a_compiled_bundle",),
    "tests/verification/test_quantised.py": ("test_an_int8_base",),
    "tests/frontend/test_quantised.py": ("test_the_graph_reads",),
    "tests/frontend/test_hash_order.py": (
        "test_a_vocabulary_in_the_order_of_a_set_is_refused_with_its_line",
        "test_the_remedy_that_is_named_is_taken",
    ),
    "tests/tools/test_freezing.py": ("test_what_goes_on",),
    "tests/bundles/test_dcp.py": (
        "test_what_is_divided_goes_to_fsdp2_and_comes_back",
        "test_two_processes_of_fsdp2",
    ),
    "tests/bundles/test_elastic.py": ("test_a_run_of_groups",),
    "tests/runtime/test_mpi.py": ("test_mpirun_trains",),
    "tests/bundles/test_caching.py": ("test_eight_clients", "test_gpt2"),
    "tests/bundles/test_serving.py": ("test_processes_that_die",),
    "tests/measure/host/test_far.py": ("test_links_between_hosts_stand",),
    "tests/bundles/launch/test_tracing.py": ("test_a_run_that_failed",),
    "tests/bundles/launch/test_scripts.py": (
        "test_a_script_trains",
        "test_nobody_said_where_to_meet",
    ),
    "tests/verification/test_members.py": tuple(
        f"test_a_bundle_has_the_bits_of_its_members_in_lockstep[{case}"
        for case in ("2-2", "4-2-shares1", "3-3")
    ),
    "tests/verification/test_members_replicated.py": (
        "test_a_bundle_has_the_bits_of_its_reference[micro",
        "test_a_bundle_has_the_bits_of_its_reference[replica",
        "test_a_bundle_has_the_bits_of_its_reference[zero 1",
        "test_a_bundle_has_the_bits_of_its_reference[zero 2",
        "test_a_bundle_has_the_bits_of_its_reference[members",
    ),
    "tests/verification/test_sharding.py": ("test_the_models_that_ship",),
    "tests/promise/test_matrix.py": (
        *(
            f"test_every_cell_of_a_model_is_equal[{name}]"
            for name in ("llama", "resnet", "unet", "encdec", "moe")
        ),
        *(
            f"test_real_processes_are_equal_too[{name}"
            for name in ("llama", "resnet", "unet", "encdec", "moe", "gpt/scattered")
        ),
        "test_stages_that_run_forward_again_are_equal_too[llama",
    ),
    "tests/plan/test_lightening.py": ("test_training_is_bitwise_that_of_the_unsplit_model",),
    "tests/promise/test_inference.py": tuple(
        f"test_models_from_python[{name}"
        for name in ("llama", "resnet", "unet", "encdec", "moe", "gpt-scattered", "gpt-chain")
    ),
    "tests/promise/test_pipeline_stage.py": ("test_gradients_under_torchs_schedules[unet]",),
    "tests/promise/test_foreign_loop.py": (
        "test_stages_under_torchs_own_pipeline[gpipe]",
        "test_stages_in_a_foreign_loop[3",
    ),
    "tests/tools/test_coverage.py": (
        *(
            f"test_the_remedy_of_a_refusal_works[{name}"
            for name in ("detr", "wav2vec2", "deberta", "opt")
        ),
        "test_a_model_splits_and_trains_bit_for_bit[dit]",
        "test_a_model_splits_and_trains_bit_for_bit[blip]",
        "test_a_model_splits_and_trains_bit_for_bit[bart]",
    ),
    "tests/contract/test_partitioners.py": (
        *(
            f"test_same_placement_under_four_hash_seeds[{name}]"
            for name in (
                "cp-sat",
                "latency",
                "differentiable",
                "mcmc",
                "ideal-dp",
                "m-etf",
                "m-sct",
            )
        ),
        "test_memory_is_kept_or_no_plan_made[latency]",
        "test_memory_is_kept_or_no_plan_made[differentiable]",
        "test_memory_is_kept_or_no_plan_made[cp-sat]",
        "test_the_same_again[latency]",
        "test_the_same_again[cp-sat]",
    ),
    "tests/planning/test_device_orders.py": (
        "test_the_order_of_the_list_does_not_matter[auto-2]",
        "test_the_order_of_the_list_does_not_matter[chain-dp-2]",
    ),
    "tests/planning/test_third_party.py": ("test_its_author_can_run_the_contract_tests_on_it",),
    "tests/plan/search/test_search.py": ("test_a_richer_cluster_is_never_worse",),
    "tests/plan/test_recompute.py": ("test_forecast_and_tracked_peak_of_real_processes",),
    "tests/bundles/test_checkpoints.py": ("test_no_process_holds_the_whole_model[more1]",),
    "tests/bundles/test_onnx_out.py": (
        "test_models_as_files[encdec]",
        "test_models_as_files[resnet]",
        "test_files_run_one_after_another_and_names_do_not_clash",
    ),
    "tests/frontend/test_onnx_in.py": ("test_no_case_of_onnx_gives_another_number",),
    "tests/frontend/test_ladder_hf.py": (
        "test_a_detr_body_is_split_with_its_check",
        "test_checks_of_masks_are_assumptions[",
    ),
    "tests/measure/host/test_doctor.py": ("test_every_pair_of_devices_is_surveyed",),
    "tests/measure/host/test_gpu.py": ("test_unlike_kinds_are_measured_in_step",),
    "tests/supervisor/test_device_calls_fail.py": (
        "test_each_call_fails_once[0-5",
        "test_each_call_fails_once[2",
    ),
    "tests/supervisor/test_replay_split.py": ("test_devices_that_die_with_gradients_waiting",),
    "tests/supervisor/test_replay_chaos.py": (
        "test_random_deaths_change_nothing[1]",
        "test_random_deaths_change_nothing[2]",
    ),
    "tests/tools/test_faults.py": ("test_a_kill_with_a_cold_replacement",),
}


def is_slow(nodeid: str) -> bool:
    """Whether a test is one of these."""
    file, _, name = nodeid.partition("::")
    return name.startswith((*SLOW.get(file, ()), *SIBLINGS.get(file, ()), "\0"))
