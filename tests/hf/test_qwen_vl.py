"""Qwen2-VL to Qwen3.5 compute what transformers computes of packed images and text, and learn the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import loaded, random_model
from parity_samples import check_samples, check_ten_steps
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.config import MeshConfig, SmartResize
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

IMAGE, VIDEO = 90, 91  # tokens
TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VISION2 = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "window_size": 24,  # 3 x 3 merged patches
    "fullatt_block_indexes": [1, 3],
}
VISION3 = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2, 3],
}
SECTIONS2, SECTIONS3 = [2, 2, 2], [4, 2, 2]
GRIDS = [(7, 4), (1, 1), (3, 8), (2, 3), (5, 5)]  # of merged patches


def qwen2_5(text=None, vision=None, rope=ROPE, sections=SECTIONS2, **own):
    rope = rope | ({"mrope_section": sections} if sections else {})
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope} | (text or {}),
        vision_config=VISION2 | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen2_5_VLForConditionalGeneration)


def qwen3(text=None, vision=None, rope=ROPE, sections=SECTIONS3, **own):
    rope = rope | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": rope} | (text or {}),
        vision_config=VISION3 | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen3VLForConditionalGeneration)


def qwen3_vl_moe(text=None, **own):
    rope = ROPE | {"mrope_section": SECTIONS3, "mrope_interleaved": True}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    config = transformers.Qwen3VLMoeConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": rope} | experts | (text or {}),
        vision_config=VISION3,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen3VLMoeForConditionalGeneration)


def qwen3_5(text=None, vision=None, **own):
    rope = ROPE | {
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta_net = {"linear_key_head_dim": 8, "linear_value_head_dim": 12} | heads
    text = (
        TEXT
        | {"head_dim": 16, "num_hidden_layers": 5, "rope_parameters": rope}
        | delta_net
        | (text or {})
    )
    tower = {name: value for name, value in VISION3.items() if name != "deepstack_visual_indexes"}
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config=tower | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **own,
    )
    return random_whole(config, transformers.Qwen3_5ForConditionalGeneration)


def random_whole(config, kind):
    for part in (config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    return random_model(config, kind)


@pytest.mark.parametrize(("field", "value"), [("patch_size", 8), ("merge_size", 4)])
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_processor_of_other_patches_than_the_towers_is_refused_with_both_files(
    kind, field, value, tmp_path
):
    vision = VISION2 if kind == "Qwen2_5_VL" else VISION3
    sections = {"mrope_section": SECTIONS2 if kind == "Qwen2_5_VL" else SECTIONS3}
    text = (
        TEXT | {"head_dim": 16, "rope_parameters": ROPE | sections}
        if kind == "Qwen3VL"
        else TEXT | {"rope_parameters": ROPE | sections}
    )
    getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision).save_pretrained(
        tmp_path
    )
    said = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    from_hf(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | {field: value}))
    files = f"{tmp_path / 'preprocessor_config.json'} does not go with {tmp_path / 'config.json'}: it makes patches of"
    with pytest.raises(
        UserError, match=re.escape(files) + ".* the tower has patches of 4 and merges 2 x 2"
    ):
        from_hf(tmp_path)


def samples_of(unit, grids=GRIDS, seed=0):
    """Two images in a sample, one without, one that begins and one that ends with an image; `unit`: pixels a token."""
    rng = np.random.default_rng(seed)
    images = [
        rng.integers(0, 256, (rows * unit, columns * unit, 3)).astype(np.uint8)
        for rows, columns in grids
    ]
    text = lambda n: rng.integers(1, 89, n)  # noqa: E731
    return [
        [text(3), images[0], text(2), images[1], text(4)],
        [text(7)],
        [images[2], text(3)],
        [text(2), images[3], text(1), images[4]],
    ]


def inputs_of(model, folder):
    """What transformers' processor and model take for a sample."""
    config = from_hf(folder).encoders["vision"]
    processor = Qwen2VLImageProcessorPil(
        patch_size=config.patch, merge_size=config.connector.merge, temporal_patch_size=config.frames,
        image_mean=list(config.mean), image_std=list(config.std), do_resize=False,
    )  # fmt: skip

    def inputs(parts):
        tokens, images = [], []
        for part in parts:
            if part.ndim == 1:
                tokens += part.tolist()
                continue
            unit = config.patch * config.connector.merge
            tokens += [IMAGE] * (part.shape[0] // unit * (part.shape[1] // unit))
            images.append(Image.fromarray(part))
        ids = torch.tensor([tokens])
        if not images:
            return {"input_ids": ids}
        made = processor(images, return_tensors="pt")
        return {
            "input_ids": ids,
            "pixel_values": made["pixel_values"].float(),
            "image_grid_thw": made["image_grid_thw"],
            **types_of(model, ids),
        }

    return inputs


def types_of(model, ids):
    """What tells a model which tokens are an image's, where its positions depend on that."""
    if model.config.model_type in ("exaone4_5", "hyperclovax_vision_v2"):
        return {}
    return {"mm_token_type_ids": (ids == IMAGE).int()}


def theirs(inputs):
    """The logits of a sample there."""
    return lambda model, parts: model(**inputs(parts), use_cache=False).logits[0]


def check(model, folder, grids=GRIDS, inputs_of=inputs_of):
    vision = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    inputs = inputs_of(model, folder)
    batch = check_samples(model, folder, samples_of(unit, grids), theirs(inputs))
    check_positions(model, batch, samples_of(unit, grids), inputs)


def check_positions(model, batch, samples, inputs):
    for number, parts in enumerate(samples):
        given = inputs(parts)
        here = batch.text.position[0][batch.text.owner[0] == number]
        if here.ndim == 1:  # as text has them
            np.testing.assert_array_equal(here, np.arange(len(here)))
            continue
        types = (given["input_ids"] == IMAGE).int()
        there, _ = model.model.get_rope_index(
            given["input_ids"], mm_token_type_ids=types, image_grid_thw=given.get("image_grid_thw")
        )
        np.testing.assert_array_equal(here, there[:, 0].T.numpy())


WHOLE = {
    "qwen2_vl": (drawn.qwen2_vl, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (drawn.qwen2_5_vl, transformers.Qwen2_5_VLForConditionalGeneration),
    "exaone4_5": (drawn.exaone4_5, transformers.Exaone4_5_ForConditionalGeneration),
    "hyperclovax_vision_v2": (
        drawn.hyperclovax,
        transformers.HyperCLOVAXVisionV2ForConditionalGeneration,
    ),
    "qwen3_vl": (drawn.qwen3_vl, transformers.Qwen3VLForConditionalGeneration),
    "cosmos3_omni": (drawn.cosmos3_omni, transformers.Cosmos3OmniForConditionalGeneration),
    "qwen3_5": (drawn.qwen3_5, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_vl_moe": (drawn.qwen3_vl_moe, transformers.Qwen3VLMoeForConditionalGeneration),
    "qwen3_5_moe": (drawn.qwen3_5_moe, transformers.Qwen3_5MoeForConditionalGeneration),
}


@pytest.mark.default_cases(
    "qwen2_vl-0",
    "qwen2_5_vl-0",
    "exaone4_5-1",
    "hyperclovax_vision_v2-0",
    "qwen3_vl-0",
    "qwen3_5-0",
    "qwen3_vl_moe-0",
)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_is_what_transformers_makes_of_it(family, seed, tmp_path):
    draw, kind = WHOLE[family]
    model = random_whole(
        draw(np.random.default_rng(seed), image_token_id=IMAGE, video_token_id=VIDEO), kind
    )
    model.save_pretrained(tmp_path)
    check(model, tmp_path)


def test_cosmos_3_is_read_beside_what_makes_images_and_by_qwen3_vls_names(tmp_path):
    draw, kind = WHOLE["cosmos3_omni"]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    model = random_whole(draw(np.random.default_rng(1), **tokens), kind)
    model.save_pretrained(tmp_path)
    _, params, _ = loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"layers.0.{name}.weight": torch.ones(3) for name in ("mlp_moe_gen", "add_q_proj")}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path)[1], params)

    same = random_whole(drawn.qwen3_vl(np.random.default_rng(1), **tokens), WHOLE["qwen3_vl"][1])
    same.load_state_dict(model.state_dict())
    config = (tmp_path / "config.json").read_text()
    same.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("family", "part"), [("exaone4_5", "text"), ("hyperclovax_vision_v2", "vision")]
)
def test_a_part_of_another_kind_is_refused(family, part, tmp_path):
    draw, _ = WHOLE[family]
    saved = draw(np.random.default_rng(0), image_token_id=IMAGE, video_token_id=VIDEO).to_dict()
    saved[f"{part}_config"]["model_type"] = {"text": "qwen3", "vision": "qwen2_vl_vision"}[part]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=f"{part}_config: model_type=.* is not supported"):
        from_hf(tmp_path)


