from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from commands import TINY_MEDIA

from mmjax.config_files import keep, load
from mmjax.data.prompts import PromptLoader, read_answers
from mmjax.models.model import Model
from mmjax.training.decoding import greedy
from mmjax.training.evaluation import question_sources


def token_by_token(logits, params, batch):
    """The plain loop: every answer's next token is written only once the one before it stands."""
    tokens = np.array(batch.text.token)
    writes = np.array(batch.text.weight) > 0
    begins = writes & ~np.pad(writes, ((0, 0), (1, 0)))[:, :-1]
    ahead = begins
    while ahead.any():
        best = np.argmax(logits(params, batch._replace(text=batch.text._replace(token=tokens))), -1)
        for row, column in np.argwhere(ahead):
            tokens[row, column + 1] = best[row, column]
        ahead = np.pad(ahead, ((0, 0), (1, 0)))[:, :-1] & writes
    return tokens


def test_decoding_in_parallel_passes_equals_decoding_token_by_token(tmp_path: Path):
    config = load(TINY_MEDIA)
    keep(TINY_MEDIA, tmp_path)
    sources = question_sources(config, ("test",), tmp_path)
    model = Model.build(config.model, jnp.float32)
    decode, logits = jax.jit(partial(greedy, model)), jax.jit(model.logits)
    said = set()
    for seed in range(3):
        # Large enough that an answer's tokens differ and depend on those before them.
        rng = np.random.default_rng(seed)
        params = jax.tree.map(lambda x, r=rng: r.normal(0, 0.5, x.shape).astype(np.float32), model.abstract)
        for lies, batch in PromptLoader(sources, config).batches("test/few", range(12)):
            decoded = np.asarray(decode(params, batch))
            assert (decoded == token_by_token(logits, params, batch)).all()
            said |= set(read_answers(decoded, batch, lies, sources["test/few"]).values())
    assert len(said) > 12
