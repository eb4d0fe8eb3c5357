"""What generators learn is the same however their images are packed and wherever they are made."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from drawing import PICTURE, drawing_config
from tiny_run import (
    MESHES,
    gradients,
    load_steps,
    make_executor,
    one_shape,
    scattered,
    state_with,
    worst_leaf,
)

from mmjax.batch import PADDING
from mmjax.config import LoraConfig, NoBalance, PostBalance
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.models.layer_stacks import key_names
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.runtime.executor import State

APART = PostBalance(locality="off")  # every phase by itself, so that nearly all conditions travel


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The first step's microbatches for these ranks."""

    @cache
    def load(topology: Topology, balance: PostBalance | NoBalance = APART):
        config = one_shape(drawing_config())
        config = replace(config, batch=replace(config.batch, balance=balance))
        return load_steps(config, tmp_path_factory.mktemp("index"), 1, topology)[0]

    return load


@pytest.fixture(scope="module")
def parameters():
    return scattered(make_executor(drawing_config(), MESHES["one device"]))


@pytest.fixture(scope="module")
def one_device(loaded, parameters):
    executor = make_executor(drawing_config(), MESHES["one device"])
    return gradients(executor, state_with(executor, parameters), loaded(ONE_RANK))


def assert_same(found, wanted) -> None:
    np.testing.assert_allclose(found.losses.loss, wanted.losses.loss, rtol=1e-5)
    np.testing.assert_allclose(
        found.losses.images["picture"], wanted.losses.images["picture"], rtol=1e-5
    )
    assert worst_leaf(found.gradients, wanted.gradients) < (1e-5, "")


ACROSS = {
    "data=8": Topology(8, 8, 8),
    "fsdp=4 x tensor=2": Topology(4, 4, 4),
    "data=2 x fsdp=2 x tensor=2, encoders=data": Topology(4, 2, 4, encoders_per_rank=2),
    "context=4": Topology(1, encoders_per_rank=4, context=4),
    "data=2 x context=2 x tensor=2": Topology(2, 2, 2, encoders_per_rank=2, context=2),
    "fsdp=2 x context=2 x tensor=2, encoders=data": Topology(
        2, 2, 2, encoders_per_rank=4, context=2
    ),
}


@pytest.mark.default_cases("data=2 x fsdp=2 x tensor=2, encoders=data")
@pytest.mark.parametrize("mesh", ACROSS)
def test_losses_and_every_gradient_are_those_of_one_device(mesh, loaded, parameters, one_device):
    executor = make_executor(drawing_config(), MESHES[mesh])
    batches = loaded(ACROSS[mesh])
    travels = any((b.text.send["picture"] >= 0).any() for b in batches)
    assert travels == (ACROSS[mesh].ranks > 1)
    assert_same(gradients(executor, state_with(executor, parameters), batches), one_device)


@pytest.mark.exhaustive
def test_adapters_of_a_generator_have_the_gradients_of_one_device_and_its_weights_none(loaded):
    config = drawing_config()
    config = replace(
        config, model=replace(config.model, lora={"drawing": LoraConfig(("picture.*",), 4)})
    )
    mesh = "data=2 x fsdp=2 x tensor=2, encoders=data"
    found = []
    for name, topology in ((mesh, ACROSS[mesh]), ("one device", ONE_RANK)):
        executor = make_executor(config, MESHES[name])
        trainable = jax.device_put(scattered(executor), executor.states[0].shardings.trainable)
        (state,) = executor.init(jax.random.key(0)).stages
        state = State((state._replace(trainable=trainable),))
        found.append(gradients(executor, state, loaded(topology)))
    assert_same(*found)
    paths = [
        key_names(path) for path, _ in jax.tree.leaves_with_path(found[0].gradients["generators"])
    ]
    # a and b of both attentions' four matrices and the MLP's two, over both layers
    assert len(paths) == 2 * 10
    assert all("lora" in path for path in paths)


def test_a_condition_is_the_text_before_an_image_as_far_as_its_sample_goes_and_its_queries(loaded):
    tokens, lacking = PICTURE.condition_tokens, 0
    for batch in loaded(ONE_RANK):
        text, items = batch.text, batch.items["picture"]
        place = np.arange(1.0, text.token.size + 1).reshape(*text.token.shape, 1)
        condition = np.asarray(
            dispatch(place, text.send["picture"], text.condition["picture"], None)
        )[..., 0]
        sample = np.append(text.sample.reshape(-1), PADDING)
        for row, number in zip(*np.nonzero(np.diff(items.item, prepend=PADDING) > 0), strict=True):
            image = items.item[row, number]
            came = condition[row, image * tokens : (image + 1) * tokens].astype(int) - 1
            queries = came[PICTURE.text_tokens :]
            assert text.slots["picture"].reshape(-1)[queries].tolist() == list(
                range(PICTURE.queries)
            )
            whole = queries[0] + np.arange(-PICTURE.text_tokens, PICTURE.queries)
            inside = sample[whole] == sample[queries[0]]
            assert came.tolist() == np.where(inside, whole, -1).tolist()
            lacking += (~inside).sum()
    assert lacking > 0  # a prompt that is shorter


@pytest.mark.exhaustive
def test_balancing_changes_where_images_are_made_and_nothing_else(loaded, parameters, one_device):
    executor = make_executor(drawing_config(), MESHES["data=8"])
    batches = loaded(Topology(8, 8, 8), NoBalance())
    assert_same(gradients(executor, state_with(executor, parameters), batches), one_device)


def test_a_step_without_images_to_make_trains_the_rest_and_gives_generators_no_gradient(
    loaded, parameters
):
    executor = make_executor(drawing_config(), MESHES["one device"])
    batches = loaded(ONE_RANK)
    empty = []
    for batch in batches:
        items = batch.items["picture"]
        items = items._replace(item=np.full_like(items.item, PADDING))
        empty.append(batch._replace(items=batch.items | {"picture": items}))
    sums = gradients(executor, state_with(executor, parameters), empty)
    generator = (sums.gradients["generators"], sums.gradients["connectors"]["picture"])
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(generator)) == 0
    assert sums.losses.images["picture"].tolist() == [0, 0]
    assert np.isfinite(sums.losses.loss).all()
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(sums.gradients["llm"])) > 0