# A delta net's outputs are normed, tiny ones too, so rounding may decide where they point: in ten
# steps five layers drift from torch by .1 with an epsilon of 1e-6, by 1e-3 with 1e-2, by 2e-5 with
# 1e-1.
SMOOTH = {
    "rms_norm_eps": 1e-2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "text"),
    [(qwen2_5, {}), (qwen3_5, SMOOTH), (qwen3_vl_moe, {})],
    ids=["qwen2_5", "qwen3_5", "qwen3_vl_moe"],
)
def test_ten_steps_of_adamw_have_the_losses_that_torch_has(make, text, tmp_path):
    there = make(text, tie_word_embeddings=True)
    there.save_pretrained(tmp_path)
    unit = there.config.vision_config.patch_size * there.config.vision_config.spatial_merge_size
    samples = samples_of(unit) + samples_of(unit, GRIDS[::-1], seed=1)
    check_ten_steps(there, tmp_path, samples, theirs(inputs_of(there, tmp_path)))


@pytest.mark.parametrize("fused", ["out_in", "in_out"])
def test_experts_that_are_stored_fused_are_those_stored_one_by_one(fused, tmp_path):
    """transformers' own layout, and the one in which Qwen3-VL-30B-A3B is published."""
    config = qwen3_vl_moe().config
    model = random_whole(config, transformers.Qwen3VLMoeForConditionalGeneration)
    model.save_pretrained(tmp_path)
    _, wanted, _ = loaded(tmp_path)

    def change(tensors):
        for key in [key for key in tensors if ".experts." in key]:
            tensors[key] = (
                tensors[key].transpose(1, 2).contiguous() if fused == "in_out" else tensors[key]
            )
        return tensors

    edit_tensors(tmp_path, change)
    shapes = {
        tuple(t.shape)
        for key, t in load_file(tmp_path / "model.safetensors").items()
        if "gate_up" in key
    }
    assert shapes == {(6, 48, 80) if fused == "in_out" else (6, 80, 48)}
    _, found, _ = loaded(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    there = wanted["llm"]["layers"]["runs"]["3"]["experts"]["up"]["weight"]
    theirs = model.state_dict()["model.language_model.layers.3.mlp.experts.gate_up_proj"][
        :, 40:
    ].transpose(1, 2)
    np.testing.assert_array_equal(there, theirs.numpy())


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def flat(config):
    """As the first checkpoints of Qwen2.5-VL have it."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    sections = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config.update({k: v for k, v in text.items() if k not in ("model_type", "layer_types")})
    config.update(
        rope_theta=rope["rope_theta"],
        rope_scaling=sections,
        sliding_window=32768,
        use_sliding_window=False,
    )
    vision = config["vision_config"]
    vision["in_chans"] = vision.pop("in_channels")
    del vision["rope_parameters"], vision["temporal_patch_size"]
    vision["model_type"] = "qwen2_5_vl"


def new_keys(tensors):
    """As later versions name what the first ones call visual.* and model.*."""

    def named(key):
        if key.startswith("visual."):
            return f"model.{key}"
        return (
            f"model.language_model.{key.removeprefix('model.')}"
            if key.startswith("model.")
            else key
        )

    return {named(key): tensor for key, tensor in tensors.items()}


def test_old_and_new_layouts_are_one_model(tmp_path):
    model = qwen2_5()
    model.save_pretrained(tmp_path)
    _, old, config = loaded(tmp_path)
    assert "visual.patch_embed.proj.weight" in load_file(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, new_keys)
    _, new, _ = loaded(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, old, new)
    edit_config(tmp_path, flat)
    assert from_hf(tmp_path) == config
    again = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    torch.testing.assert_close(again.state_dict(), model.state_dict())
    assert again.config.text_config.rope_parameters["mrope_section"] == SECTIONS2


SAME = (
    ("layers", "num_hidden_layers"),
    ("width", "hidden_size"),
    ("mlp_width", "intermediate_size"),
    ("vocab", "vocab_size"),
    ("kv_heads", "num_key_value_heads"),
    ("norm_eps", "rms_norm_eps"),
)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    for kind, whole in (
        ("qwen2_5_vl", transformers.Qwen2_5_VLConfig),
        ("qwen3_vl", transformers.Qwen3VLConfig),
    ):
        text = whole().text_config
        sparse = {
            "model_type": kind,
            "text_config": {},
            "vision_config": {"out_hidden_size": text.hidden_size},
        }
        (tmp_path / "config.json").write_text(json.dumps(sparse))
        model = from_hf(tmp_path)
        llm, tower, vision = model.llm, model.encoders["vision"], whole().vision_config
        for ours, theirs in SAME:
            assert getattr(llm, ours) == getattr(text, theirs), ours
        assert llm.rope_theta == text.rope_parameters["rope_theta"]
        assert (tower.layers, tower.width, tower.heads) == (
            vision.depth,
            vision.hidden_size,
            vision.num_heads,
        )
        assert (tower.mlp_width, tower.patch, tower.frames) == (
            vision.intermediate_size,
            vision.patch_size,
            2,
        )
        if kind == "qwen2_5_vl":
            assert tower.window * tower.patch == vision.window_size
            assert sorted({*range(tower.layers)} - {*tower.windowed}) == list(
                vision.fullatt_block_indexes
            )
            assert llm.rope_sections == (16, 24, 24)
        else:
            assert tower.positions.side**2 == vision.num_position_embeddings
            assert tower.deepstack == tuple(vision.deepstack_visual_indexes)
            assert llm.rope_sections == (24, 20, 20)


def test_pixels_are_normalised_as_the_image_processor_says(tmp_path):
    qwen2_5().save_pretrained(tmp_path)
    assert from_hf(tmp_path).encoders["vision"].mean == (0.48145466, 0.4578275, 0.40821073)
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
    said = kind | {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    tower = from_hf(tmp_path).encoders["vision"]
    np.testing.assert_allclose(
        [tower.mean, tower.std], [(0.1, 0.2, 0.3), (1.0, 2.0, 3.0)], rtol=1e-9
    )
    assert isinstance(tower.images, SmartResize)
    inner = {"image_processor": kind | {"image_mean": [0.5, 0.5, 0.5]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(inner))
    tower = from_hf(tmp_path).encoders["vision"]
    np.testing.assert_allclose(tower.mean, (0.5, 0.5, 0.5), rtol=1e-9)
    np.testing.assert_allclose(tower.std, (0.26862954, 0.26130258, 0.27577711), rtol=1e-9)


def test_modules_of_two_folders_make_one_model(tmp_path):
    """A tower of one checkpoint under another's LLM; its connector begins at random."""
    qwen3().save_pretrained(tmp_path / "eyes")
    random_model(transformers.Qwen2Config(**TEXT)).save_pretrained(tmp_path / "words")
    tower = from_hf(tmp_path / "eyes").encoders["vision"]
    tower = replace(tower, connector=replace(tower.connector, weights=""))
    config = replace(from_hf(tmp_path / "words"), encoders={"eye": tower})
    model = Model.build(config, jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = load_pretrained(model, parameter_shardings(model, mesh, ShardingRules()))
    assert set(params) == {"llm", "encoders"}
    there = load_file(tmp_path / "eyes" / "model.safetensors")
    patches = there["model.visual.patch_embed.proj.weight"].numpy()
    ours = np.asarray(params["encoders"]["eye"]["embed"]["patches"]["weight"])
    np.testing.assert_array_equal(ours.reshape(2, 4, 4, 3, 32), patches.transpose(2, 3, 4, 1, 0))


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("merger.norm.bias", None, r"has no tensor model\.visual\.merger\.norm\.bias"),
        ("patch_embed.proj.weight", None, r"has no vision tower"),
        ("blocks.7.norm1.bias", (2,), r"1 tensors .* model\.visual\.blocks\.7"),
        ("merger.more", (2,), r"1 tensors .* model\.visual\.merger\.more"),
        ("deepstack_merger_list.3.norm.bias", (2,), r"1 tensors .*_list\.3"),
        ("pos_embed.weight", (25, 32), r"pos_embed\.weight has shape \[25, 32\], this model"),
    ],
)
def test_tensors_that_do_not_go_with_the_config_are_named(tmp_path, key, shape, message):
    qwen3().save_pretrained(tmp_path)

    def change(tensors):
        others = {k: t for k, t in tensors.items() if k != f"model.visual.{key}"}
        return others | ({f"model.visual.{key}": torch.ones(shape)} if shape else {})

    edit_tensors(tmp_path, change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (qwen2_5, {"out_hidden_size": 64}, r"out_hidden_size=64, but the text's hidden_size is 48"),
        (qwen2_5, {"window_size": 6}, r"window_size=6 is smaller than a merged patch of 8"),
        (qwen2_5, {"hidden_act": "mish"}, r"vision_config: hidden_act='mish'"),
        (
            qwen2_5,
            {"rope_parameters": {"rope_type": "yarn"}},
            r"rope_parameters: rope_type='yarn' is not supported",
        ),
        (
            qwen3,
            {"num_position_embeddings": 37},
            r"num_position_embeddings=37 is no square of a number",
        ),
        (
            qwen3,
            {"deepstack_visual_indexes": [2, 0]},
            r"deepstack_visual_indexes=\[2, 0\] is not in the order",
        ),
    ],
)
def test_vision_configs_that_cannot_be_read_are_refused_by_field(tmp_path, make, change, message):
    make().save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config["vision_config"].update(change))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("sections", "message"), [([1, 1, 1], "must add up to 6"), ([6], "must have three numbers")]
)
def test_sections_that_are_not_those_of_a_head_are_refused(tmp_path, sections, message):
    qwen2_5().save_pretrained(tmp_path)
    rope = ROPE | {"mrope_section": sections}
    edit_config(tmp_path, lambda config: config["text_config"].update(rope_parameters=rope))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)
