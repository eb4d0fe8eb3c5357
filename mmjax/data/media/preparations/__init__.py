"""Prepare images, videos and clips: a module for each kind of preparation, named as its config's `kind`.

- Of images: `items` of one; `texts` before each part of its tokens and behind the last, where the config
  `writes_texts`; and the `layout` of its tokens, where it `arranges_tokens`.
- Of videos: `sample`, the frames taken of one by its header; and `layout`, where the config `interpolates`.
- Of clips: `split` into items; `count_frames` of one; and `compute_frames`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from mmjax.config import AudioPreparation, ImagePreparation, VideoPreparation, VisionConfig
from mmjax.data.media.decode import SampledVideo, VideoHeader
from mmjax.data.media.image_transforms import BeforeEncoder
from mmjax.data.media.preparations import (
    any_res,
    as_is,
    canvas_tiles,
    capped_grid,
    dynamic_tiles,
    fixed_size,
    glm4_video,
    log_mel,
    muse_video,
    padded_resize,
    pan_and_scan,
    patch_budget,
    pixtral_resize,
    qwen2_video,
    qwen3_video,
    resize_or_tiles,
    slices,
    smart_resize,
    split_tiles,
    tiles_and_square,
    uniform_video,
    usm_mel,
    waveform,
    whisper_mel,
)

KINDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        any_res,
        as_is,
        canvas_tiles,
        capped_grid,
        dynamic_tiles,
        fixed_size,
        glm4_video,
        log_mel,
        muse_video,
        padded_resize,
        pan_and_scan,
        patch_budget,
        pixtral_resize,
        qwen2_video,
        qwen3_video,
        resize_or_tiles,
        slices,
        smart_resize,
        split_tiles,
        tiles_and_square,
        uniform_video,
        usm_mel,
        waveform,
        whisper_mel,
    )
}


def preparation(config: ImagePreparation | VideoPreparation | AudioPreparation) -> ModuleType:
    """Return the functions of a config's kind."""
    return KINDS[config.kind]


def before_encoder(config: ImagePreparation) -> BeforeEncoder:
    """Return the function that makes the items of an image."""
    return partial(preparation(config).items, config)


def sample_video(encoder: VisionConfig, header: VideoHeader) -> SampledVideo:
    """Choose the frames of a video and their size, from its header. Raises BadMedia for a video without any."""
    token_side = encoder.patch * encoder.token_side  # in pixels
    return preparation(encoder.videos).sample(encoder.videos, header, encoder.frames, token_side)
