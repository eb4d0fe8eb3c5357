"""PaliGemma 1 and 2: a SigLIP tower, one matrix, a Gemma whose prompt attends both ways."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConnectorConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf.decoders import decoder_of
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linear
from mmjax.hf.llava import PROJECTORS, whole_layout
from mmjax.hf.vision import vision_of, with_images


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a PaliGemma's config says: images and the text before the first answer are one prefix."""
    text = fields.inner("text_config")
    # It says what the mask does anyway: the prefix attends both ways, what follows is causal.
    text.allow_only("use_bidirectional_attention", True)
    text = replace(text, values={**text.values, "use_bidirectional_attention": None})
    llm = decoder_of(text, fields.get("tie_word_embeddings", bool))
    if (outputs := fields.get("projection_dim", int)) != llm.width:
        raise UserError(
            f"{fields.where}: projection_dim={outputs}, but the text's hidden_size is {llm.width}"
        )
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    vision = with_images(folder, vision_of(fields.inner("vision_config"), -1, True, connector))
    return ModelConfig(replace(llm, items="prefix"), {"vision": vision})


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    projector = next(
        (p for p in PROJECTORS if f"{p}linear.weight" in folder.tensors), PROJECTORS[-1]
    )
    connector = TensorNames({"linear": linear(f"{projector}linear")})
    return whole_layout(folder, model, connector, projector)
