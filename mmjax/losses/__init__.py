"""Losses of text: a file for each loss of answers, whose settings are in `config.losses`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from mmjax.losses import dpo, grpo, kto, orpo

# By kind, the module of each loss of several answers to a prompt. It has two functions:
# `measures(config)` names what is measured beside the loss, in TRL's words. A step's mean is the
# sum over its tokens divided by that of the measure named behind it, or by the sum of the loss
# weights where that is "". `token_losses(log_probs, reference, text, config)` computes the loss and
# these measures at every token, all `[R, T]`.
ANSWER_LOSSES: Mapping[str, ModuleType] = {"dpo": dpo, "orpo": orpo, "kto": kto, "grpo": grpo}
