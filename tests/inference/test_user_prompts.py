"""A person's questions become conversations: media where the question has places for them, else before it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from checkpoints import QWEN2_VL, QWEN_VL, byte_level, save
from PIL import Image

from mmjax.config import ChatFormat, MediaLimits, SmartResize, VisionConfig
from mmjax.data.sample import BadSample, Item, MediaPlace, Message
from mmjax.data.text.load_chat import load_chat
from mmjax.errors import UserError
from mmjax.inference.prompts import UserPrompt, UserPromptSource, make_prompt

PICTURE, CLIP = MediaPlace("image"), MediaPlace("audio")


def test_media_stand_before_a_question_that_has_no_places():
    asked = make_prompt("What?", {"image": [b"1", b"2"], "audio": [b"3"]}, "Be brief.")
    assert asked.media == (b"1", b"2", b"3")
    assert asked.conversation.messages == (
        Message("system", ("Be brief.",)),
        Message("user", (PICTURE, PICTURE, CLIP, "What?")),
    )


def test_media_stand_in_the_places_that_a_question_has():
    asked = make_prompt(
        "Is <image> in <audio>, or <image>?", {"image": [b"1", b"2"], "audio": [b"3"]}
    )
    assert asked.media == (b"1", b"3", b"2")
    (message,) = asked.conversation.messages
    assert message.parts == ("Is ", PICTURE, " in ", CLIP, ", or ", PICTURE, "?")
    asked = make_prompt("Is it <image>?", {"audio": [b"3"], "image": [b"1"]})
    assert (asked.media, asked.conversation.messages[0].parts[0]) == ((b"3", b"1"), CLIP)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("", "is empty"),
        (" <image>\n", "is empty"),
        ("<image><image>?", "2 places <image> for 1"),
        ("<audio>?", "<audio>"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(question, message):
    with pytest.raises(UserError, match=message):
        make_prompt(question, {"image": [b"1"]})


def encoded(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(
        file, "PNG"
    )
    return file.getvalue()


def test_a_prompt_ends_where_its_answer_begins_and_its_items_are_as_facts_say(tmp_path):
    save(
        tmp_path, byte_level(QWEN_VL), QWEN2_VL, eos_token="<|im_end|>", image_token="<|image_pad|>"
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    chat = load_chat(ChatFormat(str(tmp_path)))
    vision = VisionConfig(1, 32, 2, 48, 4, images=SmartResize(4, 2, 64, 4096))
    first = make_prompt(
        "What is <image>, and <image>?", {"image": [encoded(30, 20), encoded(90, 64)]}
    )
    broken = UserPrompt(first.conversation, (first.media[0], first.media[1][:30]))
    prompts = UserPromptSource([first, make_prompt("What?", {}), broken], chat, {"eyes": vision})
    facts, sample = prompts.facts(0), prompts.sample(0)
    assert [s for s in sample.segments if isinstance(s, Item)] == [Item("eyes", 0), Item("eyes", 1)]
    for number, (name, size) in enumerate(facts.items):
        assert (name, prompts.item(0, number).shape) == ("eyes", (*size, 3))
    ids = np.concatenate([s.tokens for s in sample.segments if not isinstance(s, Item)])
    assert len(ids) == facts.text_tokens
    assert chat.tokenizer.decode(ids).endswith("?<|im_end|>\n<|im_start|>assistant\n")
    assert prompts.facts(1).items == ()
    with pytest.raises(BadSample, match="PNG"):
        prompts.facts(2)
    small = UserPromptSource([first], chat, {"eyes": vision}, limits=MediaLimits(max_side=80))
    with pytest.raises(BadSample, match="an image of 90 x 64 pixels has a side of more than 80"):
        small.facts(0)
