"""A folder's tokenizer gives what transformers' AutoTokenizer gives for the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from mmjax.data.sample import BadSample
from mmjax.data.text import tokenizer as tokenizers_module
from mmjax.data.text.tokenizer import Encoded, load_tokenizer
from mmjax.errors import UserError

TEXTS = [
    *checkpoints.CORPUS[:6],
    "",
    " ",
    "  two  spaces ",
    "\n\n\nlines\n",
    "naïve cafe\u0301 ﬁ 😀👩‍👩‍👧 ع",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<s> a</s> b <s>c <image> <image><image>\n</s>",
    "a <mask> b<extra>c",
]
KINDS = {
    "qwen": (
        lambda: checkpoints.byte_level(checkpoints.QWEN_VL),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "llama3": (
        lambda: checkpoints.byte_level(checkpoints.LLAMA3, "<|begin_of_text|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "llama2": (
        lambda: checkpoints.llama2(("<image>",)),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "unigram": (
        checkpoints.unigram,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "gemma": (
        checkpoints.gemma,
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    ),
}


def assert_same(folder: Path) -> None:
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert len(ours) == len(theirs)
    for name in ("bos_token", "eos_token", "pad_token"):
        assert ours.id(ours.named.get(name)) == getattr(theirs, f"{name}_id")
    assert ours.named == theirs.special_tokens_map
    for text in TEXTS:
        for around in (False, True):
            ids = theirs.encode(text, add_special_tokens=around)
            assert ours.encode(text, around).ids.tolist() == ids, text
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
        before, after = ours.around
        assert [*before, *theirs.encode(text, add_special_tokens=False), *after] == theirs.encode(
            text
        )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    backend, named = KINDS[kind]
    assert_same(checkpoints.save(tmp_path, backend(), **named))


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        (LlamaTokenizer, checkpoints.llama2),
        (Qwen2Tokenizer, lambda: checkpoints.byte_level(checkpoints.CHATML)),
        (GemmaTokenizer, checkpoints.gemma),
    ],
)
def test_folders_of_the_families_own_classes_are_read(
    tmp_path: Path, family: type, backend: Any
) -> None:
    model = json.loads(backend().to_str())["model"]
    made = family(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    made.add_special_tokens({"extra_special_tokens": ["<image>", "<|im_start|>"]})
    made.save_pretrained(tmp_path)
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is family
    assert_same(tmp_path)


def test_special_tokens_that_only_the_files_beside_it_name_are_added(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    checkpoints.save(tmp_path, checkpoints.llama2(), **named)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<mask>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"additional_special_tokens": ["<extra>"]})
    )
    assert_same(tmp_path)
    assert load_tokenizer(str(tmp_path)).id("<extra>") is not None


def test_special_tokens_of_older_files_are_read(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.CHATML))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    ways = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {"900": {"content": "<extra>", **ways, "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            config
            | {
                "added_tokens_decoder": decoder,
                "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", **ways},
            }
        )
    )
    assert_same(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", **ways}, "pad_token": "<|endoftext|>"})
    )
    assert_same(tmp_path)


def test_every_character_belongs_to_a_token(tmp_path: Path) -> None:
    """Also spaces, which byte-level tokenizers leave out of their offsets unless told."""
    tokenizer = load_tokenizer(
        str(checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.CHATML)))
    )
    text = "a  cat\n\n sits   on <|im_end|> mats  "
    encoded = tokenizer.encode(text)
    covered = np.zeros(len(text), bool)
    for begin, end in zip(encoded.begin, encoded.end, strict=True):
        assert begin < end
        covered[begin:end] = True
    assert covered.all()
    at = encoded.touching(text.index("cat"), text.index("cat") + 3)
    assert text[encoded.begin[at.start] : encoded.end[at.stop - 1]].strip() == "cat"


def test_padding_and_truncation_saved_with_a_tokenizer_are_not_used(tmp_path: Path) -> None:
    backend = checkpoints.llama2()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="</s>")
    checkpoints.save(tmp_path, backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(checkpoints.CORPUS[0]).ids) == checkpoints.CORPUS[0]


def test_an_answer_ends_with_what_generation_config_says(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.CHATML), eos_token="<|im_end|>")
    end, stop = (load_tokenizer(str(tmp_path)).id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert load_tokenizer(str(tmp_path)).ends == (end,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, stop]}))
    assert load_tokenizer(str(tmp_path)).ends == (end, stop)


def test_the_fingerprint_changes_with_the_vocabulary(tmp_path: Path) -> None:
    one = load_tokenizer(
        str(checkpoints.save(tmp_path / "a", checkpoints.byte_level(checkpoints.CHATML)))
    )
    two = load_tokenizer(
        str(checkpoints.save(tmp_path / "b", checkpoints.byte_level(checkpoints.QWEN_VL)))
    )
    assert (
        one.fingerprint() == load_tokenizer(str(tmp_path / "a")).fingerprint() != two.fingerprint()
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "AutoTokenizer.from_pretrained"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json is no JSON: .*; get the file again"),
        ({"tokenizer.json": "[]"}, "no JSON object"),
        ({"tokenizer.json": '{"model": 3}'}, "not a tokenizer that"),
    ],
)
def test_a_folder_without_a_fast_tokenizer_is_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_text_that_a_tokenizer_without_an_unknown_token_cannot_write_is_bad(
    tmp_path: Path,
) -> None:
    tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0)])).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("aa").ids.tolist() == [0, 0]
    with pytest.raises(BadSample, match=r"tokenizer\.json cannot tokenize it"):
        tokenizer.encode("b")
    good, bad = tokenizer.encode_all(["a", "b"])
    assert isinstance(good, Encoded)
    assert isinstance(bad, BadSample)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        load_tokenizer(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (
            "tokenizer_config.json",
            {"additional_special_tokens": [True]},
            "additional_special_tokens='True' is no",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "extra_special_tokens='5' is no"),
        ("tokenizer_config.json", {"bos_token": {"content": 7}}, "bos_token="),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>", "special": 1}}, "eos_token="),
        ("tokenizer_config.json", {"unk_token": "\ud800"}, "unk_token="),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"content": "x"}},
            "added_tokens_decoder: content=",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": -1}}, "added_tokens_decoder: 9="),
        ("tokenizer_config.json", {"added_tokens_decoder": ["x"]}, "added_tokens_decoder="),
        ("generation_config.json", {"eos_token_id": [1, "2"]}, "eos_token_id="),
        ("tokenizer.json", {"post_processor": "ByteLevel"}, "is not a tokenizer"),
        (
            "tokenizer.json",
            {"post_processor": {"type": "Sequence", "processors": [5]}},
            "is not a tokenizer",
        ),
        ("tokenizer.json", {"post_processor": []}, "is not a tokenizer"),
        (
            "tokenizer.json",
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {"</s>": {"id": "</s>", "ids": [0], "tokens": ["</s>"]}},
                }
            },
            "has a post_processor that leaves no text",
        ),
        (
            "tokenizer.json",
            {"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}},
            "of the id 2147483648",
        ),
    ],
)
def test_a_value_of_another_type_in_a_tokenizers_files_is_refused_by_file_and_key(
    tmp_path: Path, file: str, content: dict[str, Any], named: str
) -> None:
    make, config = KINDS["qwen"]
    make().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    with pytest.raises(UserError, match=file) as error:
        load_tokenizer(str(tmp_path))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}),
        ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
        ("llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
        ("llava", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
        ("mistral", {"tokenizer_class": "LlamaTokenizer"}),
    ],
)
def test_spaces_behind_special_tokens_are_those_that_transformers_makes(
    tmp_path, model_type, config
):
    backend = checkpoints.llama2(("<image>",))
    # As Llama 2 and Vicuna have it: a space before every piece of text.
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(spaces), None
    checkpoints.save(tmp_path, backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_same(tmp_path)


def test_tokens_of_an_older_file_of_added_tokens_are_read(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.CHATML), eos_token="<|im_end|>")
    before = len(load_tokenizer(str(tmp_path)))
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("added_tokens_decoder", None)
    path.write_text(json.dumps(config | {"additional_special_tokens": ["<extra>"]}))
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<image>": before, "<extra>": before + 1})
    )
    assert_same(tmp_path)
    assert load_tokenizer(str(tmp_path)).id("<image>") == before


def test_a_text_of_too_many_tokens_is_refused_before_they_are_in_memory_and_others_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(
        str(checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.CHATML)))
    )
    longer, whole = "\N{GRINNING FACE}" * 300, "héllo wörld! " * 20
    expected = tokenizer.encode(whole)
    monkeypatch.setattr(tokenizers_module, "MAX_TOKENS", 1000)
    monkeypatch.setattr(tokenizers_module, "LONG", 100)
    with pytest.raises(BadSample, match=r"has a text of more than 1,000 tokens"):
        tokenizer.encode(longer)
    refused, same = tokenizer.encode_all([longer, whole])
    assert "1,000 tokens" in str(refused)
    assert [array.tolist() for array in vars(same).values()] == [
        array.tolist() for array in vars(expected).values()
    ]
