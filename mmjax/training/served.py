"""A run's folder or a Hugging Face checkpoint's, as a model that can be asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmjax.config import (
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    DynamicRope,
    MeshConfig,
    ModelConfig,
    TrainingConfig,
)
from mmjax.config_files import callbacks_of, edit
from mmjax.data.alphabet import AlphabetFormat
from mmjax.data.asked import PromptFormat
from mmjax.data.chat import Chat, load_prompt_chat
from mmjax.data.embedded import EmbeddedDataset
from mmjax.data.sources import chat_for, open_sources
from mmjax.errors import UserError
from mmjax.hf.families import from_hf, frozen
from mmjax.hf.folder import read_json
from mmjax.hub import checkpoint_folder
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules
from mmjax.training.checkpoint import checkpoint_step, restore_parameters
from mmjax.training.pretrained import load_pretrained
from mmjax.training.run_folder import RunFolder
from mmjax.training.state import parameter_shardings

Params = dict[str, Any]

_TEXT = ("text_config", "llm_config")  # where a multimodal checkpoint's config.json has that of its LLM
_CAST = {"weight", "a", "b"}  # of the LLM: cast to the activations' dtype wherever they are used


@dataclass(frozen=True)
class Served:
    """A run or a checkpoint, before any weight is read. `config` is the run's, or one made for the checkpoint."""

    path: Path
    config: Config
    run: RunFolder | None  # None: the folder of a checkpoint
    step: int | None = None  # of a run's checkpoint; None: the newest

    @classmethod
    def open(cls, path: Path, overrides: Sequence[str] = (), step: int | None = None) -> Served:
        """Open the folder of a run or of a Hugging Face checkpoint; `overrides` are `a.b=value`.

        step: of the run's checkpoint, by default the newest.

        A checkpoint may be named as on the Hub (`mmjax.hub`).

        The mesh of a run was for its training: it is all devices side by side unless `overrides` say otherwise. Raises
        UserError for a folder that is neither.
        """
        path = checkpoint_folder(path)
        kind = _kind(path)
        if kind == "run":
            run = RunFolder(path)
            return cls(path, edit(replace(run.read_config(), mesh=MeshConfig()), overrides), run, step)
        if step is not None:
            raise UserError(
                f"--step {step}: {path} is a Hugging Face checkpoint, not a run with several; leave it away"
            )
        return cls(path, edit(_config_of(path.absolute()), overrides), None)

    def chat(self) -> Chat:
        """Return the chat format of questions, by a template that need not be fit for training.

        Raises UserError where nothing says so.
        """
        if self.config.data.chat is None:
            raise UserError(
                f"{self.path} was trained without a chat format, so nothing says how a question becomes tokens; name a "
                "folder with a tokenizer and a chat template: data.chat.folder=FOLDER"
            )
        return chat_for(self.config.data.chat, self.config.model, load_prompt_chat)

    def prompt_format(self) -> PromptFormat:
        """Return the format of a user's questions; of a run without a chat format, its data set's alphabet."""
        data = self.config.data
        if data.chat is not None or not data.alphabet or self.run is None:
            return self.chat()
        sources = open_sources(self.config, "test", self.path).values()
        return AlphabetFormat(data.alphabet, any(isinstance(source, EmbeddedDataset) for source in sources))

    def positions(self) -> int | None:
        """Tokens of the longest text that the checkpoint was made for, `max_position_embeddings`, where it is known.

        None where it is not, and under dynamic RoPE, whose base grows with the text beyond them.
        """
        if isinstance(self.config.model.llm.rope_scaling, DynamicRope):
            return None
        folders = [self.path] if self.run is None else [self.config.model.llm.weights]
        where = Path(folders[0]) / "config.json" if folders[0] else None
        if where is None or not where.is_file():
            return None
        config = read_json(where)
        inner = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), config)
        found = inner.get("max_position_embeddings", config.get("max_position_embeddings"))
        return found if isinstance(found, int) else None

    def programs(self) -> Path:
        """Return the folder of compiled programs."""
        own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mmjax" / "programs"
        return own if self.run is None else self.run.programs

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Load the functions that the encoders' callbacks name."""
        return callbacks_of(self.config.model, self.path)

    def load(self, mesh: Mesh, rules: ShardingRules) -> tuple[Model, Params]:
        """The model and its weights on a mesh: what only ever computes in the activations' dtype is held in it."""
        dtype = jnp.dtype(self.config.training.precision)
        if self.run is None:
            model = Model.build(_still(self.config.model), dtype)
            return model, load_pretrained(model, parameter_shardings(model, mesh, rules))
        model = Model.build(self.config.model, dtype, functions=self.functions())
        shardings = parameter_shardings(model, mesh, rules)
        params = restore_parameters(
            self.run.checkpoints, checkpoint_step(self.run.checkpoints, self.step), model, shardings
        )
        return model, params | {"llm": _cast(params["llm"], dtype)}


def _kind(path: Path) -> str:
    """`run` or `checkpoint`."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give a run's, or that of a Hugging Face checkpoint")
    if (path / "parts.json").exists():
        raise UserError(
            f"{path} is a model of several folders' parts as mmjax.export writes it, which is no whole checkpoint; "
            "give the run's own folder"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds neither a run nor a Hugging Face checkpoint: it has no config.json")
    found = read_json(path / "config.json")
    if "model_type" in found:
        return "checkpoint"
    if {"model", "training"} <= set(found):
        return "run"
    raise UserError(f"{path / 'config.json'} is neither a run's nor a Hugging Face checkpoint's: it has no model_type")


def _config_of(path: Path) -> Config:
    """A config that says of a checkpoint what a run's says of its model: how to compute it and to talk to it."""
    model = from_hf(path)
    config = read_json(path / "config.json")
    inner = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), {})
    stored = str(next((of[key] for of in (config, inner) for key in ("dtype", "torch_dtype") if of.get(key)), ""))
    precision = "bfloat16" if stored.endswith("16") else "float32"
    rows = dict.fromkeys(("llm", *model.encoders), 1)
    data, batch = DataConfig(chat=ChatFormat(str(path))), BatchConfig(rows=rows)
    return Config("checkpoint", data, batch, model, TrainingConfig(steps=1000, precision=precision))


def _still(model: ModelConfig) -> ModelConfig:
    """The model with every module frozen, whose weights are so held in the activations' dtype."""
    return frozen(model, ["llm", *(part for name in model.encoders for part in (name, f"{name}.connector"))])


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    """Nested dicts with matrices in another dtype, where they lie."""
    flat, structure = jax.tree.flatten_with_path(params)
    return jax.tree.unflatten(structure, [x.astype(dtype) if path[-1].key in _CAST else x for path, x in flat])
