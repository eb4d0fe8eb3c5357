"""Every command of the documentation runs: here, shortened, or in the test that is named for it."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from commands import TINY, TINY_MEDIA, run
from llava_folder import save_checkpoint, save_parts, save_questions
from started import ROOT, begin, environment, finish
from test_docs import write_examples

PROGRAMS = (
    "python",
    "mmjax",
    "pip",
    "launch/",
    "sbatch",
    "ray",
    "transformers",
    "mkdocs",
    "pytest",
    "JAX_NUM_CPU",
)
# The tests that run other commands, by file, with the beginnings of these or their document;
# .ci/run is what a newcomer does.
ELSEWHERE: dict[str, dict[str, list[str]]] = {
    ".ci/run": {
        "": [
            "README.md",
            "pip install",
            "python3 -m venv",
        ],
    },
    "tests/benchmarks/test_bench_papers.py": {
        "test_the_papers_tables_are_predicted_and_our_partition_is_never_slower": [
            "python -m mmjax.bench papers",
        ],
    },
    "tests/benchmarks/test_bench_peer.py": {
        "test_a_tiny_race_runs_in_turns_begins_with_the_same_loss_and_is_drawn": [
            "python -m mmjax.bench peer",
        ],
    },
    "tests/config/test_yaml_files.py": {
        "test_a_run_of_a_file_is_resumed_by_it_and_by_its_folder": [
            "python -m mmjax.train mine.yaml",
        ],
    },
    "tests/data/loading/test_ray_pool.py": {
        "test_20_random_kills_in_300_steps_change_no_byte": [
            "python -m mmjax.train my_config.py data.pool",
        ],
        "test_a_pool_that_loses_processes_a_node_and_its_head_costs_no_step_and_changes_no_byte": [
            "ray start",
        ],
    },
    "tests/hf/test_preferences.py": {
        "test_log_probabilities_that_evaluate_writes_are_those_of_transformers": [
            "python -m mmjax.evaluate llava-1.5-7b-hf --data pairs.jsonl",
        ],
        "test_the_recipe_trains_adapters_against_the_checkpoint_and_leaves_out_a_pair_without_a_rejected_answer": [
            "python -m mmjax.train llava_dpo",
        ],
    },
    "tests/hf/test_vllm.py": {
        "test_rollouts_that_vllm_draws_have_the_probabilities_of_the_first_step": [
            "python draw.py",
            "python -m mmjax.train llava_style checkpoint=policy-0",
        ],
    },
    "tests/training/test_unit_runs.py": {
        "test_an_llm_with_context_over_processes_gives_the_losses_of_one_mesh_and_goes_on_with_any_context": [
            "python -m mmjax.train my.py units.vision",
        ],
    },
    "tests/models/test_float8.py": {
        "test_ranks_round_by_the_largest_values_of_all": [
            "python -m mmjax.train llava_style checkpoint=FOLDER",
        ],
    },
    "tests/test_bench.py": {
        "test_coordination_measures_process_0_with_a_real_client_for_each_process": [
            "python -m mmjax.bench coordination",
        ],
    },
    "tests/test_chat_command.py": {
        "test_each_turn_is_answered_as_generate_answers_the_conversation_that_training_would_see": [
            "python -m mmjax.chat",
        ],
    },
    "tests/test_docs.py": {
        "test_the_commands_in_balance_md_run": [
            "docs/balance.md",
        ],
        "test_the_examples_in_balancing_md_run": [
            "docs/balancing.md",
        ],
        "test_the_tutorial_goes_from_photos_to_an_answer_over_http": [
            "docs/tutorial.md",
        ],
        "test_the_examples_in_using_md_answer": [
            "python -m mmjax.generate llava",
            "python -m mmjax.generate runs/mine",
        ],
        "test_the_captions_example_in_data_sources_md_trains": [
            "python -m mmjax.train captions.py",
        ],
    },
    "tests/test_doctor.py": {
        "test_a_machine_without_faults_is_all_right_and_the_exit_code_says_so": [
            "mmjax doctor",
            "python -m mmjax.doctor",
        ],
    },
    "tests/test_evaluate_data.py": {
        "test_a_checkpoint_is_asked_every_question_and_scored_on_what_it_said": [
            "python -m mmjax.evaluate RUN",
        ],
    },
    "tests/test_export.py": {
        "test_the_command_takes_a_step_and_a_moved_source_and_never_overwrites_unasked": [
            "python -m mmjax.export",
        ],
    },
    "tests/test_init.py": {
        "test_what_is_written_trains": [
            "python -m mmjax.init",
        ],
    },
    "tests/test_latents_command.py": {
        "test_every_image_to_be_made_has_the_latents_that_the_vae_makes_of_it": [
            "python -m mmjax.index my_config.py --latents",
        ],
    },
    "tests/test_launch.py": {
        "test_local_processes_all_get_a_signal_as_what_it_is": [
            "launch/local.sh",
        ],
        "test_a_slurm_job_whose_time_is_up_asks_all_processes_to_save_and_is_requeued": [
            "sbatch",
        ],
    },
    "tests/test_plan_command.py": {
        "test_the_largest_preset_fits_2560_devices_and_not_64": [
            "python -m mmjax.plan omni",
        ],
        "test_on_this_machine_layers_are_measured_once_and_the_report_goes_by_them": [
            "python -m mmjax.plan tiny_omni cluster=here",
        ],
    },
    "tests/test_recipes.py": {
        "test_an_audio_checkpoint_is_trained_by_the_documented_config_and_the_recipes": [
            "python -m mmjax.evaluate runs/speech",
            "python -m mmjax.generate runs/speech",
            "python -m mmjax.train llava_lora checkpoint=Qwen2-Audio",
            "python -m mmjax.train speech.py",
        ],
        "test_tiny_video_learns_where_digits_move_and_cannot_tell_from_shuffled_frames": [
            "python -m mmjax.evaluate runs/tiny_video",
            "python -m mmjax.train tiny_video",
        ],
    },
    "tests/test_rehearse.py": {
        "test_the_report_sets_steps_and_waits_of_every_balance_beside_the_plan": [
            "python -m mmjax.rehearse",
        ],
    },
    "tests/test_studio.py": {
        "test_in_a_browser_curves_move_while_a_run_trains_and_a_question_is_answered": [
            "python -m mmjax.studio",
        ],
    },
    "tests/test_supervise.py": {
        "test_what_fails_is_started_again_until_it_is_done_and_each_start_is_told": [
            "python -m mmjax.supervise",
        ],
    },
    "tests/test_verify.py": {
        "test_the_configs_of_large_models_pass_with_fewer_layers_and_smaller_widths": [
            "python -m mmjax.verify internvl_26b",
        ],
    },
    "tests/verification/test_verify_batches.py": {
        "test_batches_that_the_documented_callback_writes_of_a_trainer_are_right": [
            "docs/batches.md",
        ],
    },
    "tests/training/test_expert_meshes.py": {
        "test_loss_routing_and_every_gradient_are_those_of_one_device": [
            "python -m mmjax.train my.py mesh.data=2 mesh.expert=4",
        ],
    },
    "tests/training/test_new_data.py": {
        "test_new_data_at_step_50_comes_once_an_epoch_like_the_old_though_killed_and_by_other_processes": [
            "python -m mmjax.train my.py --resume",
        ],
    },
    "tests/training/test_quantized_training.py": {
        "test_a_checkpoint_learns_beside_quantised_weights_as_beside_its_own": [
            "python -m mmjax.train llava_lora checkpoint=llava-1.5-7b-hf",
        ],
    },
}


def commands(document: str) -> list[str]:
    """The commands of a document's shell blocks and of its indented lines, without comments."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    lines += re.findall(r"^ {4}(python -m .*)$", text, re.MULTILINE)
    return [
        re.sub(r"\s+#.*", "", " ".join(line.split())) for line in lines if line.startswith(PROGRAMS)
    ]


DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
FOUND = [(document, command) for document in DOCUMENTS for command in commands(document)]


def is_elsewhere(document: str, command: str, beginning: str) -> bool:
    """Whether an entry of ELSEWHERE is for a command of a document."""
    return document == beginning or command.startswith(beginning)


RUN_ELSEWHERE = [
    (file, test, beginning)
    for file, tests in ELSEWHERE.items()
    for test, beginnings in tests.items()
    for beginning in beginnings
]
HERE: dict[str, list[str]] = {}
for document, command in FOUND:
    if not any(is_elsewhere(document, command, beginning) for *_, beginning in RUN_ELSEWHERE):
        HERE.setdefault(document, []).append(command)


@pytest.mark.parametrize(("file", "test", "beginning"), RUN_ELSEWHERE)
def test_a_documented_command_that_runs_elsewhere_is_there_and_so_is_its_test(
    file, test, beginning
) -> None:
    assert any(is_elsewhere(document, command, beginning) for document, command in FOUND)
    assert file == ".ci/run" or f"def {test}(" in (ROOT / file).read_text()


SHORT = [
    "training.steps=2",
    "schedule.warmup=1",
    "training.evaluate_every=0",
    "training.evaluate_samples=4",
    "--overwrite",  # another command of the document may have trained the same config
]
SMALL = [
    "training.precision=float32",
    "batch.size.count=8",
    "batch.rows.llm=8",
    "batch.rows.vision=8",
    "data.workers=0",
]


