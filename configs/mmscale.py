"""Train parts of a model that draws, and every projector: MMScale's four settings of frozen training.

python -m mmjax.train mmscale trained=llm init_from=runs/tiny_draw
python -m mmjax.plan mmscale base=mllm_9b trained=generator cluster=a800x120x8

`trained` is `projectors` (nothing else; the default), `encoder`, `llm` or `generator`; `base` any
config beside this one. What is frozen should start from weights: those that the base names, or a
run of it.
"""

from dataclasses import replace

from mmjax.config import Config
from mmjax.config.loading import sibling
from mmjax.config.model import train_only


def config(trained: str = "projectors", base: str = "tiny_draw") -> Config:
    whole = sibling(__file__, base).config()
    return replace(whole, name=f"{base}_{trained}", model=train_only(whole.model, trained))
