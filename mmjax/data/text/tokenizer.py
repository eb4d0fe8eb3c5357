"""Load the tokenizer of a Hugging Face folder, or the toy alphabet.

Ids and texts equal those of transformers' `AutoTokenizer`, which uses the folder's `tokenizer.json`
as it is, but for Llama's tokenizers (Llama 2, Vicuna), of which it takes vocabulary and merges
alone (`_as_llama`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mmjax.data.sample import BadSample
from mmjax.data.text.text_growth import GrowingText, check_growth
from mmjax.disk import read_json
from mmjax.errors import UserError

MAX_TOKENS = 1 << 21  # of a text; each takes some 400 bytes meanwhile
LONG = 1 << 18  # characters of a text whose tokens are counted first, piece by piece


Json = dict[str, Any]

SPACE = "\u2581"  # what SentencePiece writes for one
# Families of which transformers uses the file even where a folder says LlamaTokenizer.
FROM_FILE = (
    "mistral",
    "mixtral",
    "mistral3",
    "pixtral",
    "llava",
    "llava_next",
    "vipllava",
    "smolvlm",
    "glm4",
    "glm4v",
    "internlm2",
    "phi3",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
# Decoded WordPiece and Unigram text may have these instead of their stripped form
# (clean_up_tokenization_spaces).
SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


@dataclass(frozen=True)
class Encoded:
    """One text's tokens, with the characters of the text that each covers."""

    ids: np.ndarray  # int32 [n]
    begin: np.ndarray  # int64 [n]: first character
    end: np.ndarray  # int64 [n]: behind the last character

    def touching(self, begin: int, end: int) -> slice:
        """Return the tokens that cover any of the text's characters `begin` to `end` - 1."""
        # Tokens "a", " b" and "c" end at 1, 3 and 4 and begin at 0, 1 and 3: characters 2 to 3
        # touch tokens 1 to 2.
        first = int(np.searchsorted(self.end, begin, side="right"))
        return slice(first, max(first, int(np.searchsorted(self.begin, end, side="left"))))


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer. By default nothing is added to a text, and nothing is truncated."""

    folder: str
    backend: tokenizers.Tokenizer
    # special tokens by name, as templates use them: bos_token, eos_token, image_token, ...
    named: dict[str, str]
    special: frozenset[str]  # tokens that are matched as a whole and are not text
    # ids that it adds before and after a text, such as <s>
    around: tuple[tuple[int, ...], tuple[int, ...]]
    ends: tuple[int, ...]  # any of these ends an answer
    cleans: bool  # whether decoding removes spaces before punctuation

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def id(self, token: str | None) -> int | None:
        """Return the id of a token; None for none."""
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, around: bool = False) -> Encoded:
        """Tokenize a text, parsing special tokens in it; around: add the tokens before and after it.

        Raises BadSample for one of more than `MAX_TOKENS`, about, of which no more are ever in
        memory.
        """
        with _faults_as_bad(self.folder):
            if len(text) > LONG:
                pieces = (text[k : k + LONG] for k in range(0, len(text), LONG))
                for tokens in accumulate(
                    len(self.backend.encode(piece, add_special_tokens=False)) for piece in pieces
                ):
                    if tokens > MAX_TOKENS:
                        raise BadSample(f"has a text of more than {MAX_TOKENS:,} tokens")
            return _encoded(self.backend.encode(text, add_special_tokens=around))

    def encode_all(self, texts: Sequence[str]) -> Iterator[Encoded | BadSample]:
        """Tokenize texts as a batch, on all cores unless the variable TOKENIZERS_PARALLELISM is false.

        Yields in place of one that cannot be tokenized why that is.
        """
        if max(map(len, texts), default=0) > LONG:
            return map(self._encode_or_bad, texts)
        try:
            with _faults_as_bad(self.folder):
                return map(_encoded, self.backend.encode_batch(texts, add_special_tokens=False))
        except BadSample:
            return map(self._encode_or_bad, texts)

    def _encode_or_bad(self, text: str) -> Encoded | BadSample:
        try:
            return self.encode(text)
        except BadSample as error:
            return error

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Decode tokens to text."""
        with _faults_as_bad(self.folder):
            text = self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        for spaced in SPACED if self.cleans else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def fingerprint(self) -> str:
        """Hash everything that a text's tokens depend on."""
        parts = (self.backend.to_str(), json.dumps(self.named, sort_keys=True))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _encoded(encoding: tokenizers.Encoding) -> Encoded:
    begin, end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    return Encoded(np.array(encoding.ids, np.int32), begin, end)


