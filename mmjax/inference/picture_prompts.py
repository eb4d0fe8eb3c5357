"""Prompts for images: sources whose samples hold places of images to be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mmjax.config import Generator, MediaLimits, ModelConfig
from mmjax.data.media.patches import latent_grid
from mmjax.data.sample import PICTURE, Conversation, Item, MediaPlace, Message, Sample, Text
from mmjax.data.sources.processors import Functions, MediaSizes
from mmjax.data.text.chat import Chat
from mmjax.data.text.chat_template import ASSISTANT
from mmjax.errors import BadMedia, UserError
from mmjax.inference.prompts import PromptFormat, UserPrompt, UserPromptSource


class UserPictureSource(UserPromptSource):
    """Prompts of users that a generator answers with one image each, of a size in pixels, as a `Source`."""

    def __init__(
        self,
        prompts: Sequence[UserPrompt],
        chat: PromptFormat,
        model: ModelConfig,
        size: tuple[int, int],
        functions: Functions | None = None,
        limits: MediaLimits = MediaLimits(),
    ) -> None:
        super().__init__(prompts, chat, model.item_modules, functions, limits)
        self._generator = next(iter(model.generators))
        self._size = size

    def sample(self, index: int) -> Sample:
        conversation = self._prompts[index].conversation
        if isinstance(self._chat, Chat):
            # As in training, where the assistant answers with an image, up to that image.
            answered = Conversation(
                (*conversation.messages, Message(ASSISTANT, (MediaPlace("image"),)))
            )
            segments = self._media.place(index, partial(self._chat.sample, answered)).segments
            end = next(
                k
                for k, s in enumerate(segments)
                if isinstance(s, Item) and s.encoder == self._generator
            )
            return Sample(segments[: end + 1])
        prompt = self._media.place(index, partial(self._chat.prompt, conversation))
        # An image to be made stands in branch 0, which sees no other branch.
        segments = tuple(
            replace(s, branch=0) if isinstance(s, Text) else s for s in prompt.segments
        )
        items = sum(isinstance(s, Item) for s in segments)
        return Sample((*segments, Item(self._generator, items)))

    def _sizes(self, index: int) -> MediaSizes:
        return [*super()._sizes(index), (PICTURE, self._size)]


def picture_size(model: ModelConfig, size: str) -> tuple[int, int]:
    """Parse a size `HEIGHTxWIDTH` in pixels; empty: the only one that the model's generator makes.

    Raises UserError where there is no generator, where it makes several sizes, or not this one.
    """
    generator: Generator | None = next(iter(model.generators.values()), None)
    if generator is None:
        raise UserError(
            "--out: this model makes no images (it has no model.generators); leave it out for an answer"
        )
    sides = (
        tuple(int(side) for side in size.split("x") if side.isdecimal())
        if size
        else _only_size(generator)
    )
    if len(sides) != 2 or not all(sides):
        remedy = "give one as HEIGHTxWIDTH, in pixels"
        raise UserError(
            f"--size {size}: {remedy}"
            if size
            else f"--size: the generator makes several sizes; {remedy}"
        )
    try:
        latent_grid(generator, sides)
    except BadMedia as bad:
        raise UserError(f"--size {size}: {bad}") from None
    return sides[0], sides[1]


def _only_size(generator: Generator) -> tuple[int, ...]:
    if generator.is_stack:
        return generator.images.picture_size
    return tuple(side * generator.latents.factor for side in generator.image_size)