def shortened(command: str, place: Path) -> tuple[str, list[str]]:
    """A command's name and words, with few steps, on files of the test."""
    name, *words = shlex.split(re.sub("^(python -m mmjax.|mmjax )", "", command))
    words = [word.replace("/data/fast", str(place / "fast")).replace("120", "2") for word in words]
    if name == "train" and "--show" not in words:
        words += SHORT + (
            SMALL if any(word.startswith(("checkpoint=", "tower=")) for word in words) else []
        )
    few = {"verify": ["batch.size.count=16", "--backend=dense"]}
    return name, [*words, *few.get(name, [])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("document", HERE)
def test_the_commands_of_a_document_run(document, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_examples(document, tmp_path)
    shutil.copy(TINY, tmp_path)
    shutil.copy(TINY_MEDIA, tmp_path / "my.py")
    save_checkpoint(tmp_path / "llava-1.5-7b-hf")
    save_parts(tmp_path)
    (tmp_path / "tower").rename("siglip-so400m-patch14-384")
    (tmp_path / "llm").rename("Qwen3-4B")
    save_questions(tmp_path, 16).rename("llava.json")
    for image in (tmp_path / "images").iterdir():
        shutil.copy(image, tmp_path)
    shutil.copy("llava.json", "questions.json")
    (tmp_path / "my_config.py").write_text(
        "from mmjax.config.loading import sibling\n\nstyle = sibling(__file__, 'llava_style')\n\n\n"
        "def config():\n    return style.config('llava-1.5-7b-hf', 'llava.json', 'images')\n"
    )
    earlier = {
        "tiny_omni": "tiny_omni",
        "mine": "my.py",
        "first": "tiny_text",
        "second": "tiny_text",
    }
    for folder, config in earlier.items():
        if any(f"runs/{folder}" in command for command in HERE[document]):
            words = [config, f"run=runs/{folder}", *SHORT]
            assert run(capsys, importlib.import_module("mmjax.train").main, *words).code == 0
    for command in HERE[document]:
        name, words = shortened(command, tmp_path)
        # A unit's devices are its own, and every device is one of a unit: as many as the command
        # asks for.
        if devices := sum(
            int(word.partition("=")[2]) for word in words if word.startswith("units.")
        ):
            process = begin(
                [sys.executable, "-m", f"mmjax.{name}", *words], environment(devices), cwd=tmp_path
            )
            ended = finish(process)
        else:
            ended = run(capsys, importlib.import_module(f"mmjax.{name}").main, *words)
        assert ended.code == 0, (command, ended.err)