@contextmanager
def _faults_as_bad(folder: str) -> Iterator[None]:
    """Turn what the library raises into BadSample: a plain Exception, or a panic, which is none.

    Such as of a pattern that would search for ages, and of a text that has a token which the model
    lacks.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise BadSample(f"{folder}/tokenizer.json cannot tokenize it: {error}") from None


def load_tokenizer(folder: str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder. Raises UserError where it has none that can be read without code."""
    path = Path(folder) / "tokenizer.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder; give one that holds a Hugging Face checkpoint")
    if not path.exists():
        raise UserError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
        )
    config = tokenizer_config(folder)
    backend = _backend(path, config)
    try:
        named, extra = _special_tokens(config)
        if "added_tokens_decoder" not in config:
            config["added_tokens_decoder"] = _older_added_tokens(
                folder, backend, [*named.values(), *extra]
            )
        _add_tokens(backend, config, [*named.values(), *extra])
        around = _around(folder, backend)
    except _NoToken as error:
        raise UserError(
            f"{path.with_name('tokenizer_config.json')}: {error}; get the file again"
        ) from None
    except BadSample as error:
        raise UserError(f"{error}; use the model's own tokenizer.json") from None
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = {str(t.content) for t in backend.get_added_tokens_decoder().values() if t.special}
    # transformers ignores the setting for BPE, whose decoder restores spaces exactly.
    bpe = isinstance(backend.model, tokenizers.models.BPE)
    return Tokenizer(
        folder=folder,
        backend=backend,
        named={name: _content(token) for name, token in named.items()},
        special=frozenset(special),
        around=around,
        ends=_ends(folder, backend, named.get("eos_token")),
        cleans=bool(config.get("clean_up_tokenization_spaces", False)) and not bpe,
    )


def tokenizer_config(folder: str) -> Json:
    """Read `tokenizer_config.json`, with what older versions of transformers write to a file beside it."""
    config = read_json(Path(folder) / "tokenizer_config.json", {})
    if "added_tokens_decoder" not in config:
        config |= read_json(Path(folder) / "special_tokens_map.json", {})
    return config


def _backend(path: Path, config: Json) -> tokenizers.Tokenizer:
    """Load the file's tokenizer, with ByteLevel's leading spaces counted in offsets; ids don't change."""
    content = read_json(path)
    if (largest := _largest_id(content)) > MAX_ID:
        raise UserError(f"{path} has a token of the id {largest}; at most {MAX_ID} is accepted")
    if _is_llama(path.parent, config, content):
        content = _as_llama(content, config)
    post = content.get("post_processor")
    inner = post.get("processors", [post]) if isinstance(post, dict) else ()
    # With trim_offsets the token " cat" would begin at "c", and the space would belong to no token.
    for processor in inner if isinstance(inner, list) else ():
        if isinstance(processor, dict) and processor.get("type") == "ByteLevel":
            processor["trim_offsets"] = False
    try:
        check_growth(content)
        with _faults_as_bad(str(path.parent)):
            return tokenizers.Tokenizer.from_str(json.dumps(content))
    except GrowingText as error:
        raise UserError(f"{path}: {error}; use the model's own tokenizer.json") from None
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{path} is not a tokenizer that tokenizers {tokenizers.__version__} reads: {error}"
        ) from error


def _is_llama(folder: Path, config: Json, content: Json) -> bool:
    """Return whether transformers makes a `LlamaTokenizer` of a folder, whatever its `tokenizer.json` says."""
    model = read_json(folder / "config.json", {})
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class"))
    # Llama 3's files are of another kind, though its folders say the same class.
    by_bytes = '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    pieces = content.get("model")
    is_llama = (
        name.removesuffix("Fast") == "LlamaTokenizer"
        and isinstance(pieces, dict)
        and pieces.get("type") == "BPE"
    )
    return is_llama and not by_bytes and model.get("model_type") not in FROM_FILE


def _as_llama(content: Json, config: Json) -> Json:
    """Return a `tokenizer.json` as `LlamaTokenizer` makes it anew.

    Older files put a space before every piece of text between special tokens (a normalizer,
    `Prepend`). The class does so only before a text's first piece, unless `legacy` is true.
    """
    spaced = config.get("add_prefix_space")
    spaced = True if spaced is None else spaced
    scheme = ("always" if config.get("legacy") else "first") if spaced else "never"
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []),
    ]
    return content | {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": content["model"] | {"fuse_unk": True, "byte_fallback": True, "dropout": None},
    }


