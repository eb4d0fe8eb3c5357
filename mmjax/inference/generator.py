"""Answers to prompts, many at once: keys and values are kept, and every pass writes one more token of each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.data.plan.placement import Topology
from mmjax.data.sample import Source
from mmjax.errors import UserError
from mmjax.inference.prompt_rows import BatchLimits, PromptRows
from mmjax.inference.prompts import Selection
from mmjax.models.dropout import IMPL
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.models.multimodal import Cache
from mmjax.parallel.sharding import ShardingRules, activations_on, constrain, replicated, row_ranks
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.program_cache import CachedProgram


@dataclass(frozen=True)
class Sampling:
    """Choose tokens. First the `top_k` most likely are kept, then of these the fewest with `top_p` in all."""

    temperature: float = 0.0  # 0 = the most likely token
    top_k: int = 0  # 0 = all of them
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(
                f"temperature={self.temperature}: choose 0 (the most likely token) or more"
            )
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: choose 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: choose more than 0, and at most 1")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed}: choose 0 to {2**31 - 1}")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError(
                "top_k and top_p choose nothing at temperature 0; give a temperature as well"
            )


def choose(sampling: Sampling, logits: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
    """The next token int32 `[B]`, by logits float32 `[B, V]`. row: int32 `[B]`, the number of each row's prompt.

    place: int32 `[]`, the answer's tokens before this one.
    """
    if not sampling.temperature:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = keep(sampling, logits / sampling.temperature)
    seed = jax.random.key(sampling.seed, impl=IMPL)

    def noise(row: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(seed, row), place)
        return jax.random.gumbel(key, logits.shape[-1:], logits.dtype)

    # The largest of scores with Gumbel noise is a draw from their softmax.
    return jnp.argmax(scores + jax.vmap(noise)(row), axis=-1).astype(jnp.int32)


def keep(sampling: Sampling, scores: jax.Array) -> jax.Array:
    """Scores `[B, V]` with -inf for the tokens that are not drawn; equal ones stay together."""
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < threshold, -jnp.inf, scores)
    if sampling.top_p < 1:
        ordered = jnp.sort(scores, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        # Shares 0.5, 0.3, 0.2 with top_p = 0.6: those before each sum to 0, 0.5, 0.8, so the first
        # two stay.
        likelier = jnp.cumsum(share, axis=-1) - share
        threshold = jnp.min(
            jnp.where(likelier < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True
        )
        scores = jnp.where(scores < threshold, -jnp.inf, scores)
    return scores


NOTHING = -1  # where an answer has no token
DEFAULT_MAX_TOKENS = 256  # tokens of an answer, its end included


@dataclass(frozen=True)
class Answer:
    """Hold the text that was generated after a prompt."""

    text: str  # without its end
    tokens: tuple[int, ...]  # with the token that ended it
    ended: bool  # by such a token; else there was room for no more


class Writing(NamedTuple):
    """Answers of one batch on their way. `B` rows, room for `T` tokens each."""

    cache: Cache
    row: jax.Array  # int32 [B]: number of each row's prompt
    token: jax.Array  # int32 [B]: the last one, which the model has not seen yet
    written: jax.Array  # int32 [B, T]: NOTHING after an answer's end
    ended: jax.Array  # bool [B]: rows without a prompt too
    count: jax.Array  # int32 []: tokens that were written


class Generator:
    """Answers prompts with a model on a mesh. A few programs are compiled, for as many shapes as prompts have.

    ends: tokens that end an answer. decode: what tokens say, up to such a one. max_tokens: tokens
    of an answer. Several processes with one mesh over all their devices must ask the same, and each
    gets all the answers; with a mesh over its own devices alone (`jax.local_devices()`), a process
    asks what it likes.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rules: ShardingRules,
        ends: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        batch_limits: BatchLimits | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._rules = rules
        self._ends = tuple(ends)
        self._decode = decode
        self._max_tokens = max_tokens
        self._batch_limits = batch_limits
        self._sampling = sampling or Sampling()
        encoders_per_rank = row_ranks(mesh, rules.item_rows) // row_ranks(mesh, rules.rows)
        context = row_ranks(mesh, rules.length)
        self.topology = Topology(
            row_ranks(mesh, rules.rows), encoders_per_rank=encoders_per_rank, context=context
        )
        shown = (None, replicated(mesh))
        closed_over = (model.description, rules, self._ends, self._sampling, max_tokens)
        jit = partial(CachedProgram, None if model.description is None else repr(closed_over), mesh)
        self._begin = jit(self._on_mesh(self._begun), out_shardings=shown)
        self._go_on = jit(self._on_mesh(self._written), out_shardings=shown, donate_argnums=1)

    def answers(
        self, params: Params, prompts: Source, numbers: Sequence[int] | None = None
    ) -> list[Answer]:
        """The answers to these prompts of a source, or to all, in their order.

        `prompts` are samples whose text ends where the answer begins, as of `AskedPrompts`, or
        `Prompts(source)` of a source with questions. Raises UserError for one that cannot be used,
        naming it.
        """
        answers = dict(self.answered(params, prompts, numbers))
        return [answers[n] for n in range(len(answers))]

    def answered(
        self,
        params: Params,
        prompts: Source,
        numbers: Sequence[int] | None = None,
        every: int = 0,
        unreadable: dict[int, str] | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """The same as they come, a batch at a time: the place of each in `numbers`, and the answer.

        every: give answers that are not finished too, again and again after so many tokens.
        unreadable: gets the places of prompts that turn out unreadable, and why; without it they are
        errors. What is drawn at random depends on the seed and the prompt's number in its source,
        not on what else is asked.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        rows = self.rows(Selection([(prompts, n) for n in numbers]))
        yield from self.answer_rows(params, rows, seeds=numbers, every=every, unreadable=unreadable)

    def rows(self, prompts: Source, groups: Sequence[Sequence[int]] = ()) -> PromptRows:
        """Lay out prompts in rows for this generator; `groups` as in `PromptRows`."""
        return PromptRows(
            prompts,
            self._model.config,
            self.topology,
            max_answer=self._max_tokens,
            batch_limits=self._batch_limits,
            groups=groups,
        )

    def answer_rows(
        self,
        params: Params,
        rows: PromptRows,
        numbers: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        every: int = 0,
        unreadable: dict[int, str] | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the answers to prompts laid out by `rows`, or to these of them, with each prompt's number.

        seeds: by prompt, what distinguishes its random draws. every, unreadable: as in `answered`.
        """
        for prompt, batch in rows.batches(numbers, unreadable):
            seed = np.array(
                [seeds[n] if seeds is not None and n >= 0 else 0 for n in prompt], np.int32
            )
            for tokens, ended in self._tokens(params, batch, seed, every or self._max_tokens):
                for row in np.flatnonzero(prompt >= 0):
                    answer = tokens[row][tokens[row] != NOTHING].tolist()
                    yield (
                        int(prompt[row]),
                        Answer(self._decode(answer), tuple(answer), bool(ended[row])),
                    )

    def _tokens(
        self, params: Params, batch: Microbatch, row: np.ndarray, every: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`written` and `ended` of a batch, after every so many tokens and at the end."""
        put = jax.make_array_from_callback(row.shape, replicated(self._mesh), row.__getitem__)
        state, shown = self._begin.run(params, put_rows(batch, self._mesh, self._rules), put)
        for until in [*range(every, self._max_tokens, every), self._max_tokens]:
            state, shown = self._go_on.run(params, state, np.int32(until))
            tokens, ended = jax.device_get(shown)
            yield tokens, ended
            if ended.all():
                return

    def _on_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def on_mesh(*arguments: Any) -> Any:
            with activations_on(self._mesh, self._rules):
                return function(*arguments)

        return on_mesh

    def _begun(
        self, params: Params, batch: Microbatch, row: jax.Array
    ) -> tuple[Writing, tuple[jax.Array, jax.Array]]:
        """The prompts read and the first token of every answer chosen."""
        logits, cache = self._model.prefill(params, batch, self._max_tokens)
        nobody = jnp.logical_not(jnp.any(batch.text.sample >= 0, axis=1))
        tokens = jnp.full((len(row), self._max_tokens), NOTHING, jnp.int32)
        state = Writing(
            cache=cache,
            row=row,
            token=jnp.zeros_like(row),
            written=tokens,
            ended=nobody,
            count=jnp.int32(0),
        )
        return _shown(self._chosen(state, logits))

    def _written(
        self, params: Params, state: Writing, until: jax.Array
    ) -> tuple[Writing, tuple[jax.Array, jax.Array]]:
        """Answers of at most `until` tokens."""

        def more(state: Writing) -> jax.Array:
            return (state.count < until) & jnp.logical_not(jnp.all(state.ended))

        def one(state: Writing) -> Writing:
            logits, cache = self._model.step(params, constrain(state.token, "rows"), state.cache)
            return self._chosen(state._replace(cache=cache), logits)

        return _shown(jax.lax.while_loop(more, one, state))

    def _chosen(self, state: Writing, logits: jax.Array) -> Writing:
        """One more token of every answer that has not ended."""
        token = choose(self._sampling, constrain(logits, "rows", None), state.row, state.count)
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=state.count, axis=1)
        written = write(state.written, jnp.where(state.ended, NOTHING, token)[:, None])
        ended = state.ended | jnp.isin(token, jnp.array(self._ends, jnp.int32))
        return state._replace(token=token, written=written, ended=ended, count=state.count + 1)


def _shown(state: Writing) -> tuple[Writing, tuple[jax.Array, jax.Array]]:
    return state, (state.written, state.ended)
