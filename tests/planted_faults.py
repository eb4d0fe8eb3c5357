"""Plant one fault after another in a copy of mmjax and check that the default tests catch each.

Run `python tests/planted_faults.py`. Every fault breaks a guarantee of docs/exactness.md by an edit
of a line or two. A fault is caught where a default test of that guarantee fails with it and passes
without. `--only WORD` plants the faults whose name holds the word. The table is Markdown, for
docs/measurements/tests.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("mmjax", "tests", "configs", "docs", "launch", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Fault:
    """What is done to one file, and the default tests that must fail of it."""

    name: str
    file: str  # below mmjax/
    old: str  # stands there once
    new: str
    tests: tuple[str, ...]  # node ids below tests/


FAULTS = (
    Fault(
        "a conversation without what was answered",
        "chat.py",
        "self._earlier = prompt.followed_by(UserPrompt(Conversation((message,))))",
        "self._earlier = prompt",
        (
            "test_chat_command.py::"
            "test_each_turn_is_answered_as_generate_answers_the_conversation_that_training_would_see",
        ),
    ),
    Fault(
        "steps dropped by a tracker and counted by nobody",
        "training/trackers.py",
        "self._dropped += 1",
        "self._dropped += 0",
        (
            "training/test_metrics_log.py::"
            "test_a_tracker_that_fails_and_hangs_is_one_warning_and_the_log_goes_on",
        ),
    ),
    Fault(
        "a sample's text taken for markup",
        "reporting/page.py",
        "autoescape=True,",
        "autoescape=False,",
        (
            "reporting/test_samples_page.py::"
            "test_a_page_has_the_tokens_and_images_that_the_model_gets_and_no_text_is_markup",
        ),
    ),
    Fault(
        "control tokens in the arguments of a call",
        "data/text/chat.py",
        'text = "\\n".join((text, *written))',
        'text = "\\n".join((text, *dict(message.fields)))',
        (
            "data/text/test_chat.py::"
            "test_calls_that_the_template_does_not_write_or_that_hold_its_tokens_are_refused",
        ),
    ),
    Fault(
        "a dictionary of Parquet that is unpacked whole",
        "data/sources/parquet_files.py",
        "if size + total <= MAX_UNPACKED:",
        "if size <= MAX_UNPACKED:",
        (
            "data/sources/test_parquet.py::"
            "test_a_dictionary_that_grows_a_million_fold_is_unpacked_in_stretches_and_a_list_of_it_refused",
        ),
    ),
    Fault(
        "an MP3 used though libmpg123 complains",
        "data/media/mp3.py",
        "if fault or lines.strip():",
        "if fault:",
        (
            "data/media/test_mp3.py::"
            "test_a_damaged_mp3_is_refused_by_what_libmpg123_says_and_nothing_comes_to_the_screen",
        ),
    ),
    Fault(
        "gradients of a probe left in the next step's sums",
        "training/rate_probe.py",
        "return probed and Probed(**probed), self.executor.zeros()",
        "return probed and Probed(**probed), accumulated",
        (
            "training/test_rate_probe.py::"
            "test_a_run_that_probes_trains_to_the_same_bits_and_its_rates_are_for_plans_and_later_starts",
        ),
    ),
    Fault(
        "a sample levelled into a row that is full",
        "balance/level.py",
        "if size[i, m] - missing[m] > state.free[heavy, m]:",
        "if size[i, m] - missing[m] > 2 * state.free[heavy, m] + 64:",
        (
            "balance/test_level.py::"
            "test_rows_stay_within_their_length_samples_together_and_the_fullest_column_gets_less",
        ),
    ),
    Fault(
        "pairs of a branch that counts what the others have",
        "balance/mask_work.py",
        "elif j <= i and sees[i] & kind[j]:",
        "elif j <= i and sees[i]:",
        ("data/plan/test_attended_pairs.py::test_pairs_are_those_of_the_packed_rows",),
    ),
    Fault(
        "a mask that leaks between the samples of a row",
        "batch.py",
        "return (q.sample == k.sample) & (q.sample >= 0) & (same_span | causal)",
        "return (q.sample >= 0) & (k.sample >= 0) & (same_span | causal)",
        ("models/test_multimodal.py::test_a_packed_row_gives_each_sample_what_it_gets_alone",),
    ),
    Fault(
        "answers about one image that see each other",
        "batch.py",
        "causal = (k.pos <= q.pos) & ((q.sees & k.kind) != 0)",
        "causal = k.pos <= q.pos",
        ("models/test_attention.py::test_mask_spec_allows_what_a_loop_over_its_definition_allows",),
    ),
    Fault(
        "a window that counts the tokens of other answers",
        "models/decoder.py",
        "if self.config.windowed:\n            # A window counts",
        "if False:\n            # A window counts",
        (
            "test_report.py::test_masks_are_drawn_as_attention_computes_them_and_show_which_layers_have_a_window",
        ),
    ),
    Fault(
        "a block that takes more of its last window than it has room for",
        "kernels/window_attention.py",
        "jnp.minimum(tokens + BLOCK, length)",
        "jnp.minimum(tokens + BLOCK + 4, length)",
        (
            "kernels/test_window_attention.py::test_blocks_hold_whole_windows_cover_every_row_and_are_few",
        ),
    ),
    Fault(
        "layers without windows attended in windows where a scan has both",
        "kernels/window_attention.py",
        "lax.cond(plan.index == 1, in_windows, by_lists, q, k, v))",
        "lax.cond(plan.index == 0, in_windows, by_lists, q, k, v))",
        ("models/test_windows.py::test_the_kernel_of_windows_gives_what_dense_attention_gives",),
    ),
    Fault(
        "blocks taken as a whole though queries stand before their keys",
        "kernels/masks.py",
        "all_causal = k.pos.high[:, None, :] <= q.pos.low[:, :, None]",
        "all_causal = k.pos.low[:, None, :] <= q.pos.low[:, :, None]",
        (
            "kernels/test_flash_attention.py::test_every_allowed_pair_is_listed_and_no_whole_pair_has_a_masked_one",
        ),
    ),
    Fault(
        "a loss scaled by the microbatch instead of the step",
        "losses/objective.py",
        "operands = outputs.hidden, outputs.table, text, total_weight",
        "operands = outputs.hidden, outputs.table, text, text.weight.sum()",
        (
            "training/test_exactness.py::test_four_microbatches_give_the_gradients_and_losses_of_their_rows_in_one",
        ),
    ),
    Fault(
        "a part of the loss's tokens whose table gradient takes the place of those before",
        "losses/cross_entropy.py",
        "d_table = _as_table(d_table + table_gradient(",
        "d_table = _as_table(0 * d_table + table_gradient(",
        ("losses/test_token_parts.py::test_losses_and_gradients_are_those_of_the_whole_logits",),
    ),
    Fault(
        "an output table's gradient that ranks reduce with every part of the loss",
        "losses/cross_entropy.py",
        "if ranks > 1 and table.ndim == 2:",
        "if False:",
        (
            "losses/test_loss_chunks.py::"
            "test_ranks_reduce_the_gradient_of_the_output_table_once_and_not_with_every_part",
        ),
    ),
    Fault(
        "chunks of tokens put where a tensor-parallel neighbour's belong",
        "parallel/collective_matmul.py",
        "start = (first + step) % size * length",
        "start = (first - step) % size * length",
        (
            "parallel/test_collective_matmul.py::test_loss_and_every_gradient_are_those_of_one_device",
        ),
    ),
    Fault(
        "a convolution that reads into the next clip",
        "models/audio_encoder.py",
        "same = (neighbour == centre) & (centre >= 0)",
        "same = (neighbour >= 0) & (centre >= 0)",
        ("models/test_audio.py::test_taps_of_packed_clips_are_each_clips_own_convolution",),
    ),
    Fault(
        "a delta net's state that goes on into the next sample",
        "models/gated_delta_net.py",
        "low = continues(path[:, :, None], path[:, None, :], branched)",
        "low = continues(path[:, :, None], path[:, :, None], branched)",
        (
            "models/test_gated_delta_net.py::test_a_packed_sample_gives_what_it_gives_alone_in_transformers",
        ),
    ),
    Fault(
        "a delta net's convolution that reads into the next sample",
        "models/short_convolution.py",
        "jnp.where((shifted(path, i) == own)[..., None], shifted(padded, i), 0)",
        "jnp.where(True, shifted(padded, i), 0)",
        (
            "models/test_gated_delta_net.py::test_a_packed_sample_gives_what_it_gives_alone_in_transformers",
        ),
    ),
    Fault(
        "a copy of a token that a wrong expert gets",
        "models/experts.py",
        "group = jnp.where((local >= 0) & (local < count), local, count)",
        "group = jnp.where((local >= 0) & (local < count), local.at[0].set((local[0] + 1) % count), count)",
        (
            "models/test_experts.py::test_gradients_are_those_of_all_experts_computed_of_all_tokens",
            "models/test_experts.py::test_a_token_gets_its_experts_outputs_by_their_weights_and_padding_gets_none",
            "models/test_experts.py::test_a_packed_sample_gets_what_it_gets_alone_and_padding_is_not_routed",
            "training/test_expert_meshes.py::test_loss_routing_and_every_gradient_are_those_of_one_device",
        ),
    ),
    Fault(
        "padding that is sent to experts",
        "models/expert_routing.py",
        "expert = jnp.where(valid[:, None], expert, experts)",
        "expert = expert + 0 * experts",
        (
            "models/test_experts.py::test_a_packed_sample_gets_what_it_gets_alone_and_padding_is_not_routed",
        ),
    ),
    Fault(
        "experts of a device taken for its neighbour's",
        "parallel/expert_exchange.py",
        "return lax.axis_index(EXPERT) * count if self.devices > 1 else 0",
        "return (lax.axis_index(EXPERT) + 1) % lax.axis_size(EXPERT) * count if self.devices > 1 else 0",
        (
            "training/test_expert_meshes.py::test_loss_routing_and_every_gradient_are_those_of_one_device",
        ),
    ),
    Fault(
        "a token sent to the neighbour of its expert's device",
        "parallel/expert_exchange.py",
        "devices * length, device * length + rank)",
        "devices * length, (device + 1) % devices * length + rank)",
        (
            "parallel/test_expert_exchange.py::test_outputs_and_gradients_are_those_of_one_device_wherever_tokens_go",
        ),
    ),
    Fault(
        "a token for a device that gets no more than there is room for",
        "parallel/expert_exchange.py",
        "turns = lax.pmax(",
        "turns = lax.pmin(",
        (
            "parallel/test_expert_exchange.py::test_outputs_and_gradients_are_those_of_one_device_wherever_tokens_go",
        ),
    ),
    Fault(
        "the first token of every list left behind",
        "parallel/expert_exchange.py",
        "inside = (rank >= 0) &",
        "inside = (rank >= 1) &",
        (
            "parallel/test_expert_exchange.py::test_outputs_and_gradients_are_those_of_one_device_wherever_tokens_go",
        ),
    ),
    Fault(
        "copies of tokens left out where experts get more than can be computed at once",
        "models/experts.py",
        "parts = -(-copies.sizes.sum() // computed)",
        "parts = jnp.minimum(-(-copies.sizes.sum() // computed), 1)",
        (
            "parallel/test_expert_exchange.py::test_outputs_and_gradients_are_those_of_one_device_wherever_tokens_go",
        ),
    ),
    Fault(
        "positions that go on from the sample before",
        "data/loading/text_rows.py",
        "position: dict[int, int] = {0: 0}  #",
        "position: dict[int, int] = {0: first_span}  #",
        ("data/loading/test_packing.py::test_every_token_stands_as_the_slow_reference_says",),
    ),
    Fault(
        "a stage without its connector",
        "models/piece.py",
        '{"connectors": {self.tower: selected}} if selected else {}',
        "{}",
        (
            "models/test_model.py::test_stages_chained_over_disjoint_meshes_give_the_loss_and_gradients_of_the_whole",
        ),
    ),
    Fault(
        "a sample that every chunk skips",
        "data/plan/sampler.py",
        "self.pools[s].draw(draw.begin, draw.end, key_of(self.seed, s))",
        "self.pools[s].draw(draw.begin, max(draw.begin, draw.end - 1), key_of(self.seed, s))",
        (
            "data/plan/test_sampler.py::test_chunks_end_where_epochs_do_and_every_epoch_holds_every_sample_once",
        ),
    ),
    Fault(
        "limits of media that training does not apply",
        "data/sources/opening.py",
        "reopen, chat, modules, cache, functions=functions, limits=config.data.limits",
        "reopen, chat, modules, cache, functions=functions",
        (
            "data/sources/test_media_limits.py::test_training_sees_an_image_beyond_the_limits_as_a_bad_sample_and_never_decodes_it",
        ),
    ),
    Fault(
        "an order that depends on the process",
        "data/plan/sampler.py",
        "return drawn[Shuffler(self.seed, 2, chunk).permutation(len(drawn))]",
        "return np.random.default_rng().permutation(drawn)",
        (
            "data/plan/test_step_plan.py::test_a_step_is_planned_the_same_in_any_order_and_by_anybody",
        ),
    ),
    Fault(
        "a recomputed layer that is not the layer itself",
        "models/stack_scan.py",
        'if run.remat != "none" and past is None:',
        'if run.remat == "full":\n        x = x * 1.001\n    if run.remat != "none" and past is None:',
        ("models/test_layer_stacks.py::test_every_mix_of_remat_policies_gives_equal_gradients",),
    ),
    Fault(
        "dropout keyed by the row instead of the sample",
        "models/dropout.py",
        "position_keys(named_key(noise, tower), owner, offset)",
        "position_keys(named_key(noise, tower), owner * 0 + jnp.arange(len(owner))[:, None], offset)",
        (
            "models/test_dropout.py::test_a_sample_drops_the_same_wherever_and_with_whomever_it_is_packed",
        ),
    ),
    Fault(
        "ranks swapped in the all-to-all",
        "parallel/encoder_exchange.py",
        "local = jnp.concatenate([received.reshape(-1, local.shape[-1]), local])",
        "local = jnp.concatenate([received[::-1].reshape(-1, local.shape[-1]), local])",
        (
            "parallel/test_encoder_exchange.py::test_every_token_arrives_where_the_rearrangement_wants_it_and_its_gradient_comes_back",
        ),
    ),
    Fault(
        "items looked for at the start of their row",
        "data/loading/packing.py",
        "np.int64(row_tokens) + plan.offset[items] // per_token",
        "np.int64(row_tokens)",
        ("data/plan/test_exchange.py::test_every_item_token_arrives_where_its_sample_wants_it",),
    ),
    Fault(
        "an exchange that leaves its node",
        "parallel/encoder_exchange.py",
        "if peers == ranks",
        "if peers",
        ("runtime/test_collectives.py::test_an_exchange_stays_inside_its_node",),
    ),
    Fault(
        "a shape that sends only padding for an encoder",
        "data/plan/placer.py",
        "if not np.any((placed.needs[modules:] == 0) & (np.array(shape.widths) > 0)):",
        "if True:",
        ("data/plan/test_row_shapes.py::test_no_step_sends_padding_where_nothing_moves",),
    ),
    Fault(
        "every device of a rank sending all of its tokens",
        "parallel/encoder_exchange.py",
        "way.tensor > 1 and chunks.shape[-1] % way.tensor == 0",
        "False",
        (
            "runtime/test_collectives.py::test_the_devices_of_a_rank_share_its_exchange_and_add_up_no_tokens",
        ),
    ),
    Fault(
        "the losses of all tokens on every device",
        "losses/step_losses.py",
        "over = PartitionSpec(current.rules.rows)",
        "over = PartitionSpec()",
        (
            "runtime/test_collectives.py::"
            "test_under_fsdp_layers_are_gathered_one_at_a_time_in_their_scan_and_no_rank_has_the_tokens_of_others",
        ),
    ),
    Fault(
        "an update though the processes planned different steps",
        "runtime/step_report.py",
        "agreed=jnp.all(digests.min(0) == digests.max(0))",
        "agreed=jnp.array(True)",
        (
            "runtime/test_step.py::test_a_step_that_processes_planned_differently_updates_nothing_and_says_so",
        ),
    ),
    Fault(
        "NaN where a query has nothing to attend",
        "models/blockwise_attention.py",
        "out / jnp.where(total == 0, 1, total)).reshape(b, t, n, w)",
        "out / total).reshape(b, t, n, h)",
        (
            "models/test_attention.py::test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient",
        ),
    ),
    Fault(
        "a checkpoint that has its name before it is whole",
        "runtime/checkpoint_commit.py",
        'return folder / f"{step}{PARTIAL}"',
        "return folder / str(step)",
        (
            "training/test_restarts.py::test_killed_inside_a_save_the_losses_are_to_the_bit_those_of_a_run_that_was_not",
        ),
    ),
    Fault(
        "a damaged checkpoint that is believed",
        "runtime/saved_parameters.py",
        "if (damaged := find_damaged(found, self._sums)) is not None:",
        "if (damaged := None) is not None:",
        ("runtime/test_checkpoint.py::test_noise_that_storage_does_not_notice_is_named",),
    ),
    Fault(
        "a resumed run that repeats a step's data",
        "training/setup.py",
        "return steps(self.data.loader, self.first_step, end_step",
        "return steps(self.data.loader, max(self.first_step - 1, 0), end_step",
        ("test_train.py::test_a_stopped_run_goes_on_to_the_same_bits",),
    ),
    Fault(
        "new data that brings samples of this epoch again",
        "data/plan/data_change.py",
        "due[s] = np.setdiff1d(epoch, had)",
        "due[s] = np.sort(epoch)",
        ("data/plan/test_data_change.py::test_what_was_had_and_what_is_due_are_whole_epochs",),
    ),
    Fault(
        "a batch hash that misses the encoders' rows",
        "data/loading/batch_hash.py",
        "for encoder, items in batch.items.items():",
        "for encoder, items in ():",
        ("data/loading/test_batch_hash.py::test_every_number_of_every_array_counts",),
    ),
    Fault(
        "a tied table's gradient that misses the last stage's part",
        "runtime/shared.py",
        "total = wait(jax.tree.map(add_on_mesh, restrict(gradients, self.structure), arrived))",
        "total = restrict(gradients, self.structure)",
        ("runtime/test_executor.py::test_gradients_are_those_of_one_program",),
    ),
    Fault(
        "stages that have no layout of their unit's",
        "runtime/placement.py",
        "ShardingRules.of(unit_layout(config.units[placed.unit], config.mesh)),",
        "ShardingRules(),",
        ("config/test_units.py::test_every_stage_has_the_layout_of_its_unit",),
    ),
    Fault(
        "a reference's pass that goes on from what the model itself has made",
        "losses/objective.py",
        "reference.run(frozen, inputs | twins, batch)",
        "reference.run(frozen, inputs, batch)",
        (
            "runtime/test_frozen_reference.py::test_a_text_model_in_stages_with_context_has_the_gradients_of_one_mesh",
        ),
    ),
    Fault(
        "a generator's loss of latents that its last stage mixes anew",
        "models/piece.py",
        "clean = values[self._clean[0]]",
        "clean = values[self._clean[0]] + draws.posterior",
        ("runtime/test_encoded_image_units.py::test_gradients_are_those_of_one_mesh",),
    ),
    Fault(
        "moments that a stage has none of, read as a number",
        "runtime/array_storage.py",
        "item = _without_empty(structs) if partial else structs",
        "item = structs",
        (
            "runtime/test_checkpoint.py::test_stages_go_on_from_one_mesh_though_one_of_them_trains_nothing",
        ),
    ),
    Fault(
        "encoders of one mesh that run in their config's order",
        "models/stage.py",
        'towers = (*sorted(config.encoders), "llm", *config.towers_behind("llm"))',
        'towers = (*config.encoders, "llm", *config.towers_behind("llm"))',
        (
            "runtime/test_one_mesh.py::test_any_model_and_mesh_has_the_programs_of_the_specification",
        ),
    ),
    Fault(
        "gradients that a stage of several towers adds to no sum",
        "runtime/stage_program.py",
        "outputs[seeded] = seed(outputs[seeded])",
        "pass",
        ("runtime/test_executor.py::test_gradients_are_those_of_one_program",),
    ),
    Fault(
        "stages of one worker that are put in an order all the same",
        "planning/reorder.py",
        "if not any(graph.depths):",
        "if False:",
        ("planning/test_reorder.py::test_stages_of_one_worker_keep_their_order",),
    ),
    Fault(
        "a new order of microbatches that is kept though it is slower",
        "planning/reorder.py",
        "if makespan >= _simulate(planned, seconds, np.zeros(len(program.stage), np.int64), program):",
        "if makespan < 0:",
        (
            "planning/test_reorder.py::test_any_order_is_a_permutation_that_is_never_slower_and_always_the_same",
        ),
    ),
    Fault(
        "a partition into stages that sends little though a stage is larger",
        "planning/partition.py",
        "largest * (1 + slack) * (1 + ROUNDING)",
        "2 * largest",
        ("planning/test_partition.py::test_a_partition_is_the_best_of_all_that_fit",),
    ),
    Fault(
        "a gradient norm that counts a stage's devices each",
        "runtime/step_settlement.py",
        "norm = jnp.sqrt(jnp.sum(norms * self._counts))",
        "norm = jnp.sqrt(jnp.sum(norms))",
        ("runtime/test_executor.py::test_gradients_are_those_of_one_program",),
    ),
    Fault(
        "a gradient that reaches a stage twice",
        "runtime/passes.py",
        "run.output_gradients[producer, microbatch][name] = arrived",
        "run.output_gradients[producer, microbatch][name] = arrived + arrived",
        ("runtime/test_executor.py::test_gradients_are_those_of_one_program",),
    ),
    Fault(
        "a gradient norm that counts a tied table twice",
        "runtime/step_settlement.py",
        "jax.tree.leaves(optimizer.mask_frozen(sums, hyper))",
        'jax.tree.leaves((sums, sums.get("llm", {}).get("embed", {})))',
        ("runtime/test_executor.py::test_gradients_are_those_of_one_program",),
    ),
    Fault(
        "pieces that arrive in each other's place",
        "runtime/transfer.py",
        "if not np.array_equal(sent, _check_words(piece, number)):",
        "if False:",
        (
            "runtime/test_transfer.py::test_a_piece_that_comes_in_the_place_of_another_or_changed_is_refused",
        ),
    ),
    Fault(
        "an update by gradients that are not finite",
        "runtime/step_report.py",
        "return report.agreed & (weight > 0) & report.finite",
        "return report.agreed & (weight > 0)",
        (
            "runtime/test_step.py::test_a_step_without_weight_or_finite_numbers_updates_nothing_and_says_so",
        ),
    ),
    Fault(
        "a stopped process that the others never name",
        "distributed/watchdog.py",
        "last = min(reached.values())",
        "last = max(reached.values())",
        (
            "distributed/test_watchdog.py::test_who_is_behind_or_gives_no_sign_of_life_has_not_arrived",
        ),
    ),
    Fault(
        "a file that cannot be decoded and trains as zeros",
        "data/loading/packing.py",
        "unreadable.setdefault(sample, reader.with_place(sample, reason))",
        "pass",
        (
            "data/loading/test_workers.py::test_a_sample_that_cannot_be_decoded_is_noted_in_its_steps_and_the_others_come_as_ever",
        ),
    ),
    Fault(
        "a second microbatch that compiles in mid-run",
        "runtime/executor.py",
        "weighed = self.weigh_batches([put, put])",
        "weighed = self.weigh_batches([put])",
        ("test_train.py::test_nothing_is_compiled_after_the_start",),
    ),
    Fault(
        "a decoder of another rotary base than transformers'",
        "models/rope.py",
        "frequencies = jnp.asarray(frequencies_of(scaling, config.rope_theta, config.rotary_pairs))",
        "frequencies = jnp.asarray(frequencies_of(scaling, 10_001.0, config.rotary_pairs))",
        ("hf/test_decoders.py::test_a_decoder_is_what_transformers_makes_of_it",),
    ),
    Fault(
        "workers that read other files than the run began with",
        "data/sources/opening.py",
        "if digest != expected[name]:",
        "if not expected[name]:",
        (
            "data/sources/test_chat_source.py::test_a_worker_that_starts_when_the_files_have_changed_says_so",
        ),
    ),
    Fault(
        "media of one folder taken for those of another",
        "data/sources/media_sizes.py",
        "repr(limits), _VERSION, *roots)",
        "repr(limits), _VERSION)",
        (
            "inference/test_evaluation.py::test_media_are_looked_up_again_and_in_the_folder_of_their_own_run",
        ),
    ),
    Fault(
        "media of held-out splits not looked up again",
        "inference/evaluation.py",
        "    coordination.run_on_leader(lambda: look_again(sources))\n",
        "",
        (
            "inference/test_evaluation.py::test_media_are_looked_up_again_and_in_the_folder_of_their_own_run",
        ),
    ),
    Fault(
        "files of the Hugging Face Hub that have no stamp",
        "data/storage/files.py",
        '    "blob_id",\n',
        "",
        (
            "test_hub.py::test_a_window_streams_the_newest_commit_of_a_data_set_and_downloads_no_file",
        ),
    ),
    Fault(
        "a run of others whose config is executed",
        "runtime/run_trust.py",
        '        if key not in keys and not signed.has(f"{key}={text}"):',
        "        if key not in keys and False:",
        (
            "runtime/test_run_trust.py::test_a_run_is_this_users_by_its_key_wherever_it_lies_and_nobody_elses",
        ),
    ),
    Fault(
        "YAML whose tags and aliases are obeyed",
        "config/yaml_files.py",
        'if event.anchor or getattr(event, "tag", None):',
        "if False:",
        (
            "config/test_yaml_files.py::test_a_fault_is_one_line_with_its_place_and_nothing_is_executed",
        ),
    ),
    Fault(
        "a command in Energon's split.yaml that is run",
        "data/sources/energon.py",
        'paths = [file_inside(os.path.join(folder, ""), part, str(listed)) for part in parts]',
        "paths = [str(folder / str(part)) for part in parts]",
        (
            "data/sources/test_webdataset.py::"
            "test_what_energons_files_name_is_a_file_of_their_folder_and_never_a_command_or_url",
        ),
    ),
    Fault(
        "a safetensors file with holes",
        "hf/safetensors_header.py",
        "if stored.begin != start:",
        "if stored.begin < start:",
        (
            "hf/test_safetensors_header.py::test_every_kind_of_header_is_read_or_refused_as_by_the_library",
        ),
    ),
    Fault(
        "a tokenizer that makes texts longer without a bound",
        "data/text/text_growth.py",
        "        if length > (MAX_GROWTH if start else MAX_ADDED):",
        "        if length > 1e300:",
        ("data/text/test_text_growth.py::test_steps_that_make_texts_ever_longer_are_named",),
    ),
    Fault(
        "a second Host header",
        "studio.py",
        "known and len(hosts) == 1 and",
        "known and hosts and",
        (
            "test_studio.py::test_only_one_host_header_that_is_this_machine_by_name_and_a_path_of_its_own_pass",
        ),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name holds this")
    only = parser.parse_args().only
    chosen = [fault for fault in FAULTS if only in fault.name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        tests = sorted({test for fault in chosen for test in fault.tests})
        whole = run_tests(copy, tests)
        if whole.returncode:
            print(
                whole.stdout,
                whole.stderr,
                "the tests fail without any fault",
                sep="\n",
                file=sys.stderr,
            )
            return 1
        print("| fault | caught by | failed | seconds |\n|---|---|---|---|", flush=True)
        missed = [fault for fault in chosen if not caught(fault, copy)]
    print(f"\n{len(chosen) - len(missed)} of {len(chosen)} faults caught")
    return 1 if missed else 0


def caught(fault: Fault, copy: Path) -> bool:
    """Whether a default test fails with this fault; prints a line of the table."""
    path = copy / "mmjax" / fault.file
    source = path.read_text()
    path.write_text(planted(fault, source))
    began = time.monotonic()
    try:
        ended = run_tests(copy, fault.tests)
    finally:
        path.write_text(source)
    counts = dict(
        reversed(found) for found in re.findall(r"(\d+) (failed|passed|error)", ended.stdout)
    )
    failed = int(counts.get("failed", 0)) + int(counts.get("error", 0))
    ran = failed + int(counts.get("passed", 0))
    names = ", ".join(f"`tests/{test}`" for test in fault.tests)
    print(
        f"| {fault.name} | {names} | {failed} of {ran} | {time.monotonic() - began:.0f} |",
        flush=True,
    )
    return ended.returncode == 1 and failed > 0


def planted(fault: Fault, source: str) -> str:
    """The file with the fault in it. Raises ValueError where the line that it changes is not there once."""
    if source.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} stands {source.count(fault.old)} times in mmjax/{fault.file}"
        )
    return source.replace(fault.old, fault.new)


def run_tests(copy: Path, tests: tuple[str, ...] | list[str]) -> subprocess.CompletedProcess[str]:
    """Run these default tests on the copy: as the current folder it comes before an installed mmjax."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-p",
        "no:cacheprovider",
        *(f"tests/{test}" for test in tests),
    ]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
