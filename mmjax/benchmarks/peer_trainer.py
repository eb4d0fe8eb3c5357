"""Run transformers' side of `peer`: ``python -m mmjax.benchmarks.peer_trainer TASK.json``, started by the command.

With `prepare JSON` it writes the checkpoints that both sides load, and the Trainer's samples:
tokenised and with their pixels prepared, so that its loading costs nothing.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.benchmarks.peer_data import (
    IMAGES,
    MERGED,
    PATCH,
    RECORDS,
    SIZES,
    SPECIAL,
    TEMPLATE,
    Size,
    tokenizer_json,
)
from mmjax.benchmarks.peer_process import Gate, Task
from mmjax.errors import exit_process, run_command

IGNORED = -100  # label of a token that is not learned
PREPARED = "prepared"
LOADING = 4  # processes that read samples for a GPU
SPECIAL_NAMES = ("vision_start", "vision_end", "image", "video")  # of the last special tokens
ADAPTED = r".*language_model\..*\.(q|k|v|o|gate|up|down)_proj"

# -------------------------------------------------------------------------------------------------
# what both sides read


def save_checkpoint(folder: Path, size: Size, seed: int) -> None:
    """Save a Qwen2.5-VL with random weights, its tokenizer and its processor, as transformers does."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        extra_special_tokens=list(SPECIAL[1:]),
    )
    tokenizer.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGED // PATCH,
        temporal_patch_size=2,
        min_pixels=MERGED**2,
        max_pixels=10**7,
    )
    processor.save_pretrained(folder)
    head = size.width // size.heads // 2  # frequencies: of time, rows and columns
    spatial = 3 * head // 8
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size.vocab,
            "hidden_size": size.width,
            "intermediate_size": size.mlp,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [head - 2 * spatial, spatial, spatial],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": size.vision_layers,
            "hidden_size": size.vision_width,
            "intermediate_size": size.vision_mlp,
            "num_heads": size.vision_heads,
            "patch_size": PATCH,
            "out_hidden_size": size.width,
            "window_size": size.window,
            "fullatt_block_indexes": [*range(7, size.vision_layers, 8)] or [size.vision_layers - 1],
        },
        tie_word_embeddings=size.tied,
        **{
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
            for name, token in zip(SPECIAL_NAMES, SPECIAL[3:], strict=True)
        },
    )
    torch.manual_seed(seed)
    with torch.device(device()):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    # what a GPU trains has billions of parameters
    model = model.to(torch.bfloat16) if device() == "cuda" else model
    model.save_pretrained(folder)


def device() -> str:
    """Name the device that the Trainer trains on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare_samples(checkpoint: Path, data: Path) -> None:
    """Write every record's tokens, labels and pixels, as transformers makes them.

    A line break behind `<image>` is left out, as mmjax leaves it out.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    begin = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (data / PREPARED).mkdir()
    samples = []
    for number, line in enumerate((data / RECORDS).read_text().splitlines()):
        record = json.loads(line)
        images = [Image.open(data / IMAGES / name).convert("RGB") for name in record["images"]]
        grids = np.zeros((0, 3), np.int64)
        if images:
            made = processor(images, return_tensors="np")
            grids = made["image_grid_thw"]
            np.save(data / PREPARED / f"{number}.npy", made["pixel_values"].astype(np.float32))
        question, answer = (turn["value"] for turn in record["conversations"])
        parts = [{"type": "image"}] * len(images) + [
            {"type": "text", "text": question.replace("<image>\n", "")}
        ]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        first, *rest = text.split("<|image_pad|>")
        counts = grids.prod(1) // (MERGED // PATCH) ** 2
        text = first + "".join(
            "<|image_pad|>" * int(n) + after for n, after in zip(counts, rest, strict=True)
        )
        ids = np.array(tokenizer(text)["input_ids"])
        samples.append({"ids": ids, "labels": _labels(ids, begin, end), "grids": grids})
    np.save(data / PREPARED / "samples.npy", np.array(samples, object), allow_pickle=True)


def _labels(ids: np.ndarray, begin: list[int], end: int) -> np.ndarray:
    """Return the labels of a sample whose last turn is learned, with the token that ends it."""
    starts = [k + len(begin) for k in range(len(ids)) if ids[k : k + len(begin)].tolist() == begin]
    labels = np.full(len(ids), IGNORED)
    stop = np.flatnonzero(ids == end)[-1] + 1
    labels[starts[-1] : stop] = ids[starts[-1] : stop]
    return labels


# --------------------------------------------------------------------------------------------------
# the training


class Samples(torch.utils.data.Dataset):
    """The prepared samples of a data set."""

    def __init__(self, data: Path) -> None:
        self.folder = data / PREPARED
        self.samples = np.load(self.folder / "samples.npy", allow_pickle=True)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self.samples[number]
        found = {"input_ids": sample["ids"], "labels": sample["labels"]}
        if len(sample["grids"]):
            found |= {"pixels": self.folder / f"{number}.npy", "grids": sample["grids"]}
        return found


