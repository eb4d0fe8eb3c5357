"""Small whole things to spoil: media files of every format, records of every format, a config; and how they are."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import soundfile
from commands import TINY_MEDIA
from mutations import BYTES, Random
from PIL import Image
from started import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmjax.config import (
    ArrayRecordSource,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    FileSource,
    LlavaSource,
    ManifestSource,
    MessagesSource,
    PackGrouping,
    ParquetSource,
    Placeholder,
    QuestionsSource,
    Samples,
    ShareGptSource,
)
from mmjax.config.loading import load
from mmjax.data.sources.array_record_writing import write_array_records
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<' + p['type'] + '>' }}{% endfor %}"
    "{% endif %}{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
IMAGES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff"}
CLIPS = {"WAV": "PCM_16", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}
CONFIG_TEXT = (
    (ROOT / "configs" / "tiny_omni.py")
    .read_text()
    .replace("EmbeddedSource()", "EmbeddedSource(samples=64, questions=2)")
)


def save_chat(folder: Path) -> ChatFormat:
    """A tokenizer of bytes and a template, as a Hugging Face folder has them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["user: What is it? assistant: A cat."] * 4,
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet),
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("</s>", "<image>", "<audio>")]
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    told = {"eos_token": "</s>", "pad_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return ChatFormat(
        str(folder), placeholders={kind: Placeholder(f"<{kind}>") for kind in ("image", "audio")}
    )


def picture(kind: str, number: int, **how: Any) -> bytes:
    """An encoded image of smooth noise."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (32 + 4 * number, 24), Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    coarse.save(file, kind, **how)
    return file.getvalue()


def clip(kind: str, number: int, subtype: str = "", channels: int = 1) -> bytes:
    """An encoded clip of noise."""
    wave = 0.3 * np.random.default_rng(number).standard_normal(
        (1600 + 160 * number, channels)
    ).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, wave.clip(-1, 1), 16_000, subtype or CLIPS[kind], format=kind)
    return file.getvalue()


def media() -> dict[str, bytes]:
    """Files by name."""
    images = {f"{k}.{suffix}": picture(kind, k) for k, (kind, suffix) in enumerate(IMAGES.items())}
    exif = Image.Exif()
    exif[0x0112] = 6
    images |= {
        "turned.jpg": picture("JPEG", 6, exif=exif, progressive=True),
        "exif.webp": picture("WEBP", 7, exif=exif, lossless=True),
        "packed.tiff": picture("TIFF", 8, compression="tiff_lzw"),
        "late.png": picture("PNG", 9, exif=exif),
    }
    clips = {f"{k}.{kind.lower()}": clip(kind, k) for k, kind in enumerate(CLIPS)}
    clips |= {
        "float.wav": clip("WAV", 5, "FLOAT", 2),
        "opus.ogg": clip("OGG", 6, "OPUS"),
        "wide.flac": clip("FLAC", 7, "PCM_24", 2),
    }
    return images | clips


def is_image(name: str) -> bool:
    """Whether a file of `media` is one."""
    return name.rpartition(".")[2] in IMAGES.values()


def save_media(folder: Path) -> dict[str, bytes]:
    """`media` as files."""
    folder.mkdir()
    for name, content in (found := media()).items():
        (folder / name).write_bytes(content)
    return found


def chat_of(name: str, turns: str = "conversations") -> dict[str, Any]:
    """A record about one file, or about none."""
    place = "" if not name else "<image>" if is_image(name) else "<audio>"
    keys = (
        ("from", "value", "human", "gpt")
        if turns == "conversations"
        else ("role", "content", "user", "assistant")
    )
    who, what, human, machine = keys
    said = [
        {who: human, what: f"{place}What is it?"},
        {who: machine, what: f"It is {name or 'nothing'}."},
    ]
    beside = {} if not name else {"images" if is_image(name) else "audios": [name]}
    return {"id": name, turns: said, **beside}


def parts_of(name: str) -> dict[str, Any]:
    """The same with typed parts."""
    kind = "image" if is_image(name) else "audio"
    parts = [{"type": kind, "path": name}, {"type": "text", "text": "What is it?"}]
    return {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "A thing."},
        ]
    }


NAMES = ("1.png", "0.jpg", "0.wav", "", "2.webp", "1.flac")
PICTURES, CLIPPED = (
    ("1.png", "0.jpg", "2.webp", "turned.jpg"),
    ("0.wav", "1.flac", "2.ogg", "float.wav"),
)
RECORDS: Mapping[str, Sequence[dict[str, Any]]] = {  # by format
    "llava": [{"id": 1, **chat_of(name)} | {"image": name} for name in PICTURES],
    "sharegpt": [{**chat_of(name), "system": "Be brief."} for name in NAMES],
    "messages": [*(parts_of(name) for name in NAMES if name), chat_of("", "messages")],
    "questions": [{"image": name, "question": "What?", "answers": ["a cat", "cat"]} for name in PICTURES],
    "manifest": [{"audio_filepath": n, "text": "a", "offset": 0.01, "duration": 0.1, "prompt": "X"} for n in CLIPPED],
}  # fmt: skip
for record in RECORDS["llava"]:
    record.pop("images")


def lines(records: Sequence[Any]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def rows() -> dict[str, list[Any]]:
    """The columns of a Parquet file."""
    found = media()
    return {
        "question": ["What?"] * 4,
        "answer": [["a cat"], ["b", "c"], ["d"], ["e"]],
        "image": [{"bytes": found[name], "path": name} for name in PICTURES],
    }


def save_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    """Two row groups."""
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path, row_group_size=2)


def save_formats(folder: Path, files: Path, cache: Path) -> dict[str, FileSource]:
    """Every format of docs/data.md as files, and the sources that read them."""
    kinds = {
        "llava": LlavaSource, "sharegpt": ShareGptSource, "messages": MessagesSource, "questions": QuestionsSource,
        "manifest": ManifestSource,
    }  # fmt: skip
    found: dict[str, FileSource] = {}
    folder.mkdir()
    for name, kind in kinds.items():
        (folder / f"{name}.jsonl").write_bytes(lines(RECORDS[name]))
        beside = {"audio": str(files)} | ({} if name == "manifest" else {"images": str(files)})
        found[name] = kind(str(folder / f"{name}.jsonl"), **beside)
    (folder / "array.json").write_text(json.dumps(RECORDS["llava"], indent=1))
    found["array"] = replace(found["llava"], path=str(folder / "array.json"))
    save_parquet(folder / "rows.parquet", rows())
    found["parquet"] = ParquetSource(
        str(folder / "rows.parquet"), question="question", answer="answer", images="image"
    )
    read = open_conversations(found["sharegpt"], "train", cache, "data.sources.mine")
    write_array_records(read, read_facts(read, PROBES, cache), folder / "arrays", lambda done: None)
    found["arrayrecord"] = ArrayRecordSource(str(folder / "arrays"))
    return found


def zipped(folder: Path, path: Path) -> Path:
    """A folder's files in a .zip, some of them deflated."""
    with zipfile.ZipFile(path, "w") as archive:
        for k, file in enumerate(sorted(folder.iterdir())):
            archive.write(file, file.name, zipfile.ZIP_DEFLATED if k % 2 else zipfile.ZIP_STORED)
    return path


