"""Open a run's folder or a Hugging Face checkpoint for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    TrainingConfig,
)
from mmjax.config.loading import apply_overrides, resolve_callbacks
from mmjax.config.model import module_names
from mmjax.data.sources.opening import chat_for, open_sources
from mmjax.data.text.alphabet import AlphabetFormat
from mmjax.data.text.chat import Chat
from mmjax.data.text.load_chat import load_prompt_chat
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.disk import read_json, user_cache
from mmjax.errors import UserError
from mmjax.hf.families import from_hf, frozen
from mmjax.hub import checkpoint_folder
from mmjax.inference.prompts import PromptFormat
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

# keys of the LLM's config inside a multimodal checkpoint's config.json
_TEXT = ("text_config", "llm_config")
# parameters of the LLM that are cast to the activations' dtype wherever they are used
_CAST = {"weight", "a", "b"}


@dataclass(frozen=True)
class CheckpointModel:
    """A run or a checkpoint whose weights are not read yet. `config` is the run's, or one made for the checkpoint."""

    path: Path
    config: Config
    run: RunFolder | None  # None: the folder of a checkpoint
    step: int | None = None  # of a run's checkpoint; None: the newest

    @classmethod
    def open(
        cls, path: Path, overrides: Sequence[str] = (), step: int | None = None, trust: bool = False
    ) -> CheckpointModel:
        """Open the folder of a run or of a Hugging Face checkpoint.

        path: may be a checkpoint's name on the Hub. overrides: settings as `a.b=value`. step: of a
        run's checkpoint, by default the newest. trust: execute and fetch what a run's config says,
        whoever wrote it. The mesh of a run was for its training, so the default mesh replaces it.
        Raises UserError for a folder that is neither.
        """
        path = checkpoint_folder(path)
        if _is_run(path):
            run = RunFolder(path, trusted=trust)
            stored = replace(run.read_config(overrides), mesh=MeshConfig())
            return cls(path, apply_overrides(stored, overrides), run, step)
        if step is not None:
            raise UserError(
                f"--step {step}: {path} is a Hugging Face checkpoint, not a run with several; leave it out"
            )
        return cls(path, apply_overrides(_config_of(path.absolute()), overrides), None)

    def chat(self) -> Chat:
        """Return the chat format of questions; its template may be unfit for training.

        Raises UserError where nothing says so.
        """
        if self.config.data.chat is None:
            raise UserError(
                f"{self.path} was trained without a chat format, so nothing says how a question becomes tokens; name a "
                "folder with a tokenizer and a chat template: data.chat.folder=FOLDER"
            )
        return chat_for(self.config.data.chat, self.config.model, load_prompt_chat)

    @cached_property
    def prompt_format(self) -> PromptFormat:
        """The format of a user's questions; of a run without a chat format, its data set's alphabet."""
        data = self.config.data
        if data.chat is not None or not data.alphabet or self.run is None:
            return self.chat()
        sources = open_sources(self.config, "test", self.path).values()
        return AlphabetFormat(
            data.alphabet, any(isinstance(source, EmbeddedDataset) for source in sources)
        )

    def positions(self) -> int | None:
        """Return the checkpoint's context length in tokens, `max_position_embeddings`; None where it is unknown.

        None also under dynamic RoPE, whose base grows with longer texts.
        """
        if isinstance(self.config.model.llm.rope_scaling, DynamicRope):
            return None
        folder = self.path if self.run is None else self.config.model.llm.weights
        if not folder or not (Path(folder) / "config.json").is_file():
            return None
        config = read_json(Path(folder) / "config.json")
        limit = _text_config(config).get(
            "max_position_embeddings", config.get("max_position_embeddings")
        )
        return limit if isinstance(limit, int) else None

    def programs(self) -> Path:
        """Return the folder of compiled programs."""
        if self.run is not None:
            return self.run.programs
        return user_cache() / "programs"

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Load the functions that the encoders' callbacks name."""
        return resolve_callbacks(self.config.model, self.path)

    def load(self, mesh: Mesh, rules: ShardingRules) -> tuple[Model, Params]:
        """Build the model and load its weights on a mesh."""
        # Weights that are only ever computed in the activations' dtype are stored in it.
        dtype = jnp.dtype(self.config.training.precision)
        if self.run is None:
            # All modules frozen: so their weights are stored in the activations' dtype.
            model = Model.build(frozen(self.config.model, module_names(self.config.model)), dtype)
            return model, load_pretrained(model, parameter_shardings(model, mesh, rules))
        model = Model.build(self.config.model, dtype, functions=self.functions())
        shardings = parameter_shardings(model, mesh, rules)
        step = checkpoint_step(self.run.checkpoints, self.step)
        params = restore_parameters(
            self.run.checkpoints, step, model, shardings, self.config.training.evaluated
        )
        return model, params | {"llm": _cast(params["llm"], dtype)}


def _is_run(path: Path) -> bool:
    """Return whether the folder is a run's, not a checkpoint's. Raises UserError where it is neither."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give a run's, or that of a Hugging Face checkpoint")
    if (path / "parts.json").exists():
        raise UserError(
            f"{path} is a model of several folders' parts as mmjax.export writes it, which is no whole checkpoint; "
            "give the run's own folder"
        )
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} holds adapters without their model; give the run's own folder, or one that mmjax.export writes "
            "without --adapter"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds neither a run nor a Hugging Face checkpoint: it has no config.json"
        )
    config = read_json(path / "config.json")
    if "model_type" in config:
        return False
    if {"model", "training"} <= set(config):
        return True
    raise UserError(
        f"{path / 'config.json'} is neither a run's nor a Hugging Face checkpoint's: it has no model_type"
    )


def _config_of(path: Path) -> Config:
    """Make a config for a checkpoint, as a run has one: its model, precision and chat format."""
    model = from_hf(path)
    config = read_json(path / "config.json")
    # transformers 4 writes `torch_dtype`, 5 writes `dtype`; either may stand inside the LLM's part.
    keys = ("dtype", "torch_dtype")
    stored = str(
        next((c[key] for c in (config, _text_config(config)) for key in keys if c.get(key)), "")
    )
    precision = "bfloat16" if stored.endswith("16") else "float32"
    return Config(
        name="checkpoint",
        data=DataConfig(chat=ChatFormat(str(path))),
        batch=BatchConfig(rows=dict.fromkeys(("llm", *model.encoders), 1)),
        model=model,
        training=TrainingConfig(steps=1000, precision=precision),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the LLM's part of a config.json; the whole of it for a checkpoint without other modules."""
    return next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), config)


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    """Cast the matrices of nested dicts, on their devices."""
    flat, structure = jax.tree.flatten_with_path(params)
    return jax.tree.unflatten(
        structure, [x.astype(dtype) if path[-1].key in _CAST else x for path, x in flat]
    )
