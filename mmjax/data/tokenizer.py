"""The tokenizer of a Hugging Face folder: its `tokenizer.json`, with the special tokens that the files beside it name.

What `transformers` would load, without it: ids and texts are those of its `AutoTokenizer` wherever that uses the
folder's `tokenizer.json` as it stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mmjax.errors import UserError

Json = dict[str, Any]

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")  # that WordPiece and Unigram may leave


@dataclass(frozen=True)
class Encoded:
    """One text's tokens. A token's place is where its characters are in the text."""

    ids: np.ndarray  # int32 [n]
    begin: np.ndarray  # int64 [n]
    end: np.ndarray  # int64 [n]: behind its last character

    def touching(self, begin: int, end: int) -> slice:
        """The tokens that hold any character of a stretch of the text."""
        first = np.searchsorted(self.end, begin, side="right")
        return slice(int(first), max(int(first), int(np.searchsorted(self.begin, end, side="left"))))


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer. Nothing is added to a text and nothing is cut, unless said."""

    folder: str
    backend: tokenizers.Tokenizer
    named: dict[str, str]  # special tokens by name, as templates know them: bos_token, eos_token, image_token, ...
    special: frozenset[str]  # all tokens that are never part of a longer one and not text
    around: tuple[tuple[int, ...], tuple[int, ...]]  # put before and after a text that no template wrote: <s>
    ends: tuple[int, ...]  # any of these ends an answer
    cleans: bool  # spaces before punctuation are taken out of decoded text

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def id(self, token: str | None) -> int | None:
        """The number of a token; None where there is no such token."""
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos(self) -> int | None:
        """Begins a text; None where the model has none."""
        return self.id(self.named.get("bos_token"))

    @property
    def eos(self) -> int | None:
        """Ends a text; None where the model has none."""
        return self.id(self.named.get("eos_token"))

    @property
    def pad(self) -> int | None:
        """Fills what holds nothing; None where the model has none."""
        return self.id(self.named.get("pad_token"))

    def encode(self, text: str, around: bool = False) -> Encoded:
        """Tokens of a text, in which special tokens are found; with what belongs before and after it, if wanted."""
        return _encoded(self.backend.encode(text, add_special_tokens=around))

    def encode_all(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Tokens of each text; made at once, on all cores that the variable TOKENIZERS_PARALLELISM allows."""
        return map(_encoded, self.backend.encode_batch(texts, add_special_tokens=False))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of these tokens."""
        text = self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        for spaced in SPACED if self.cleans else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def fingerprint(self) -> str:
        """Changes when a text's tokens may."""
        parts = (self.backend.to_str(), json.dumps(self.named, sort_keys=True))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _encoded(encoding: tokenizers.Encoding) -> Encoded:
    places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return Encoded(np.array(encoding.ids, np.int32), places[:, 0], places[:, 1])


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises UserError where it has none that can be read without code."""
    path = Path(folder) / "tokenizer.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder; give one that holds a Hugging Face checkpoint")
    if not path.exists():
        raise UserError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
        )
    config = tokenizer_config(folder)
    backend = _backend(path)
    named, extra = _special_tokens(config)
    _add_tokens(backend, config, [*named.values(), *extra])
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = {str(t.content) for t in backend.get_added_tokens_decoder().values() if t.special}
    bpe = isinstance(backend.model, tokenizers.models.BPE)
    return Tokenizer(
        folder=folder,
        backend=backend,
        named={name: _content(token) for name, token in named.items()},
        special=frozenset(special),
        around=_around(backend),
        ends=_ends(folder, backend, named.get("eos_token")),
        cleans=bool(config.get("clean_up_tokenization_spaces", False)) and not bpe,
    )


def read_json(path: Path) -> Json:
    """A JSON object; empty where there is no such file. Raises UserError where it is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}; get the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; get the file again")
    return value


def tokenizer_config(folder: str) -> Json:
    """`tokenizer_config.json`, with what older versions of transformers keep beside it."""
    config = read_json(Path(folder) / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(Path(folder) / "special_tokens_map.json")
    return config


def _backend(path: Path) -> tokenizers.Tokenizer:
    """The file's tokenizer. Spaces count as characters of their token, in places as in the text; ids don't change."""
    content = read_json(path)
    post = content.get("post_processor") or {}
    for processor in post.get("processors", [post]):
        if processor.get("type") == "ByteLevel":
            processor["trim_offsets"] = False
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}") from error


def _special_tokens(config: Json) -> tuple[dict[str, str | Json], list[str | Json]]:
    """Special tokens by name, and those without one. A token is its text, or an object with its text and its ways."""
    extra: list[str | Json] = []
    named = {k: v for k, v in config.items() if k in NAMED and v is not None}
    named |= {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, (str, dict))}
    for key in EXTRA:
        value = config.get(key)
        if isinstance(value, dict):
            named |= value
        elif isinstance(value, list) and not extra:
            extra = value
    return named, extra


def _content(token: str | Json) -> str:
    return token if isinstance(token, str) else token["content"]


def _added(token: str | Json) -> tokenizers.AddedToken:
    ways = {} if isinstance(token, str) else {k: token[k] for k in token.keys() & _WAYS}
    return tokenizers.AddedToken(_content(token), **{"special": True, **ways})


_WAYS = {"lstrip", "rstrip", "single_word", "normalized", "special"}


def _add_tokens(backend: tokenizers.Tokenizer, config: Json, named: Sequence[str | Json]) -> None:
    """Add what the files beside `tokenizer.json` say and it does not: in the order of their numbers, then the named."""
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    have = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    wanted = [token for _, entry in declared if repr(token := _added(entry)) not in have]
    known = {t.content for t in backend.get_added_tokens_decoder().values()} | {t.content for t in wanted}
    for token in named:
        if _content(token) not in known:
            known.add(_content(token))
            wanted.append(_added(token))
    if wanted:
        backend.add_tokens(wanted)


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer itself puts before and after a text."""
    if not backend.num_special_tokens_to_add(is_pair=False):
        return (), ()
    encoding = backend.encode("a", add_special_tokens=True)
    inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    return tuple(encoding.ids[: inner[0]]), tuple(encoding.ids[inner[-1] + 1 :])


def _ends(folder: str, backend: tokenizers.Tokenizer, eos: str | Json | None) -> tuple[int, ...]:
    """The tokens that end an answer: those of `generation_config.json`, else the tokenizer's own."""
    value = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    if value is None and eos is not None:
        value = backend.token_to_id(_content(eos))
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)
