"""Preferences between two answers to a question about an image, learned by `tiny_vlm` from its first step on.

    python -m mmjax.train configs/tiny_dpo.py

Of every pair the chosen answer is right, and the rejected one has other digits. There is no
reference, as the first model knows nothing. After 600 steps it prefers the right answer in 93 % of
2,000 test pairs.
"""

from dataclasses import replace

import numpy as np

from mmjax.config import EmbeddedSource, FunctionSource, TrainingConfig
from mmjax.config.loading import sibling
from mmjax.config.losses import Dpo
from mmjax.data.sample import Sample, SampleLengths, Text
from mmjax.data.toy.dataset import END, EmbeddedDataset, encode_characters

tiny_vlm = sibling(__file__, "tiny_vlm")


class Pairs:
    """A right and a wrong answer to each image's first question, which stands before the answers' branches."""

    def __init__(self, images: EmbeddedDataset) -> None:
        self.images = images
        self.item = images.item

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        return f"pairs-{self.images.fingerprint()}"

    def facts(self, index: int) -> SampleLengths:
        recipe = self.images.recipe(index)
        (ask,) = recipe.asks
        text = sum(map(len, recipe.words)) + len(ask.text) - 1 + 2 * (len(ask.answer) + 2)
        return replace(self.images.facts(index), text_tokens=text)

    def sample(self, index: int) -> Sample:
        question = self.images.question(index)
        *context, asked = question.prompt.segments
        right = question.answer
        rng = np.random.default_rng((self.images.seed, index))
        wrong = "".join(
            str((int(c) + rng.integers(1, 10)) % 10) if c.isdigit() else c for c in right
        )
        prompt = Text(asked.tokens[:-1], asked.weights[:-1], start=asked.start)
        return Sample(
            (
                *context,
                prompt,
                *(_answer(n, asked, text) for n, text in enumerate((right, wrong), start=1)),
            )
        )


def _answer(branch: int, asked: Text, text: str) -> Text:
    """Build the branch of an answer, which begins with the question's last token; a pair's weights sum to 1."""
    tokens = np.concatenate([asked.tokens[-1:], encode_characters(text), [END]]).astype(np.int32)
    weights = np.full(len(tokens), 0.5 / (len(tokens) - 1), np.float32)
    weights[0] = 0
    return Text(tokens, weights, branch)


def pairs(split: str, samples: int = 8_000, seed: int = 0) -> Pairs:
    return Pairs(
        EmbeddedDataset(
            EmbeddedSource(modalities=("image",), samples=samples, questions=1), split, seed
        )
    )


def config():
    base = tiny_vlm.config()
    return replace(
        base,
        name="tiny_dpo",
        data=replace(base.data, sources={"pairs": FunctionSource("config:pairs")}),
        training=TrainingConfig(steps=600, evaluate_every=200),
        loss=Dpo(beta=0.5, reference="none"),
    )