def _older_added_tokens(
    folder: str, backend: tokenizers.Tokenizer, named: Sequence[str | Json]
) -> Json:
    """Read `added_tokens.json`, which older versions of transformers write: tokens beyond the vocabulary, by id."""
    special = set(map(_content, named))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    file = Path(folder) / "added_tokens.json"
    older = read_json(file, {})
    if wrong := [token for token, number in older.items() if type(number) is not int or number < 0]:
        raise UserError(f"{file}: {wrong[0][:80]!r} has no number of a token; get the file again")
    return {
        str(number): {
            "content": token,
            "normalized": token not in special,
            "special": token in special,
        }
        for token, number in older.items()
        if token not in known
    }


def _largest_id(content: Json) -> int:
    model, added = content.get("model"), content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += (
        [token.get("id") for token in added if isinstance(token, dict)]
        if isinstance(added, list)
        else []
    )
    return max((i for i in ids if isinstance(i, int)), default=0)


def _special_tokens(config: Json) -> tuple[dict[str, str | Json], list[str | Json]]:
    """Return special tokens by name, and those without one. A token is its text, or an object with text and options.

    Raises _NoToken, naming the key.
    """
    extra: list[str | Json] = []
    named = {k: v for k, v in config.items() if k in NAMED and v is not None}
    named |= {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str | dict)}
    for key in EXTRA:
        value = config.get(key)
        if isinstance(value, dict):
            named |= value
        elif isinstance(value, list):
            for token in value:
                _check_token(key, token)
            extra = extra or value
        elif value is not None:
            raise _NoToken(key, value)
    for name, token in named.items():
        _check_token(name, token)
    return named, extra


class _NoToken(ValueError):
    """A value where a special token belongs, by its key."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__(
            f"{key}={str(value)[:80]!r} is no special token: its text, or an object with its content"
        )


def _check_token(key: str, token: Any) -> None:
    """Raise _NoToken where this is neither a text nor an object with one and true or false for each option."""
    content = token.get("content") if isinstance(token, dict) else token
    options = [token[k] for k in token.keys() & _OPTIONS] if isinstance(token, dict) else ()
    if not isinstance(content, str) or not all(isinstance(option, bool) for option in options):
        raise _NoToken(key, token)
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise _NoToken(key, ascii(content))


def _content(token: str | Json) -> str:
    return token if isinstance(token, str) else token["content"]


def _added(token: str | Json) -> tokenizers.AddedToken:
    options = {} if isinstance(token, str) else {k: token[k] for k in token.keys() & _OPTIONS}
    return tokenizers.AddedToken(_content(token), **{"special": True, **options})


MAX_ID = (1 << 24) - 1  # of a token: the library fills lists up to the largest one
_OPTIONS = {"lstrip", "rstrip", "single_word", "normalized", "special"}


def _add_tokens(backend: tokenizers.Tokenizer, config: Json, named: Sequence[str | Json]) -> None:
    """Add the tokens that only the files beside `tokenizer.json` have: declared ones by id, then the named ones."""
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict):
        raise _NoToken("added_tokens_decoder", by_id)
    for number, entry in by_id.items():
        if not (number.isascii() and number.isdigit()):
            raise _NoToken(f"added_tokens_decoder: {number[:80]}", entry)
        _check_token(f"added_tokens_decoder: {number}", entry)
    # The order gives new tokens the ids that transformers gives them.
    declared = sorted(by_id.items(), key=lambda item: int(item[0]))
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    missing = [token for _, entry in declared if repr(token := _added(entry)) not in present]
    contents = {t.content for t in [*backend.get_added_tokens_decoder().values(), *missing]}
    for token in named:
        if _content(token) not in contents:
            contents.add(_content(token))
            missing.append(_added(token))
    if missing:
        backend.add_tokens(missing)


def _around(folder: str, backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer's post-processor adds before and after a text."""
    if not backend.num_special_tokens_to_add(is_pair=False):
        return (), ()
    with _faults_as_bad(folder):
        encoding = backend.encode("a", add_special_tokens=True)
    # "a" may be several tokens itself; what lies outside the ones that are not special was added.
    inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not inner:
        raise BadSample(
            f"{folder}/tokenizer.json has a post_processor that leaves no text between what it adds"
        )
    return tuple(encoding.ids[: inner[0]]), tuple(encoding.ids[inner[-1] + 1 :])


def _ends(folder: str, backend: tokenizers.Tokenizer, eos: str | Json | None) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of `generation_config.json`, else the tokenizer's own."""
    path = Path(folder) / "generation_config.json"
    value = read_json(path, {}).get("eos_token_id")
    if value is None and eos is not None:
        value = backend.token_to_id(_content(eos))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UserError(
            f"{path}: eos_token_id={str(value)[:80]} is neither a token's number nor a list of such"
        )
    return tuple(ids)
