"""Keys of records that other stacks obey, each read or refused by name, and those that only describe a record.

Which keys a format reads stands with its parser (`chat_files.py`), and in `READ` for the documents.
What no table here has is counted by source and reported, so that nothing that a record asks for is
ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from mmjax.data.sample import TOOL_CALLS, TOOLS, BadSample

# Where a key stands: in a record, in a line of a manifest, in one of a record's messages, in a
# typed part of a message's content, or in an object that names a file.
Level = Literal["record", "manifest", "message", "part", "file"]

MEDIA = ("images", "image", "audios", "audio", "videos", "video")
# of a message: whether, and how much, it is trained on
TRAINED = ("weight", "loss", "train", "training")
# of a message: texts that go to the chat template, and the calls that it makes
FIELDS = ("reasoning_content", "name", "tool_call_id", TOOL_CALLS)


def _keys(*names: str) -> frozenset[str]:
    """Return the keys of lists that spaces divide."""
    return frozenset(" ".join(names).split())


READ: Mapping[str, frozenset[str]] = {
    "llava": _keys("conversations system", TOOLS, *MEDIA),
    "messages": _keys("messages system", TOOLS, *MEDIA),
    "questions": _keys("question answer answers system", *MEDIA),
    "manifest": _keys("audio_filepath text offset duration prompt"),
    "message": _keys("role from content value masked", *TRAINED, *FIELDS),
    "text part": _keys("type text"),
    "image part": _keys("type image path url bytes image_url"),
    "audio part": _keys("type audio path url bytes audio_url input_audio"),
    "video part": _keys("type video path url bytes video_url"),
    "file": _keys("bytes path url data format"),
}


@dataclass(frozen=True)
class Refusal:
    """Keys that change what is trained elsewhere, and that are not read here.

    values: types of the values that are an order; other values are a description. neutral: values
    that ask for what is done anyway. columns: whether a Parquet column of this name is an order
    too, though no key of the source names it.
    """

    keys: str
    obeyed: str  # by which stacks
    remedy: str
    values: tuple[type, ...] = (object,)
    neutral: tuple[Any, ...] = ()
    columns: bool = False

    def applies(self, value: Any) -> bool:
        """Tell whether a value is an order."""
        return isinstance(value, self.values) and value not in self.neutral


_MEDIA_OPTIONS = Refusal(
    "fps video_fps sample_fps nframes min_frames max_frames min_pixels max_pixels total_pixels "
    "resized_height resized_width video_start video_end start end start_time end_time begin_time clip_start clip_end "
    "video_metadata do_sample_frames max_tiles min_tiles max_num min_num",
    "qwen-vl-utils, ms-swift, LLaVA-Video",
    "cut or resize the file, or say rate and size for the whole source (model.encoders.NAME.videos, .images), and "
    "leave the key out",
    values=(bool, int, float, str, list, dict),
)
_SKIPPED = Refusal("_skipme", "NeMo", "leave the record out", neutral=(False,), columns=True)
_IN_MESSAGE = "it belongs to a message of the assistant"
_CALLS = (
    "name them tools, beside messages or conversations, and tool_calls, of a message of the assistant; or write calls "
    "and their results as text, in messages of the assistant and of the role tool"
)
REFUSED: Mapping[Level, tuple[Refusal, ...]] = {
    "record": (
        Refusal(
            "tools functions function_call tool_choice",
            "transformers, LLaMA-Factory, ms-swift, OpenAI",
            _CALLS,
            neutral=(False, "none"),
            columns=True,
        ),
        Refusal("documents", "transformers", "write them into a message", columns=True),
        Refusal(
            "chat_template chat_template_kwargs enable_thinking add_generation_prompt continue_final_message",
            "transformers, TRL",
            "say it for all records: data.chat.template, data.chat.variables",
            columns=True,
        ),
        Refusal(
            "weight weights loss loss_weight loss_scale loss_mask loss_masks sample_weight sample_weights "
            "train training mask masked train_on_turn train_on_input train_on_inputs train_on_prompt",
            "ms-swift, axolotl, OpenAI, NeMo",
            f"{_IN_MESSAGE} (weight, loss, train), and data.sources.NAME.weight to a source",
            values=(bool, int, float, str, list, dict),
            columns=True,
        ),
        Refusal(
            "reasoning_content reasoning thinking",
            "transformers",
            f"{_IN_MESSAGE}: reasoning_content",
        ),
        Refusal(
            "label kto_tag",
            "TRL, ms-swift, LLaMA-Factory (KTO)",
            "answers with a label are read by the kind preference ({prompt, completion, label}), with loss=kto",
            values=(bool,),
        ),
        Refusal(
            "chosen rejected rejected_response rejected_messages rejected_images chosen_images positive_messages "
            "negative_messages",
            "TRL, ms-swift",
            "pairs of answers are read by the kinds preference and dataset_info, with loss=dpo or loss=orpo",
            columns=True,
        ),
        Refusal(
            "margin", "TRL, ms-swift", "leave the key out: loss=dpo has no margin", columns=True
        ),
        Refusal(
            "reference_chosen_logps reference_rejected_logps",
            "TRL",
            "name them ref_chosen_logps and ref_rejected_logps",
            columns=True,
        ),
        Refusal(
            "response_mask responses_mask action_mask tool_mask env_mask assistant_masks completion_masks",
            "verl, OpenRLHF, TRL",
            "name it completion_mask, with a list of 0 and 1 for each answer of a rollouts source",
            columns=True,
        ),
        Refusal(
            "old_per_token_logps sampling_per_token_logps rollout_log_probs old_log_probs",
            "TRL, verl",
            "name it logprobs, with a list for each answer of a rollouts source",
            columns=True,
        ),
        Refusal(
            "ref_per_token_logps ref_log_probs", "TRL, verl", "name it ref_logprobs", columns=True
        ),
        Refusal(
            "completion_ids completion_mask logprobs ref_logprobs advantages",
            "TRL",
            "answers that a model has drawn are read by the kind rollouts, which trains with loss=grpo",
            columns=True,
        ),
        Refusal(
            "input_ids labels attention_mask position_ids completion completions",
            "TRL, axolotl",
            "give conversations, which data.chat makes tokens of",
            values=(list, dict, str),
            columns=True,
        ),
        Refusal(
            "history",
            "LLaMA-Factory, ms-swift",
            "write it as messages, or name it in columns of a dataset_info",
            columns=True,
        ),
        Refusal("system_prompt", "axolotl, other loaders", "name it system", columns=True),
        Refusal(
            "messages conversations instruction",
            "all stacks",
            "one record has one conversation: keep the key that the source's kind reads",
            values=(str, list),
        ),
        Refusal(
            "objects",
            "ms-swift",
            "write boxes into the text, as the model has them",
            values=(dict,),
        ),
        _SKIPPED,
        Refusal(
            "image_path image_paths image_file image_files image_url image_urls image_bytes image_base64 img imgs "
            "img_path img_paths image_list images_list pics picture pictures photo photos",
            "other loaders",
            "name it images",
            values=(str, list, dict),
        ),
        Refusal(
            "audio_path audio_paths audio_file audio_files audio_url audio_urls audio_filepath wav wavs sound sounds "
            "speech",
            "other loaders",
            "name it audios",
            values=(str, list, dict),
        ),
        Refusal(
            "video_path video_paths video_file video_files video_url video_urls vid vids frames",
            "other loaders",
            "name it videos",
            values=(str, list, dict),
        ),
        Refusal(
            "media medias files attachments", "other loaders", "name them images, audios or videos"
        ),
        Refusal(
            "role from content value", "all stacks", "it belongs to a message", values=(list, dict)
        ),
        _MEDIA_OPTIONS,
    ),
    "manifest": (
        Refusal(
            "taskname task_name source_lang target_lang pnc context command question",
            "NeMo (Canary, SALM)",
            "write what is asked of the clip as its prompt",
        ),
        Refusal("answer answers", "NeMo (SALM)", "name it text"),
        Refusal("channel_selector", "NeMo", "leave the key out: channels are averaged"),
        Refusal("weight loss loss_weight", "NeMo", "data.sources.NAME.weight weighs a source"),
        Refusal(
            "messages conversations system",
            "all stacks",
            "conversations are read by other kinds of sources",
        ),
        Refusal(
            "audio audios audio_path wav path video image",
            "other loaders",
            "name it audio_filepath",
        ),
        Refusal(
            "start end start_time end_time begin_time",
            "Kaldi",
            "name it offset and duration, in seconds",
        ),
        _SKIPPED,
    ),
    "message": (
        Refusal(
            "function_call functions tools documents",
            "transformers, OpenAI",
            _CALLS,
        ),
        Refusal(
            "reasoning thinking thought thoughts reasoning_details",
            "vLLM, gpt-oss",
            "name it reasoning_content",
        ),
        Refusal(
            "mask loss_mask loss_scale loss_weight train_detail training_detail token_weights train_on_turn trainable "
            "weights",
            "axolotl, ms-swift",
            "say weight, or loss or train as true or false, of the whole message",
        ),
        Refusal(
            "prefix partial prefill",
            "Mistral, DeepSeek",
            "write the whole answer as its content",
            neutral=(False,),
        ),
        Refusal("refusal annotations", "OpenAI", "write what is learned as its content"),
        Refusal(
            "eot eos", "torchtune", "leave the key out: each answer ends its turn", neutral=(True,)
        ),
        Refusal(
            " ".join(
                (
                    *MEDIA,
                    "image_path image_url img imgs audio_path audio_url video_path video_url media files",
                )
            ),
            "other loaders",
            "name files in a part of the content, or beside the messages",
        ),
        Refusal("system messages conversations", "all stacks", "it belongs to the record"),
        Refusal("text", "other loaders", "name it content", values=(str, list)),
        Refusal(
            "rejected chosen rejected_response", "ms-swift", "pairs are read by the kind preference"
        ),
        _MEDIA_OPTIONS,
    ),
    "part": (
        Refusal(
            " ".join((*MEDIA, "image_url audio_url video_url input_audio text path url bytes")),
            "transformers, OpenAI",
            "a part is one text or one medium, which its type names",
        ),
        Refusal(
            "content value file image_path img audio_path video_path",
            "other loaders",
            "name it by type",
        ),
        Refusal(
            " ".join((*TRAINED, "masked mask loss_mask loss_scale loss_weight train_detail")),
            "axolotl",
            f"{_IN_MESSAGE} as a whole",
        ),
        Refusal(
            "detail",
            "OpenAI",
            "say sizes for the whole source (model.encoders.NAME.images)",
            neutral=("auto",),
        ),
        Refusal("reasoning_content tool_calls", "OpenAI", "it belongs to a message"),
        _MEDIA_OPTIONS,
    ),
    "file": (
        Refusal(
            "detail",
            "OpenAI",
            "say sizes for the whole source (model.encoders.NAME.images)",
            neutral=("auto",),
        ),
        _MEDIA_OPTIONS,
    ),
}
# Known keys that change nothing elsewhere either.
DESCRIPTIONS: Mapping[Level, frozenset[str]] = {
    "record": _keys(
        "id uid uuid idx index sample_id record_id question_id image_id image_ids video_id audio_id source sources "
        "dataset dataset_name data_source subset split category task task_type type topic license lang language width "
        "height width_list height_list image_size num_tokens length meta metadata extra_info parallel_tool_calls "
        "channel speaker orig_sr shard_id md5 sha256 filename file_name"
    ),
    "manifest": _keys(
        "id uid uuid idx index sample_id utt_id source dataset speaker orig_sr sampling_rate shard_id lang language "
        "meta metadata extra_info filename file_name license split num_tokens task"
    ),
    "message": _keys("id uuid index timestamp created_at cache_control"),
    "part": _keys("id index cache_control"),
    "file": _keys("id mime_type media_type width height size"),
}
_NO_VALUE = ("", "[]", "{}", "null", "None")  # as text, which some data sets have for nothing


def is_absent(value: Any) -> bool:
    """Tell whether a value says nothing: None, something empty, or a text that says so (`"tools": "[]"`)."""
    if isinstance(value, str):
        return value.strip() in _NO_VALUE
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def unread_keys(
    values: Mapping[str, Any], level: Level, read: Set[str], where: str = ""
) -> list[str]:
    """List the keys with a value that nobody obeys, in order. where: a prefix for messages.

    Raises BadSample for one that is obeyed elsewhere, or that is nearly one of those that are read.
    """
    unread = []
    for name in sorted(values.keys() - read):
        if is_absent(values[name]) or name in DESCRIPTIONS[level]:
            continue
        for refusal in _refusals(level).get(name, ()) or _refusals(level).get(_plain(name), ()):
            if refusal.applies(values[name]):
                raise BadSample(
                    f"{where}has {name}, which is not read here ({refusal.obeyed} obey it); {refusal.remedy}"
                )
        if meant := _meant(name, frozenset(read)):
            numbered = name[-1:].isdigit() and meant in MEDIA
            remedy = (
                f"list all files under {meant.rstrip('s')}s"
                if numbered
                else f"did you mean {meant}?"
            )
            raise BadSample(f"{where}has {name}, which is not read; {remedy}")
        unread.append(name if level in ("record", "manifest") else f"{level}.{name}")
    return unread


def refused_columns(columns: Set[str], media: bool) -> list[str]:
    """List the columns of a table whose values are orders, though the source names them nowhere.

    media: whether the table's rows have media, of which a column may name a part or a size.
    """
    refusals = _refusals("record")
    return sorted(
        name
        for name in columns
        if any(
            refusal.columns or (media and refusal is _MEDIA_OPTIONS)
            for refusal in refusals.get(name, ())
        )
    )


@lru_cache
def _refusals(level: Level) -> Mapping[str, tuple[Refusal, ...]]:
    """Return the refusals of each key, and of each key as `_plain` writes it."""
    by_key: dict[str, tuple[Refusal, ...]] = {}
    for refusal in REFUSED[level]:
        for key in refusal.keys.split():
            for name in dict.fromkeys((key, _plain(key))):
                by_key[name] = (*by_key.get(name, ()), refusal)
    return by_key


def _plain(name: str) -> str:
    """Write a key without capitals, dashes and a number behind it, as in `image_1` and `maxPixels`."""
    return re.sub(r"[\W_]|[\W_\d]+$", "", name.lower())


@lru_cache(maxsize=4096)
def _meant(name: str, read: frozenset[str]) -> str:
    """Return the key that is read under nearly this name; empty where there is none."""
    name = name.lower().strip()
    if same := [key for key in sorted(read, key=len, reverse=True) if _plain(key) == _plain(name)]:
        return same[0]
    # letters, as in "vidoes"
    swapped = [key for key in sorted(read) if sorted(key) == sorted(name)]
    return next(iter((*swapped, *get_close_matches(name, sorted(read), 1, 0.85))), "")