def collate(samples: list[dict[str, Any]], pad: int, image: int) -> dict[str, torch.Tensor]:
    """Pad samples to the longest of them, and read their pixels."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(key: str, value: int) -> torch.Tensor:
        rows = [np.pad(s[key], (0, longest - len(s[key])), constant_values=value) for s in samples]
        return torch.from_numpy(np.stack(rows))

    ids = padded("input_ids", pad)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch = {
        "input_ids": ids,
        "labels": padded("labels", IGNORED),
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "mm_token_type_ids": (ids == image).int(),
    }
    if pixels := [np.load(sample["pixels"]) for sample in samples if "pixels" in sample]:
        batch["pixel_values"] = torch.from_numpy(np.concatenate(pixels))
        batch["image_grid_thw"] = torch.from_numpy(
            np.concatenate([s["grids"] for s in samples if "grids" in s])
        )
    return batch


class GatedTrainer(transformers.Trainer):
    """transformers' Trainer, which counts what it trains on."""

    gate: Gate
    last_loss: torch.Tensor | None = None

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Train a step, and count its samples, tokens and positions."""
        mask = inputs["attention_mask"]
        self.gate.count(len(mask), int(mask.sum()), mask.numel())
        self.last_loss = super().training_step(model, inputs, *args, **kwargs)
        return self.last_loss

    def loss_of(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compute the loss of the samples with these numbers, as a step of all of them would, one by one."""
        samples = [self.train_dataset[number] for number in request["loss_of"]]
        learned = [int((sample["labels"] != IGNORED).sum()) for sample in samples]
        loss = 0.0
        with torch.no_grad(), self.compute_loss_context_manager():
            for sample, count in zip(samples, learned, strict=True):
                inputs = self._prepare_inputs(self.data_collator([sample]))
                loss += count * float(self.compute_loss(self.model, inputs)) / sum(learned)
        return {"loss": loss, "tokens": sum(len(sample["input_ids"]) for sample in samples)}


@dataclass
class BeforeSteps(transformers.TrainerCallback):
    """Puts the gate before every step."""

    trainer: GatedTrainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait until the step is requested."""
        loss = self.trainer.last_loss
        gigabytes = torch.cuda.max_memory_allocated() / 1e9 if device() == "cuda" else 0.0
        self.trainer.gate.before_step(
            lambda: {} if loss is None else {"loss": float(loss), "GB": gigabytes}
        )


def attention() -> str:
    """Name the attention that a user would choose."""
    installed = device() == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if installed else "sdpa"


def load_model(task: Task) -> torch.nn.Module:
    """Load the checkpoint, with adapters where they are tuned."""
    on_gpu = device() == "cuda"
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        task.checkpoint,
        # Frozen weights are kept in bfloat16 on both sides, masters of others in float32.
        dtype=torch.bfloat16 if on_gpu and task.tune == "lora" else torch.float32,
        attn_implementation=attention(),
    ).to(device())
    model.config.use_cache = False
    if task.tune == "full":
        return model
    import peft  # takes a second, and only LoRA needs it

    adapters = peft.LoraConfig(
        r=task.rank, lora_alpha=task.alpha, lora_dropout=0.0, target_modules=ADAPTED
    )
    return peft.get_peft_model(model, adapters)


def make_trainer(
    task: Task, model: torch.nn.Module, gate: Gate, batch: int, checkpointing: bool = False
) -> GatedTrainer:
    """Make a Trainer as a user does. batch: samples that pass through the model at once."""
    pad = transformers.AutoTokenizer.from_pretrained(task.checkpoint).pad_token_id
    on_gpu = device() == "cuda"
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(task.folder) / "run"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=task.batch // batch,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_num_workers=LOADING if on_gpu else 0,
        max_steps=task.steps,
        learning_rate=task.learning_rate,
        weight_decay=task.weight_decay,
        adam_beta2=task.b2,
        lr_scheduler_type="constant",
        train_sampling_strategy=task.strategy,
        bf16=task.precision == "bfloat16",
        seed=task.seed,
        use_cpu=not on_gpu,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GatedTrainer(
        model=model,
        args=arguments,
        train_dataset=Samples(Path(task.data)),
        data_collator=partial(collate, pad=pad, image=model.config.image_token_id),
    )
    trainer.gate = gate
    trainer.add_callback(BeforeSteps(trainer))
    return trainer


def train(task: Task) -> None:
    """Train as a user of the Trainer does."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trainer = make_trainer(task, load_model(task), gate := Gate(), task.batch)
    gate.answer = trainer.loss_of
    trainer.train()


def train_forms(task: Task) -> None:
    """Train in all forms that a user may choose among, one after the other, each with the largest batch that fits."""
    gate = Gate()
    model = load_model(task)
    requests = list(task.requests)
    for strategy, checkpointing in itertools.product(("group_by_length", "random"), (False, True)):
        if not checkpointing:
            model.gradient_checkpointing_disable()
        batch = task.batch
        while batch:
            trainer = make_trainer(
                replace(task, strategy=strategy), model, gate, batch, checkpointing
            )
            form = {"strategy": strategy, "checkpointing": checkpointing, "batch": batch}
            gate.answer = trainer.loss_of
            gate.plan(requests, attention=attention(), **form)
            try:
                trainer.train()
            except SystemExit:
                break
            except torch.OutOfMemoryError:
                batch //= 2
            finally:
                del trainer
                _free_memory(model)
        # Once is enough for the losses of samples.
        requests = [request for request in requests if "steps" in request]


def _free_memory(model: torch.nn.Module) -> None:
    """Give back what a training has left behind, but the model."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Run the command line."""
    if sys.argv[1] == "prepare":
        folder, sizes, sets, seed = json.loads(sys.argv[2])
        for size in sizes:
            save_checkpoint(Path(folder) / size, SIZES[size], seed)
        for name in sets:
            prepare_samples(Path(folder) / sizes[0], Path(folder) / "data" / name)
        return
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    if task.requests:
        train_forms(task)
    else:
        train(task)


if __name__ == "__main__":
    exit_process(run_command(main))
