"""Validate the generators of a config."""

from __future__ import annotations

from mmjax.config.checks import above_zero, at_least, check, divides
from mmjax.config.generators import (
    DiffusionTransformerConfig,
    FlowMatching,
    Generator,
    UnetConfig,
    VaeConfig,
)
from mmjax.config.model import ModelConfig
from mmjax.config.towers import ConnectorConfig

# Of a connector that reads single hidden states: what says how neighbours are merged, or where they
# lie, is left alone.
_CONNECTOR_KEYS = (
    "merge",
    "merging",
    "position_grid",
    "newline",
    "merger_width",
    "merger_bias",
    "projection",
)


def check_generators(model: ModelConfig) -> None:
    """Raises UserError for generators that cannot be built, or not behind this LLM."""
    for name, generator in model.generators.items():
        where = f"model.generators.{name}"
        check(
            name != "llm",
            f"{where}: 'llm' is the decoder's name; call this generator something else",
        )
        check(
            name not in model.encoders,
            f"{where}: an encoder has this name; call this generator something else",
        )
        check(
            name.isidentifier(),
            f"{where}: a generator's name must be a plain word: letters, digits and '_'",
        )
        _check_generator(where, generator)


def _check_generator(where: str, generator: Generator) -> None:
    at_least(1, where, generator, ("condition_width", "queries"))
    at_least(
        1,
        f"{where}.latents",
        generator.latents,
        ("channels", "factor") if generator.latents.factor > 1 else (),
    )
    for key in ("mean", "std"):
        values = getattr(generator.latents, key, (0.5,))
        check(
            len(values) in (1, generator.latents.channels),
            f"{where}.latents.{key} has {len(values)} values for channels={generator.latents.channels}; give one, or "
            "one for each",
        )
        check(
            key == "mean" or min(values) > 0, f"{where}.latents.std={values}: must be more than 0"
        )
    if vae := generator.step_vae:
        _check_vae(f"{where}.latents", generator, vae)
    _check_flow(f"{where}.flow", generator.flow)
    connector = generator.connector
    usual = ConnectorConfig(merge=1)
    for key in _CONNECTOR_KEYS:
        value = getattr(connector, key)
        check(
            value == getattr(usual, key),
            f"{where}.connector.{key}={value}: it reads the hidden state of each query by itself; leave it at "
            f"{getattr(usual, key)}",
        )
    if isinstance(generator, DiffusionTransformerConfig):
        at_least(
            1,
            where,
            generator,
            ("layers", "width", "heads", "mlp_width", "patch", "min_patches", "grid"),
        )
        above_zero(where, generator, ("norm_eps", "grid_scale"))
        divides(where, generator.width, "width", generator.heads, "heads")
        unit = 12 if generator.micro_conditions else 4
        check(
            generator.width % unit == 0,
            f"{where}.width={generator.width}: sines and cosines of rows and columns"
            f"{', and of sizes (micro_conditions),' if unit == 12 else ''} fill it; use a multiple of {unit}",
        )
        check(
            generator.queries <= generator.min_patches,
            f"{where}.queries={generator.queries}: an image of min_patches={generator.min_patches} has fewer patches; "
            "use fewer queries, or larger images",
        )
        at_least(0, where, generator, ("text_tokens",))
        check(
            generator.condition_tokens <= generator.min_patches,
            f"{where}.text_tokens={generator.text_tokens}: with {generator.queries} queries these are more than the "
            f"patches of an image of min_patches={generator.min_patches}; use fewer, or larger images",
        )
    else:
        _check_unet(where, generator)


def _check_vae(where: str, generator: Generator, vae: VaeConfig) -> None:
    """Check a VAE that encodes in every step."""
    for key in ("channels", "factor", "scale", "shift"):
        configured, value = getattr(generator.latents, key), getattr(vae, key)
        check(
            configured == value,
            f"{where}.{key}={configured}, but its vae says {value}; use {where}.{key}={value}",
        )
    check(
        vae.image_channels == 3,
        f"{where}.vae.image_channels={vae.image_channels}: images have 3 channels",
    )
    size = generator.image_size
    check(
        size is not None,
        f"{where}.encode=step: images of one size are encoded in a step, and these have any; prepare them by "
        "images=fixed_size, or choose encode=once",
    )
    unit = generator.patch * vae.factor
    check(
        all(side % generator.patch == 0 for side in size),
        f"{where}.encode=step: images are no whole patches of {unit} x {unit} pixels; change images.crop",
    )


def _check_flow(where: str, flow: FlowMatching) -> None:
    above_zero(where, flow, ("weight", "time_std"))
    check(
        0 <= flow.condition_dropout < 1,
        f"{where}.condition_dropout={flow.condition_dropout}: choose at least 0 and less than 1",
    )


def _check_unet(where: str, unet: UnetConfig) -> None:
    levels = len(unet.widths)
    check(levels >= 1, f"{where}.widths is empty; give the channels of each level")
    at_least(1, where, unet, ("blocks", "groups"))
    for key in ("heads", "attending"):
        count = len(getattr(unet, key))
        check(
            count == levels,
            f"{where}.{key} names {count} levels, widths {levels}; give one value for each",
        )
    check(
        unet.widths[0] % 2 == 0,
        f"{where}.widths: the time has as many features as the first level channels; use an even number",
    )
    # In the middle there is attention at the width of the last level.
    attending = (*unet.attending[:-1], True)
    for width, heads, attends in zip(unet.widths, unet.heads, attending, strict=True):
        divides = width >= 1 and width % unet.groups == 0
        check(divides, f"{where}.groups={unet.groups} does not divide the width {width}")
        check(
            not attends or (heads >= 1 and width % heads == 0),
            f"{where}: {heads} heads do not divide the width {width} of their level",
        )
    check(len(unet.size) == 2, f"{where}.size={unet.size}: give height and width in latents")
    unit = 2 ** (levels - 1)
    check(
        all(side > 0 and side % unit == 0 for side in unet.size),
        f"{where}.size={unet.size}: {levels} levels halve it {levels - 1} times; use multiples of {unit}",
    )
