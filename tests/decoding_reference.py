"""Greedy decoding without a cache: every token by a forward pass over the whole row, as a reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.data.plan.placement import Topology
from mmjax.data.sample import Sample, Text
from mmjax.inference.prompt_rows import PromptRows
from mmjax.inference.prompts import QuestionPrompts, Selection


class WithRoom(QuestionPrompts):
    """A source's questions, each followed by `room` empty tokens, whose loss weight marks what predicts the answer."""

    def __init__(self, source, room: int) -> None:
        super().__init__(source)
        object.__setattr__(self, "room", room)

    def sample(self, index: int) -> Sample:
        segments = self.source.question(index).prompt.segments
        empty = Text(
            np.zeros(self.room, np.int32), np.ones(self.room, np.float32), segments[-1].branch
        )
        return Sample((*segments, empty))


def greedy_tokens(model, params, source, numbers, room: int) -> dict[int, list[int]]:
    """The tokens of each question's answer, `room` of them, by question."""
    prompts = WithRoom(source, room)
    rows = PromptRows(Selection([(prompts, n) for n in numbers]), model.config, Topology(), 0)
    logits = jax.jit(model.logits)
    found = {}
    for lies, batch in rows.batches():
        tokens = np.array(batch.text.token)
        # the position that predicts the first token
        first = (np.array(batch.text.weight) > 0).argmax(1)
        filled = np.flatnonzero(lies >= 0)
        for k in range(room):
            text = batch.text._replace(token=tokens)
            best = np.argmax(
                logits(params, jax.tree.map(jnp.asarray, batch._replace(text=text))), -1
            )
            tokens[filled, first[filled] + 1 + k] = best[filled, first[filled] + k]
        for row in filled:
            found[numbers[lies[row]]] = tokens[row, first[row] + 1 : first[row] + 1 + room].tolist()
    return found
