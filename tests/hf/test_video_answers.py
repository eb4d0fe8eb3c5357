"""A run's answers about clips, and those of its export: by mmjax and by transformers the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from clips_made import frames_of, write_video
from commands import run
from fine_tuning import moved_run
from test_video import VIDEO, folder_of, patches_there

from mmjax import export, generate
from mmjax.config.loading import load
from mmjax.data.media.video import decode_video
from mmjax.hf.families import from_hf

QUESTION, TOKENS = "What?", 8


def answer_there(folder: Path, clip: Path, question: str = QUESTION) -> list[int]:
    """The most likely answer in transformers, about the frames that are decoded here."""
    encoder = from_hf(folder).encoders["vision"]
    with clip.open("rb") as file:
        patches = decode_video(file, encoder)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    grid = [len(patches), *(side // encoder.patch for side in patches[0].shape[1:3])]
    content = [{"type": "video"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(
        text.replace(VIDEO, VIDEO * (int(np.prod(grid)) // encoder.connector.merge**2))
    )["input_ids"]
    ids = torch.tensor([ids])
    with torch.no_grad():
        answer = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=2 * (ids == tokenizer.convert_tokens_to_ids(VIDEO)).int(),
            pixel_values_videos=patches_there(np.concatenate(patches), model.config.vision_config),
            video_grid_thw=torch.tensor([grid]),
            second_per_grid_ts=torch.tensor([seconds_per_patch(clip, encoder)]),
            do_sample=False,
            max_new_tokens=TOKENS,
        )
    return answer[0, ids.shape[1] :].tolist()


def seconds_per_patch(clip: Path, encoder) -> float:
    """A clip is named after its frames and their rate."""
    frames, rate = map(int, clip.stem.split("-"))
    taken = max(4, int(frames / rate * encoder.videos.fps)) // encoder.frames * encoder.frames
    return encoder.frames * frames / rate / taken


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(4))
def test_a_run_and_its_export_answer_about_clips_as_transformers_does_token_by_token(
    seed, tmp_path, capsys
):
    rng = np.random.default_rng(seed)
    folder_of("qwen2_5_vl", rng, tmp_path / "source")
    clips = [tmp_path / name for name in ("12-10.mp4", "20-5.mkv", "9-3.mp4")]
    for clip in clips:
        frames, rate = map(int, clip.stem.split("-"))
        write_video(clip, frames_of(rng, frames, *(8 * rng.integers(4, 9, 2))), rate)
    turns = [{"from": "human", "value": f"<video>{QUESTION}"}, {"from": "gpt", "value": "A cat."}]
    (tmp_path / "data.json").write_text(
        json.dumps([{"video": clips[0].name, "conversations": turns}])
    )
    words = {"checkpoint": tmp_path / "source", "data": tmp_path / "data.json", "images": tmp_path, "device": "cpu",
             "training.precision": "float32", "run": tmp_path / "run"}  # fmt: skip
    moved_run(load("llava_style", [f"{name}={value}" for name, value in words.items()]), 0.05)
    export.export(tmp_path / "run", tmp_path / "out")
    answers = []
    for clip in clips:
        wanted = answer_there(tmp_path / "out", clip)
        for folder in (tmp_path / "out", tmp_path / "run"):
            ended = run(
                capsys,
                generate.main,
                folder,
                "--video",
                clip,
                QUESTION,
                "--json",
                "--max-tokens",
                TOKENS,
            )
            assert ended.code == 0, ended.err
            tokens = json.loads(ended.out)["tokens"]
            # An end token ends ours alone.
            assert tokens == wanted[: len(tokens)], folder.name
        answers.append(tuple(wanted))
    assert len(set(answers)) > 1
