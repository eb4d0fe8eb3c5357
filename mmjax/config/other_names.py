"""Answer settings as other stacks spell them with mmjax's own.

Names are those of Hugging Face's Trainer and TRL, LLaMA-Factory, ms-swift, torchtitan, MaxText,
NeMo and Megatron.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Sequence

from mmjax.config import Config
from mmjax.errors import UserError

CONFIG_KEYS = [field.name for field in dataclasses.fields(Config)]
SETTING = "--setting"
STEP_SIZE = "batch.size.count=N is of a whole step, over all devices and microbatches"
ADAPTERS = "of the config llava_lora, or any with model.lora"
CHECKPOINT = (
    "of the configs llava_style, llava_lora and llava_dpo: python -m mmjax.train llava_style"
)
SHARDS = "the devices over which parameters are sharded, with optimizer and gradients; -1: all"
SHAPES = (
    "or linear, sqrt, behind a linear warm-up; schedule.final=1 keeps the rate constant, schedule.decay=N decays in "
    "the last N steps, schedule.cycles=N restarts"
)
ROWS = "rows are as long as samples need"

# How mmjax spells a setting, with {} for the value and empty where there is nothing to set; what to
# know of it; and its names elsewhere, in lower case with `_`.
SETTINGS = (
    ("optimizer.learning_rate={}", "", "lr learning_rate max_lr peak_lr"),
    (
        "batch.size.count={}",
        "samples of a whole step",
        "batch_size global_batch_size train_batch_size batchsize",
    ),
    (
        "batch.size.count=N",
        STEP_SIZE,
        "per_device_train_batch_size per_device_batch_size micro_batch_size local_batch_size "
        "train_micro_batch_size_per_gpu micro_batch_size_per_gpu",
    ),
    (
        "batch.microbatches={}",
        STEP_SIZE,
        "gradient_accumulation_steps grad_accum grad_accumulation_steps accumulate_grad_batches",
    ),
    (
        "data.max_tokens={}",
        ROWS,
        "max_length max_seq_length max_seq_len cutoff_len seq_len seq_length max_target_length "
        "model_max_length max_tokens",
    ),
    ("training.epochs={}", "", "num_train_epochs num_epochs n_epochs max_epochs epoch epochs"),
    (
        "training.steps={}",
        "",
        "max_steps train_steps num_train_steps train_iters total_steps num_steps",
    ),
    ("schedule.warmup={}", "", "warmup_steps lr_warmup_iters lr_warmup_steps num_warmup_steps"),
    (
        "schedule.warmup=N",
        "steps, not a share of them",
        "warmup_ratio warmup_steps_fraction lr_warmup_fraction",
    ),
    (
        "schedule.shape=cosine",
        SHAPES,
        "lr_scheduler_type lr_scheduler lr_decay_style lr_decay_type scheduler lr_schedule_type "
        "learning_rate_schedule wsd_decay_style",
    ),
    (
        "schedule.final=F",
        "share of the peak at the last step",
        "min_lr min_lr_rate min_lr_factor min_lr_ratio cosine_learning_rate_final_fraction "
        "learning_rate_final_fraction",
    ),
    (
        "schedule.decay=N",
        "last steps, not a share of them",
        "num_decay_steps decay_ratio wsd_decay_steps_fraction lr_wsd_decay_iters lr_wsd_decay_style",
    ),
    ("schedule.cycles={}", "", "num_cycles"),
    ("optimizer.weight_decay={}", "", "wd weight_decay"),
    ("optimizer.b1={}", "", "adam_beta1 beta1"),
    ("optimizer.b2={}", "", "adam_beta2 beta2"),
    ("optimizer.eps={}", "", "adam_epsilon adam_eps"),
    ("optimizer=KIND", "adamw, muon or adafactor", "optim opt_type"),
    (
        "training.clip={}",
        "",
        "max_grad_norm clip_grad gradient_clipping gradient_clip_val gradient_clipping_threshold max_norm",
    ),
    (
        "optimizer.ema=0.999",
        "training.evaluated=average evaluates and exports it",
        "ema_decay use_ema ema ema_beta",
    ),
    ("training.clip_value={}", "", "clip_grad_value clip_value clipvalue"),
    (
        "training.precision=bfloat16",
        "or float32; there is no float16",
        "bf16 fp16 dtype torch_dtype mixed_precision mixed_precision_param params_dtype",
    ),
    (
        "model.llm.quantize=nf4",
        "or int8; of frozen towers",
        "load_in_4bit quantization_bit load_in_8bit",
    ),
    (
        "model.llm.fp8=linears",
        "products of the LLM's linear layers",
        "fp8_training enable_fp8 fp8_recipe float8",
    ),
    ("seed={}", "", "random_seed data_seed init_weights_seed data_shuffle_seed seed"),
    (
        "run={}",
        "a run's folder has its log, checkpoints and scores",
        "output_dir base_output_directory save_dir save dump_folder checkpoint_dir logging_dir",
    ),
    ("name={}", "of the run's folder below runs/", "run_name experiment_name"),
    (
        "training.checkpoint_every={}",
        "steps",
        "save_steps save_interval checkpoint_interval checkpoint_period save_freq",
    ),
    ("training.keep={}", "", "save_total_limit"),
    ("training.evaluate_every={}", "steps", "eval_steps eval_interval eval_freq validation_freq"),
    (
        "training.evaluate_every=N",
        "steps; saves: training.checkpoint_every=N",
        "save_strategy evaluation_strategy eval_strategy",
    ),
    (
        "",
        "every step is logged in the run's metrics.jsonl; there is nothing to set",
        "logging_steps log_interval log_freq log_period logging_strategy",
    ),
    (
        "training.wandb=PROJECT",
        "or training.mlflow, training.swanlab; TensorBoard's events are always written",
        "report_to use_wandb enable_wandb wandb_project logger",
    ),
    (
        "checkpoint={}",
        CHECKPOINT,
        "model_name_or_path model_id model_path pretrained_model_name_or_path model_id_or_path base_model",
    ),
    (
        "",
        "a run goes on with --resume: python -m mmjax.train --resume RUN",
        "resume_from_checkpoint resume",
    ),
    (
        "init_from={}",
        "a run of mmjax",
        "load_parameters_path initial_load_path adapter_name_or_path",
    ),
    (
        "data={}",
        CHECKPOINT,
        "dataset_path data_path train_file dataset_name train_data data_files train_files",
    ),
    ("images={}", CHECKPOINT, "image_folder image_dir media_dir image_root"),
    ("validation={}", CHECKPOINT, "eval_dataset val_dataset validation_file val_data"),
    (
        "data.chat.template=FILE",
        "the checkpoint's own is used by default",
        "chat_template template",
    ),
    (
        "data.workers={}",
        "",
        "dataloader_num_workers preprocessing_num_workers num_workers num_proc dataset_num_proc grain_worker_count",
    ),
    ("data.prefetch={}", "", "dataloader_prefetch_factor"),
    ("data.sources.NAME.weight=W", "of each source", "interleave_probs mixing_weights"),
    (
        "batch.grouping=pack",
        "the default",
        "packing neat_packing sample_packing group_by_length padding_free",
    ),
    (
        "mesh.fsdp=N",
        SHARDS,
        "deepspeed fsdp zero_stage zero sharding_strategy data_parallel_shard_degree "
        "ici_fsdp_parallelism dcn_fsdp_parallelism",
    ),
    (
        "mesh.data={}",
        "",
        "data_parallel_replicate_degree data_parallel_size ici_data_parallelism dcn_data_parallelism dp",
    ),
    (
        "mesh.tensor={}",
        "with units: units.llm.tensor",
        "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size ici_tensor_parallelism tp",
    ),
    (
        "mesh.context={}",
        "with units: units.llm.context",
        "context_parallel_size context_parallel_degree ici_context_parallelism sequence_parallel_size cp",
    ),
    (
        "mesh.context={}",
        "mesh.context_attention=heads is Ulysses'",
        "ulysses_sequence_parallel_size",
    ),
    ("mesh.sequence_parallel=on", "needs mesh.tensor above 1", "sequence_parallel"),
    (
        "mesh.expert={}",
        "",
        "expert_model_parallel_size expert_parallel_degree ici_expert_parallelism expert_parallel_size ep",
    ),
    (
        "units.llm.pipeline={}",
        "every encoder wants a unit too, such as units.vision.data=1",
        "pipeline_model_parallel_size pipeline_parallel_degree ici_pipeline_parallelism pp",
    ),
    (
        "units.llm.virtual=N",
        "",
        "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size",
    ),
    (
        "pipeline.schedule=1f1b",
        "or gpipe, eager, interleaved; of units",
        "pipeline_parallel_schedule",
    ),
    (
        "model.llm.remat=full",
        "by default what memory needs is computed again (auto)",
        "gradient_checkpointing activation_checkpoint activation_checkpointing recompute_granularity remat_policy",
    ),
    (
        "model.llm.attention=auto",
        "the kernel for GPUs, elsewhere blocks",
        "attn_implementation attn_impl flash_attn use_flash_attn attention_type use_flash_attention",
    ),
    ("model.llm.neftune_alpha={}", "", "neftune_noise_alpha neftune_alpha noisy_embedding_alpha"),
    ("model.lora.llm.rank={}", ADAPTERS, "lora_rank lora_r lora_dim"),
    ("model.lora.llm.alpha={}", ADAPTERS, "lora_alpha"),
    ("model.lora.llm.dora=true", ADAPTERS, "use_dora lora_dora"),
    ("model.lora.llm.scaling=sqrt_rank", ADAPTERS, "use_rslora rslora"),
    ("model.lora.llm.dropout={}", ADAPTERS, "lora_dropout"),
    ("model.lora.llm.layers=PATTERNS", ADAPTERS, "lora_target lora_target_modules target_modules"),
    (
        "",
        "adapters are a config's: python -m mmjax.train llava_lora; llava_style trains the whole LLM",
        "finetuning_type train_type tuner_type sft_type use_peft use_lora",
    ),
    (
        "model.encoders.vision.frozen={}",
        "",
        "freeze_vision_tower freeze_vit freeze_vision_model freeze_vision_encoder",
    ),
    (
        "model.encoders.vision.connector.frozen={}",
        "",
        "freeze_multi_modal_projector freeze_aligner freeze_vision_projection",
    ),
    ("model.llm.frozen=true", "or false", "freeze_language_model freeze_llm train_llm"),
    (
        "optimizer.modules.vision.learning_rate=R",
        "or .vision.connector: the projector's",
        "vision_tower_lr vit_lr aligner_lr mm_projector_lr vision_lr projector_lr",
    ),
    (
        "optimizer.modules.llm.lora.b_ratio={}",
        ADAPTERS,
        "loraplus_lr_ratio lorap_lr_ratio loraplus_ratio",
    ),
    (
        "optimizer.modules.vision.layer_decay=F",
        "or of llm; from a layer to the one before",
        "layer_decay layerwise_lr_decay llrd layer_wise_lr_decay",
    ),
    (
        "loss.label_smoothing={}",
        "of loss=cross_entropy",
        "label_smoothing_factor label_smoothing label_smoothing_eps",
    ),
    (
        "loss.beta={}",
        "of loss=dpo, orpo, kto and grpo",
        "pref_beta dpo_beta orpo_beta kto_beta rlhf_beta orpo_alpha",
    ),
    ("training.patience={}", "", "patience early_stopping_patience"),
    ("device={}", "auto, cpu, gpu or tpu", "hardware"),
    ("device=cpu", "", "no_cuda use_cpu"),
    ("loss=dpo", "or orpo; of pairs of answers", "pref_loss"),
    (
        "data.temperature=1",
        "as concat; by default sources come by their weights alone",
        "mix_strategy",
    ),
    (
        "",
        "the config and its loss say it: llava_style is sft, loss=dpo is dpo, loss=kto is kto",
        "stage",
    ),
    (
        "",
        "data=FILE, or one source for each name in a dataset_info.json: data.sources.NAME=dataset_info, with path and "
        "entry",
        "dataset",
    ),
    ("data.sources.NAME.path=FOLDER", "of a source of the kind dataset_info", "dataset_dir"),
    ("", "python -m mmjax.report RUN draws the curves", "plot_loss"),
    (
        "data.chat.train_on=last_assistant",
        "by default every answer of the assistant is trained on",
        "mask_history",
    ),
    (
        "data.sources.NAME.validation=FILE",
        "files of their own; no share of the training data is held out",
        "val_size",
    ),
    ("", "--overwrite replaces a run's folder", "overwrite_output_dir"),
    ("", "python -m mmjax.export RUN OUT exports a run", "export_dir"),
    ("", "the command says it: python -m mmjax.train trains", "do_train"),
    ("", "nothing of a checkpoint is executed; leave it out", "trust_remote_code"),
    ("", "where an encoder takes videos, it is model.encoders.NAME.videos.fps", "video_fps"),
    (
        "",
        "where a family resizes within limits, it is model.encoders.NAME.images.max_pixels",
        "image_max_pixels",
    ),
    (
        "",
        "all samples are trained on; num_samples of an entry in dataset_info.json draws some of them",
        "max_samples",
    ),
    ("", "the answers alone are trained on; data.chat.train_on says which", "train_on_prompt"),
    ("", "rows of an evaluation are filled as those of training", "per_device_eval_batch_size"),
    ("", "nothing stale is read from a cache; leave it out", "overwrite_cache"),
    (
        "",
        "samples are tokenized as they are read, and counted once; leave it out",
        "tokenized_path",
    ),
    ("training.watch.seconds={}", "that a step may take", "ddp_timeout"),
    ("", "the loss never holds all logits; leave it out", "enable_liger_kernel use_liger_kernel"),
)
OTHER_NAMES = {
    name: (spelling, about) for spelling, about, names in SETTINGS for name in names.split()
}

# What one mesh has and units have not, and the other way round: where a unit's devices are counted
# otherwise.
UNITS_ONLY = ("modules", "pipeline", "virtual", "cuts")
OTHER_WORLD = {
    "memory": "it is of all devices: mesh.memory, in GB",
    "host_memory": "it is of all devices: mesh.host_memory, in GB",
    "ranks_per_node": "units are placed in the order of the config; leave it out",
}


def name_here(key: str, text: str, fields: Iterable[str] = ()) -> str:
    """Answer a setting that is none of mmjax's: how it is written here, or an empty string.

    text: its value. fields: those of the section that it was sought in, which come before other
    sections'.
    """
    name = key.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
    section, _, rest = key.partition(".")
    if section == "units" and "." in rest and (about := OTHER_WORLD.get(name)):
        return f"no key of a unit; {about.format(unit=rest.partition('.')[0])}"
    if section == "mesh" and name in UNITS_ONLY:
        return f"no key of the mesh; units have it: units.llm.{name}, with devices for every module (docs/pipelines.md)"
    if name not in OTHER_NAMES:
        return ""
    spelling, about = OTHER_NAMES[name]
    if not spelling:
        return about
    if (field := spelling.partition("=")[0].rpartition(".")[2]) in fields:
        spelling = f"{key.rpartition('.')[0]}.{field}=" + spelling.partition("=")[2]
    switch = text.lower() in ("true", "false") and not spelling.endswith(".frozen={}")
    return f"here it is {spelling.format('...' if switch or not text else text)}" + (
        f" ({about})" if about else ""
    )


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line of options and settings, by default the program's.

    Settings are written key=value, --key=value or --key value, in any order with the others. Raises
    UserError for an option that is none.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    known = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help())))
    parser.add_argument(SETTING, action="append", default=[], help=argparse.SUPPRESS)
    words, places = _mark_settings(argv, known)
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise _no_option(unknown[0], argv, known)
    name = "words" if "words" in args else "overrides"
    settings = [*getattr(args, name), *args.setting]
    settings.sort(key=lambda word: places.get(word, argv.index(word) if word in argv else 0))
    setattr(args, name, settings)
    return args


def _mark_settings(argv: Sequence[str], known: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Write each `--key value` and `--key=value` as one option, `--setting=key=value`; and return the settings' places.

    The parser then takes them for no word of its own.
    """
    words = list[str]()
    places = dict[str, int]()
    rest = iter(enumerate(argv))
    for place, word in rest:
        option, equals, text = word.partition("=")
        if option == "--":
            return [*words, *argv[place:]], places
        if not _is_setting(option, known):
            words.append(word)
            continue
        if not equals:
            text = next(rest, (0, "--"))[1]
            if text.startswith("--") or "=" in text:
                raise UserError(
                    f"{option} is none of the command's options, and has no value as a setting; write {option}=VALUE"
                )
        setting = f"{option.removeprefix('--')}={text}"
        words.append(f"{SETTING}={setting}")
        places[setting] = place
    return words, places


def _is_setting(option: str, known: Sequence[str]) -> bool:
    """Tell whether an option is a key of configs, or may be an argument of one's function."""
    key = option.removeprefix("--")
    if key == option or option in known:
        return False
    if key.partition(".")[0] in CONFIG_KEYS:
        return True
    return not difflib.get_close_matches(option, known, 1, cutoff=0.8) and not name_here(key, "")


def _no_option(word: str, argv: Sequence[str], known: Sequence[str]) -> UserError:
    """Make the error for an option that is none."""
    option, _, text = word.partition("=")
    if not text and (following := argv[argv.index(word) + 1 :]) and "=" not in following[0]:
        text = following[0].partition("--")[0]
    if close := difflib.get_close_matches(option, known, 1, cutoff=0.8):
        return UserError(f"{option} is no option: did you mean {close[0]}?")
    if answer := name_here(option.lstrip("-"), text):
        return UserError(f"{option} is no option: {answer}")
    return UserError(
        f"{option} is no option; there are {', '.join(known)}, and settings such as --training.steps=100"
    )
