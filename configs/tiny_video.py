"""Videos of handwritten digits that move: which one, and where to? A Qwen2.5-VL of two layers beside an encoder of two.

    python -m mmjax.train configs/tiny_video.py
    python -m mmjax.evaluate runs/tiny_video
    python -m mmjax.evaluate runs/tiny_video data.sources.clips.arguments.shuffled=true   # can only guess the direction

Clips are made from a seed: eight frames in which one digit moves left, right, up or down over noise. Their frames in
random order still show the digit and its path, so that the direction is one of two.
"""

import hashlib

import numpy as np

from mmjax.config import (
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    ModelConfig,
    Muon,
    Samples,
    TrainingConfig,
    UniformVideo,
    VisionConfig,
)
from mmjax.data.sample import Item, Question, Sample, SampleLengths, Text
from mmjax.data.toy.dataset import ALPHABET, END, encode_characters
from mmjax.data.toy.digits import digit_table, digits_by_label

SIDE = 24  # pixels of a frame
FRAMES = 8
PATCH_FRAMES = 2  # frames of a temporal patch: an item of the encoder
PATCHES = FRAMES // PATCH_FRAMES
MOVES = {"left": (0, -2), "right": (0, 2), "up": (-2, 0), "down": (2, 0)}  # pixels per frame
SPLITS = ("train", "validation", "test")
QUESTION = "where?"


class Clips:
    """A `Source` of one split's clips. Splits share no digit image. shuffled: the frames of a clip in random order."""

    def __init__(self, split: str, samples: int, shuffled: bool) -> None:
        self.split = split
        self.samples = samples if split == "train" else samples // 10
        self.shuffled = shuffled
        self.images = digit_table()[0]
        self.by_label = digits_by_label(split)

    def __len__(self) -> int:
        return self.samples

    def fingerprint(self) -> str:
        return hashlib.sha256(f"clips-1 {self.split} {self.samples} {self.shuffled}".encode()).hexdigest()

    def facts(self, index: int) -> SampleLengths:
        answer = self.question(index).answer
        size = (PATCH_FRAMES, SIDE, SIDE)
        return SampleLengths(len(QUESTION) + len(answer) + 1, (("vision", size),) * PATCHES)

    def sample(self, index: int) -> Sample:
        """Return a clip with its question and answer."""
        answer = self.question(index).answer
        tokens = np.append(encode_characters(QUESTION + answer), np.int32(END))
        weights = np.zeros(len(tokens), np.float32)
        weights[len(QUESTION) :] = 1
        return Sample((*self._clip(), Text(tokens, weights)))

    def question(self, index: int) -> Question:
        """Return a clip with its question."""
        digit, move = self._draw(index)[:2]
        text = Text(encode_characters(QUESTION), np.zeros(len(QUESTION), np.float32))
        return Question("video", "video.move", Sample((*self._clip(), text)), f"{digit} {move}", ("vision",))

    def item(self, index: int, number: int) -> np.ndarray:
        """Draw a temporal patch of a clip, uint8 `[PATCH_FRAMES, SIDE, SIDE, 1]`."""
        _, move, image, rng = self._draw(index)
        height, width = image.shape
        dy, dx = MOVES[move]
        # Starts where the whole path is inside: after 7 steps of 2 pixels it has gone 14.
        y = rng.integers(max(0, -7 * dy), SIDE - height - max(0, 7 * dy) + 1)
        x = rng.integers(max(0, -7 * dx), SIDE - width - max(0, 7 * dx) + 1)
        frames = rng.integers(0, 40, (FRAMES, SIDE, SIDE, 1), dtype=np.uint8)
        for k, frame in enumerate(frames):
            shown = frame[y + dy * k : y + dy * k + height, x + dx * k : x + dx * k + width, 0]
            np.maximum(shown, image, out=shown)
        if self.shuffled:
            frames = frames[rng.permutation(FRAMES)]
        return frames[number * PATCH_FRAMES : (number + 1) * PATCH_FRAMES]

    def _clip(self) -> list[Item]:
        return [Item("vision", k, patch=k, time=k) for k in range(PATCHES)]

    def _draw(self, index: int) -> tuple[int, str, np.ndarray, np.random.Generator]:
        """Draw a digit, where it moves, and its image; and return the generator for the rest."""
        rng = np.random.default_rng([SPLITS.index(self.split), index])
        digit = int(rng.integers(10))
        images = self.by_label[digit]
        move = list(MOVES)[rng.integers(len(MOVES))]
        return digit, move, self.images[images[rng.integers(len(images))]], rng


def clips(split: str, samples: int, shuffled: bool) -> Clips:
    return Clips(split, samples, shuffled)


def config() -> Config:
    source = FunctionSource("config:clips", {"samples": 20_000, "shuffled": False})
    return Config(
        name="tiny_video",
        data=DataConfig(sources={"clips": source}, alphabet=ALPHABET),
        batch=BatchConfig(size=Samples(32), rows={"llm": 4, "vision": 4}),
        model=ModelConfig(
            llm=DecoderConfig(
                layers=2,
                width=96,
                heads=4,
                kv_heads=2,
                head_width=24,
                mlp_width=256,
                vocab=len(ALPHABET) + 2,
                rope_theta=1e3,
                rope_sections=(4, 4, 4),
            ),
            encoders={
                "vision": VisionConfig(
                    layers=2,
                    width=96,
                    heads=4,
                    mlp_width=256,
                    patch=4,
                    channels=1,
                    frames=PATCH_FRAMES,
                    videos=UniformVideo(frames=FRAMES, size=(SIDE, SIDE)),
                    connector=ConnectorConfig(merge=2),
                )
            },
        ),
        training=TrainingConfig(steps=1200, evaluate_every=400, checkpoint_every=400),
        optimizer=Muon(),
    )
