import jax
import numpy as np
from packed import build, pack, random_sample, tiny, token_losses


def text_batch(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return pack([[random_sample(rng, [n]) for n in lengths]], {"llm": 16}, encoders=())


def test_a_token_sees_what_came_before_and_nothing_after():
    model, params = build(tiny(encoders=()))
    batch = text_batch(12)
    token = batch.text.token
    changed = batch._replace(
        text=batch.text._replace(token=token.at[0, 6].set((token[0, 6] + 1) % 23))
    )
    run = jax.jit(model.logits)
    a, b = np.asarray(run(params, batch))[0], np.asarray(run(params, changed))[0]
    np.testing.assert_array_equal(a[:6], b[:6])
    assert (np.abs(a[6:12] - b[6:12]).max(-1) > 1e-4).all()


def test_tied_and_untied_share_everything_but_the_output_table():
    tied, tied_params = build(tiny(layers=1, encoders=()))
    untied, params = build(tiny(layers=1, encoders=(), tied=False))
    assert "table" not in tied_params["llm"]["head"]
    assert params["llm"]["head"]["table"]["weight"].shape == params["llm"]["embed"]["weight"].shape
    same = {
        **tied_params["llm"],
        "head": {**tied_params["llm"]["head"], "table": tied_params["llm"]["embed"]},
    }
    batch = text_batch(5, 9)
    run = lambda model: jax.jit(jax.value_and_grad(lambda p: token_losses(model, p, batch).sum()))  # noqa: E731
    loss, gradients = run(tied)(tied_params)
    untied_loss, apart = run(untied)({"llm": same})
    np.testing.assert_allclose(untied_loss, loss, rtol=1e-6)
    both = apart["llm"]["embed"]["weight"] + apart["llm"]["head"]["table"]["weight"]
    np.testing.assert_allclose(gradients["llm"]["embed"]["weight"], both, atol=1e-4)
