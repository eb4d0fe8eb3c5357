from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from packed import (
    assert_trees_close,
    build,
    cut_tower,
    losses_of_logits,
    pack,
    random_sample,
    stage_outputs,
    tiny,
    token_losses,
)

from mmjax.models.model import Model, merge, module_of, partition
from mmjax.parallel.sharding import ShardingRules, activations_on, sharding

AXES = ("data", "fsdp", "expert", "tensor", "context")


def mesh_of(devices, data, fsdp, tensor=1):
    return Mesh(
        np.array(devices).reshape(data, fsdp, 1, tensor, 1), AXES, axis_types=(AxisType.Auto,) * 5
    )


def shardings(mesh, axes, shapes):
    return jax.tree.map(
        lambda axes, shape: sharding(mesh, ShardingRules(), shape.shape, axes),
        axes, shapes, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip


def test_every_parameter_names_what_its_dimensions_mean_and_every_matrix_is_two_dimensional():
    model = Model.build(tiny(tied=False), jnp.float32)
    leaves = jax.tree.leaves_with_path(model.abstract)
    axes = jax.tree.leaves(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    assert len(axes) == len(leaves)
    for (path, leaf), names in zip(leaves, axes, strict=True):
        stacked = any(getattr(key, "key", "") == "0:2" for key in path)
        assert len(leaf.shape) == len(names) + stacked
        assert len(names) <= 2


def test_init_gives_the_abstract_shapes_whatever_the_run_borders():
    model = Model.build(tiny(layers=3, tied=False), jnp.float32, {"llm": (1,), "vision": (1,)})
    assert jax.eval_shape(model.init, jax.random.key(0)) == model.abstract


def test_parameters_are_born_sharded_without_ever_being_whole_on_a_device():
    model = Model.build(tiny(layers=4, encoders=()), jnp.float32)
    where = shardings(mesh_of(jax.devices(), 1, 8), model.axes, model.abstract)
    compiled = jax.jit(model.init, out_shardings=where).lower(jax.random.key(0)).compile()
    total = sum(leaf.size * 4 for leaf in jax.tree.leaves(model.abstract))
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < total / 2
    assert "all-gather" not in compiled.as_text()


def test_modules_are_named_and_partitioned_by_what_is_frozen():
    model = Model.build(tiny(), jnp.float32)
    named = {
        module_of(tuple(k.key for k in path))
        for path, _ in jax.tree.leaves_with_path(model.abstract)
    }
    assert named == {"llm", "vision", "vision.connector", "audio", "audio.connector"}
    trainable, frozen = partition(model.abstract, {"llm", "vision", "audio.connector"})
    assert set(trainable) == {"encoders", "connectors"}
    assert set(trainable["encoders"]) == {"audio"}
    assert set(frozen["connectors"]) == {"audio"}
    assert merge(trainable, frozen) == model.abstract
    assert partition(model.abstract, set()) == (model.abstract, {})
    with pytest.raises(
        ValueError, match=r"cannot freeze 'visoin': the model has audio, audio\.connector, llm"
    ):
        partition(model.abstract, {"visoin"})


def test_impossible_models_are_refused():
    with pytest.raises(ValueError, match="no encoder may be called 'llm'"):
        Model.build(type(tiny())(tiny().llm, {"llm": tiny().encoders["vision"]}), jnp.float32)
    with pytest.raises(
        ValueError, match="cuts for 'sight', which is no tower; there are llm, vision, audio"
    ):
        Model.build(tiny(), jnp.float32, {"sight": (1,)})
    with pytest.raises(ValueError, match="llm cannot be cut before layer 1"):
        cut_tower(Model.build(tiny(), jnp.float32), "llm", (1,))


def stage_places():
    """The decoder's two stages on devices 0 and 1, the ViT's three on pairs of the other six."""
    devices = jax.devices()
    decoder = [mesh_of(devices[i : i + 1], 1, 1) for i in range(2)]
    return {"llm": decoder, "vision": [mesh_of(devices[i : i + 2], 1, 2) for i in (2, 4, 6)]}


def test_stages_chained_over_disjoint_meshes_give_the_loss_and_gradients_of_the_whole():
    cuts = {"llm": (1,), "vision": (1, 2)}
    model, params = build(tiny(layers=2, vision_layers=3, encoders=("vision",)), cuts)
    rng = np.random.default_rng(0)
    rows = [
        [random_sample(rng, [2, (3, 3), 4]), random_sample(rng, [1, (1, 5), (2, 2), 3])]
        for _ in range(2)
    ]
    batch = pack(rows, {"llm": 24, "vision": 32}, encoders=("vision",))
    whole = jax.jit(jax.value_and_grad(lambda p: token_losses(model, p, batch).sum()))(params)

    places, pulled = stage_places(), []
    x = {}
    for tower, own in (("vision", batch._replace(text=None)), ("llm", batch._replace(items={}))):
        for stage, mesh in zip(cut_tower(model, tower, cuts[tower]), places[tower], strict=True):
            there = NamedSharding(mesh, PartitionSpec())
            where = shardings(mesh, stage.select(model.axes), stage.select(model.abstract))
            mine = jax.device_put(stage.select(params), where)
            x, own = jax.device_put((x, own), there)

            def forward(p, x, own, stage=stage, mesh=mesh):
                with activations_on(mesh, ShardingRules()):
                    return jax.vjp(lambda p, x: stage_outputs(stage, p, x, own), p, x)

            x, back = jax.jit(forward)(mine, x, own)
            assert next(iter(x.values())).sharding.device_set == set(mesh.devices.flat)
            pulled.append((jax.jit(lambda back, d: back(d)), back, there))
    loss, last = jax.value_and_grad(lambda x: losses_of_logits(x["logits"], own.text).sum())(x)

    gradients = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    for pull, back, there in reversed(pulled):
        mine, last = pull(back, jax.device_put(last, there))
        zeros = jax.tree.map(np.zeros_like, gradients)
        gradients = jax.tree.map(lambda a, b: a + np.asarray(b), gradients, merge(zeros, mine))
    np.testing.assert_allclose(loss, whole[0], rtol=1e-5)
    assert_trees_close(gradients, whole[1])


def compile_warnings(capfd, function, *arguments):
    """What XLA says on stderr while it compiles."""
    capfd.readouterr()
    jax.jit(function).lower(*arguments).compile()
    return capfd.readouterr().err


def test_a_gradient_step_on_a_mesh_of_three_axes_never_replicates_involuntarily(capfd):
    mesh, rules = mesh_of(jax.devices(), 2, 2, 2), ShardingRules()
    model, _ = build(tiny(encoders=("vision",), vocab=24))
    rng = np.random.default_rng(0)
    rows = [[random_sample(rng, [2, (2, 3), 4])] for _ in range(4)]
    batch = pack(rows, {"llm": 16, "vision": 8}, encoders=("vision",))
    for_four_ranks = {"vision": jnp.zeros((4, 1, 0), jnp.int32)}
    batch = batch._replace(text=batch.text._replace(send=for_four_ranks))

    def on_mesh(shape, where):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    params = jax.tree.map(on_mesh, model.abstract, shardings(mesh, model.axes, model.abstract))
    axes = ("rows", "length", None)
    batch = jax.tree.map(
        lambda x: on_mesh(x, sharding(mesh, rules, x.shape, axes[: x.ndim])), batch
    )

    def loss(params, batch):
        with activations_on(mesh, rules):
            return token_losses(model, params, batch).sum()

    def careless(params, batch):
        x = params["llm"]["embed"]["weight"][batch.text.token]
        where = sharding(mesh, rules, x.shape, ("rows", "length", "width"))
        return jnp.sum(jax.lax.with_sharding_constraint(x, where) ** 2)

    warning = "Involuntary full rematerialization"
    assert warning in compile_warnings(capfd, jax.grad(careless), params, batch)
    assert warning not in compile_warnings(capfd, jax.grad(loss), params, batch)


def test_stages_of_a_deepstack_give_what_the_whole_model_gives():
    config = tiny(encoders=("vision",), vision_layers=4, layers=4)
    config = replace(
        config, encoders={"vision": replace(config.encoders["vision"], deepstack=(2, 3))}
    )
    cuts = {"llm": (1, 2, 3), "vision": (1, 2, 3)}
    model, params = build(config, cuts)
    sample = random_sample(np.random.default_rng(0), [2, (3, 4), 3])
    batch = pack([[sample]], {"llm": 16, "vision": 24}, encoders=("vision",))
    made = {}
    for tower in ("vision", "llm"):
        for stage in cut_tower(model, tower, cuts[tower]):
            made |= stage_outputs(
                stage, stage.select(params), {name: made.pop(name) for name in stage.inputs}, batch
            )
    assert set(made) == {"logits"}
    np.testing.assert_allclose(made["logits"], model.logits(params, batch), atol=1e-5)
