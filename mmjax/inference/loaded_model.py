"""A checkpoint loaded on its devices, which answers one question after the other with programs compiled once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import jax

from mmjax.config import Config, MeshConfig
from mmjax.config.decoder import head_counts
from mmjax.config.model import stacked_towers
from mmjax.config.validation import check_layout
from mmjax.data.plan.placement import Topology
from mmjax.data.sample import BadSample, Source
from mmjax.errors import UserError
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.generator import DEFAULT_MAX_TOKENS, Answer, Generator, Sampling
from mmjax.inference.prompt_rows import PromptRows
from mmjax.inference.prompts import UserPrompt, UserPromptSource
from mmjax.parallel.sharding import ShardingRules, make_mesh, mesh_sizes
from mmjax.runtime.devices import choose_devices, enable_compilation_cache


def user_prompts(served: CheckpointModel, prompt: UserPrompt) -> UserPromptSource:
    """Return a user's prompt as a source of one sample."""
    config = served.config
    return UserPromptSource(
        [prompt],
        served.prompt_format,
        config.model.encoders,
        served.functions(),
        config.data.limits,
    )


def answer_room(
    served: CheckpointModel, prompts: Source, max_tokens: int = DEFAULT_MAX_TOKENS
) -> int:
    """Compute how many tokens the answer may have: `max_tokens`, or as many as fit behind the prompt.

    Raises UserError for none, or for a prompt that cannot be used.
    """
    try:
        prompts.facts(0)
    except BadSample as bad:
        raise UserError(f"the question cannot be asked: {bad}") from None
    tokens = PromptRows(prompts, served.config.model, Topology(), 0).longest
    positions = served.positions()
    if positions is not None and tokens >= positions:
        raise UserError(
            f"the question takes {tokens} tokens, images and clips included; the model has {positions} positions "
            "(max_position_embeddings), and an answer needs some; ask for less"
        )
    return max_tokens if positions is None else min(max_tokens, positions - tokens)


class LoadedModel:
    """A run's or a checkpoint's model with its weights on a mesh of the devices that its config names."""

    def __init__(self, served: CheckpointModel) -> None:
        self.served = served
        self._format = served.prompt_format
        mesh_config, devices = choose_mesh(served.config)
        self.mesh = make_mesh(mesh_config, devices)
        self.rules = ShardingRules.of(mesh_config)
        enable_compilation_cache(served.programs())
        self.model, self.params = served.load(self.mesh, self.rules)
        self._generator = lru_cache(maxsize=4)(self._make_generator)

    def answers(
        self,
        prompts: Source,
        sampling: Sampling | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        every: int = 0,
    ) -> Iterator[Answer]:
        """Yield the answer to the only prompt of a source; unfinished too, after every so many tokens.

        max_tokens: of the answer, at most.
        """
        generator = self._generator(sampling, max_tokens)
        return (answer for _, answer in generator.answered(self.params, prompts, every=every))

    def _make_generator(self, sampling: Sampling | None, max_tokens: int) -> Generator:
        decode: Callable[[Sequence[int]], str] = self._format.decode_answer
        ends = self._format.ends
        return Generator(
            self.model,
            self.mesh,
            self.rules,
            ends,
            decode,
            sampling=sampling,
            max_tokens=max_tokens,
        )


def choose_mesh(config: Config) -> tuple[MeshConfig, list[jax.Device]]:
    """Choose the config's mesh, or else tensor parallelism over as many devices as divide every head count."""
    devices = choose_devices(config.device)
    if config.mesh != MeshConfig():
        check_layout(
            "mesh", replace(config.mesh, **mesh_sizes(config.mesh, len(devices))), config.model
        )
        return config.mesh, devices
    # One question is one row, so more devices than share its layers would have nothing to do.
    towers = stacked_towers(config.model).values()
    counts = [count for tower in towers for count in head_counts(tower)]
    tensor = math.gcd(len(devices), *counts)
    return MeshConfig(data=1, tensor=tensor), devices[:tensor]