def config_of(source: FileSource, chat: ChatFormat, cache: Path, samples: int) -> Config:
    """A run on one source of files, all of whose samples are in each step."""
    base = load(TINY_MEDIA)
    llm, seeing = (
        replace(base.model.llm, vocab=300),
        replace(base.model.encoders["vision"], channels=3),
    )
    hearing = base.model.encoders["audio"]
    return replace(
        base,
        data=DataConfig({"mine": source}, str(cache), chat=chat, workers=0, max_bad_share=1.0),
        batch=BatchConfig(
            Samples(samples),
            {"llm": 1, "vision": 1, "audio": 1},
            grouping=PackGrouping(chunk_steps=1),
            shapes=1,
        ),
        model=replace(base.model, llm=llm, encoders={"vision": seeing, "audio": hearing}),
    )


# --------------------------------------------------------------------------------------------------
# spoiling


class Fault(AssertionError):
    """mmjax did what it must not."""


def one_file(folder: Path, rng: Random) -> Path:
    """A file somewhere in a folder. They are told by their size: some have names of chance."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "lock"]
    files.sort(
        key=lambda path: (
            str(path.parent.relative_to(folder)).count("/"),
            path.suffix,
            path.stat().st_size,
        )
    )
    return files[int(rng.random() * len(files))]


def spoil_file(path: Path, rng: Random) -> str:
    """Spoil one file of a folder where it lies; the way."""
    way = str(rng.choice([*BYTES, "missing", "folder"]))
    if way in BYTES:
        path.write_bytes(BYTES[way](path.read_bytes(), rng))
    else:
        path.unlink()
        if way == "folder":
            path.mkdir()
    return f"{way} {path.name}"


@contextlib.contextmanager
def put_back(path: Path) -> Iterator[None]:
    """Whatever happens to a file or folder, it is as before afterwards, to its times of change."""
    aside = path.with_name(f"{path.name}.aside")
    copy: Callable[..., Any] = shutil.copytree if path.is_dir() else shutil.copy2
    path.rename(aside)  # the copy is spoiled: what is memory-mapped stays as it is
    copy(aside, path)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        aside.rename(path)
