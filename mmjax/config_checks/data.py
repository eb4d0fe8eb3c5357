"""Validate the data of a config."""

from __future__ import annotations

from mmjax.config import AudioConfig, Config, DataConfig, EmbeddedSource, FileSource, ParquetSource, VisionConfig
from mmjax.config_checks.rules import at_least, at_most, check

EMBEDDED_RATE = 4000  # Hz, of the embedded dataset's clips
MAX_EMBEDDED = 10_000_000  # samples; each is generated once before training, to compute its length
EMBEDDED_NEEDS = {"image": ("vision",), "audio": ("audio",), "mixed": ("vision", "audio"), "text": ()}


def check_data(data: DataConfig) -> None:
    """Raises UserError for sources, weights or an alphabet that cannot work."""
    for name, source in data.sources.items():
        at_least(0, f"data.sources.{name}", source, ("weight",))
        if isinstance(source, FileSource):
            _check_files(f"data.sources.{name}", source)
    weights = {f"data.sources.{name}.weight": source.weight for name, source in data.sources.items()}
    check(
        not weights or sum(weights.values()) > 0,
        f"{', '.join(weights)} sum to zero: nothing could be drawn; give one a weight above 0",
    )
    repeated = ", ".join(sorted({repr(c) for c in data.alphabet if data.alphabet.count(c) > 1}))
    check(not repeated, f"data.alphabet holds {repeated} more than once; each character is one token")
    at_least(0, "data", data, ("workers",))
    at_least(1, "data", data, ("prefetch",))
    share = data.max_bad_share
    check(0 <= share <= 1, f"data.max_bad_share={share}: it is a part of the samples; choose 0 to 1")


def _check_files(where: str, source: FileSource) -> None:
    check(bool(source.path), f"{where}.path is empty; name a file, a folder or a URL")
    if isinstance(source, ParquetSource):
        paired = bool(source.question) and bool(source.answer)
        check(
            paired != bool(source.messages) and bool(source.question) == bool(source.answer),
            f"{where}: name the columns that hold the text, either {where}.messages=messages or both "
            f"{where}.question=question and {where}.answer=answer",
        )


def check_embedded(where: str, source: EmbeddedSource, config: Config) -> None:
    """Raises UserError where the model lacks an encoder for the embedded samples, or has one of another input."""
    at_least(1, where, source, ("samples", "questions"))
    at_most(MAX_EMBEDDED, where, source, ("samples",))
    check(bool(source.modalities), f"{where}.modalities is empty; name some of {', '.join(EMBEDDED_NEEDS)}")
    check(len(set(source.modalities)) == len(source.modalities), f"{where}.modalities names one twice; name each once")
    check(bool(config.data.alphabet), "data.alphabet is empty; set it to ALPHABET of mmjax.data.embedded")
    for modality in source.modalities:
        for encoder, cls in (("vision", VisionConfig), ("audio", AudioConfig)):
            if encoder in EMBEDDED_NEEDS[modality]:
                check(
                    isinstance(config.model.encoders.get(encoder), cls),
                    f"{where}.modalities has {modality!r}, which needs model.encoders.{encoder} of kind {encoder!r}; "
                    f"add it, or leave {modality!r} out",
                )
    for name, encoder in config.model.encoders.items():
        if isinstance(encoder, VisionConfig) and name == "vision":
            setting = f"model.encoders.vision.channels={encoder.channels}"
            check(encoder.channels == 1, f"{setting}: the images of {where} are grey; set it to 1")
        if isinstance(encoder, AudioConfig) and name == "audio":
            rate = encoder.sample_rate
            setting = f"model.encoders.audio.clips.sample_rate={rate}"
            check(rate == EMBEDDED_RATE, f"{setting}: the clips of {where} have {EMBEDDED_RATE} Hz; set that")
