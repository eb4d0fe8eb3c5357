"""Idefics3 and SmolVLM compute what transformers computes, with labels between the tiles of an image."""

from __future__ import annotations

import json

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from image_shapes import picture
from parity import leave_out_defaults, random_model
from parity_samples import check_samples, is_text
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from mmjax.batch import ItemBatch
from mmjax.config import SplitTiles
from mmjax.data.media.preparations import split_tiles
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.models.vision_encoder import fractional_positions

VOCAB, IMAGE = 61, 60
WHOLE = {
    "idefics3": (transformers.Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
    "smolvlm": (transformers.SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
}


def made(family, seed, folder):
    """A random model in a folder with its processor, for tiles of other sizes than the tower's own too."""
    rng = np.random.default_rng(seed)
    kind, processor_of = WHOLE[family]
    config = drawn.idefics3(rng, family, VOCAB, image_token_id=IMAGE)
    if seed % 2:  # as of published SmolVLMs, whose configs leave them out
        config.vision_config.num_attention_heads, config.vision_config.hidden_size = 16, 32
    for part in (config.text_config, config.vision_config):
        part._attn_implementation = "eager"
    model = random_model(config, kind)
    model.save_pretrained(folder)
    leave_out_defaults(folder)
    unit = config.vision_config.patch_size * config.scale_factor
    tile = unit * drawn.between(rng, 1, 3)
    processor = processor_of(
        size={"longest_edge": 2 * tile + drawn.between(rng, 0, tile)},
        max_image_size={"longest_edge": tile},
        do_image_splitting=bool(rng.integers(4)),
        image_std=[0.2, 0.25, 0.3],
    )
    processor.save_pretrained(folder)
    return model, processor, (tile // unit) ** 2


def samples():
    """Text alone; an image of each of several shapes, and two in a sample."""
    rng = np.random.default_rng(0)
    words = lambda n: rng.integers(1, 50, n)  # noqa: E731
    return [
        [words(9)],
        [words(3), picture(40, 90), words(5)],
        [words(2), picture(31, 31), words(1), picture(70, 20), words(4)],
    ]


class Written(dict):
    """Tokens of any text: two that its length and its last letters tell."""

    def __missing__(self, text):
        return [50 + len(text) % 8, 50 + sum(map(ord, text[-8:])) % 9]


def inputs_of(sample, processor, tokens):
    """What the model there takes for one sample. tokens: of a tile."""
    images = [Image.fromarray(part) for part in sample if not is_text(part)]
    if not images:
        return {"input_ids": torch.tensor(sample[0])[None].long()}
    out = processor([images], return_row_col_info=True, return_tensors="pt")
    grids, ids = iter(zip(out.pop("rows")[0], out.pop("cols")[0], strict=True)), []
    for part in sample:
        if is_text(part):
            ids += part.tolist()
            continue
        rows, columns = next(grids)
        fake = "<fake_token_around_image>"
        for row in range(rows):
            for column in range(columns):
                line = "\n" if row and not column else ""
                ids += [
                    *Written()[f"{line}{fake}<row_{row + 1}_col_{column + 1}>"],
                    *[IMAGE] * tokens,
                ]
        lines = "\n\n" if rows else ""
        ids += [*Written()[f"{lines}{fake}<global-img>"], *[IMAGE] * tokens, *Written()[fake]]
    return {"input_ids": torch.tensor([ids]), **out}


@pytest.mark.default_cases("idefics3-1")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", WHOLE)
def test_a_whole_model_whose_config_leaves_out_defaults_is_what_transformers_makes_of_it(
    family, seed, tmp_path
):
    model, processor, tokens = made(family, seed, tmp_path)
    theirs = lambda model, sample: model(  # noqa: E731
        **inputs_of(sample, processor, tokens), use_cache=False
    ).logits[0]
    check_samples(model, tmp_path, samples(), theirs, Written())


@pytest.mark.default_cases("49")
@pytest.mark.parametrize("side", [1, 2, 3, 7, 10, 26, 27, 32, 49, 70])
def test_patches_take_the_cells_that_they_take_there_to_the_rounding_at_their_borders(side):
    """Of square images of 1 to 80 patches a side, more than the grid has too."""
    patch = 2
    there = Idefics3VisionEmbeddings(
        transformers.Idefics3VisionConfig(hidden_size=1, image_size=side * patch, patch_size=patch)
    )
    torch.nn.init.zeros_(there.patch_embedding.weight)
    torch.nn.init.zeros_(there.patch_embedding.bias)
    there.position_embedding.weight.data[:, 0] = torch.arange(side**2)
    here = jax.jit(
        lambda coordinates, item: fractional_positions(side, batch_of(coordinates, item))
    )
    for count in (*range(1, 81, 3), side):
        pixels = torch.zeros(1, 3, count * patch, count * patch)
        with torch.no_grad():
            wanted = (
                there(pixels, torch.ones(1, count, count, dtype=torch.bool))[0, :, 0]
                .numpy()
                .astype(int)
            )
        coordinates = np.zeros((1, 80**2, 3), np.int32)
        coordinates[0, : count**2, 1:] = np.stack(np.divmod(np.arange(count**2), count), axis=-1)
        item = np.where(np.arange(80**2) < count**2, 0, -1)[None].astype(np.int32)
        np.testing.assert_array_equal(
            np.asarray(here(coordinates, item))[0, : count**2], wanted, err_msg=str(count)
        )


def batch_of(coordinates, item):
    zeros = jnp.zeros_like(item)
    return ItemBatch(
        values=zeros[..., None], item=item, coordinates=coordinates, owner=zeros, offset=zeros
    )


def edit(path, **own):
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


def test_without_a_processor_tiles_are_the_towers_and_have_their_labels(tmp_path):
    model, _, _ = made("smolvlm", 0, tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    vision = model.config.vision_config
    tile = vision.image_size // vision.patch_size * vision.patch_size
    encoder = from_hf(tmp_path).encoders["vision"]
    assert (encoder.images.tile, encoder.images.resize, encoder.images.filter) == (
        tile,
        (4 * tile,),
        "lanczos",
    )
    texts = split_tiles.texts(encoder.images, (tile, 2 * tile), [])
    fake = "<fake_token_around_image>"
    assert len(texts) == 2 * 4 + 2
    assert (texts[0], texts[4]) == (f"{fake}<row_1_col_1>", f"\n{fake}<row_2_col_1>")
    assert texts[-2:] == (f"\n\n{fake}<global-img>", fake)


def test_tiles_that_do_not_divide_into_squares_of_patches_are_refused(tmp_path):
    model, _, _ = made("idefics3", 1, tmp_path)
    unit = model.config.vision_config.patch_size * 2
    edit(tmp_path / "config.json", scale_factor=2)
    edit(tmp_path / "preprocessor_config.json", max_image_size={"longest_edge": 3 * unit // 2})
    with pytest.raises(
        UserError, match="3 patches a side, which do not divide into squares of 2 x 2"
    ):
        from_hf(tmp_path)
    edit(tmp_path / "preprocessor_config.json", max_image_size={"longest_edge": unit})
    assert isinstance(from_hf(tmp_path).encoders["vision"].images, SplitTiles)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path):
    for kind, whole in (
        ("idefics3", transformers.Idefics3Config()),
        ("smolvlm", transformers.SmolVLMConfig()),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        model = from_hf(tmp_path)
        tower, vision, text = model.encoders["vision"], whole.vision_config, whole.text_config
        assert (model.llm.layers, model.llm.width, model.llm.norm_eps) == (
            32,
            text.hidden_size,
            text.rms_norm_eps,
        )
        assert (tower.width, tower.mlp_width, tower.layers) == (
            vision.hidden_size,
            vision.intermediate_size,
            12,
        )
        assert (tower.patch, tower.positions.side, tower.connector.merge) == (
            vision.patch_size,
            7,
            whole.scale_factor,
        )
        assert model.llm.tied == whole.tie_word_embeddings
