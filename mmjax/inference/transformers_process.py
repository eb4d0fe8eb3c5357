"""Ask transformers what a prompt gives, in a process of its own: mmjax imports neither it nor torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.data.sample import Medium
from mmjax.errors import UserError

ANSWER = "answer.npz"  # beside the request


@dataclass(frozen=True)
class Request:
    """A prompt for a checkpoint: a question with media before it, or tokens alone."""

    folder: str
    class_name: str  # that loads the folder
    dtype: str
    max_tokens: int  # of the answer
    question: str
    media: Mapping[Medium, str]  # files
    tokens: Sequence[int] = ()  # instead of the question
    ends: Sequence[int] = ()  # tokens that end an answer


class Computed(NamedTuple):
    """The result for a prompt of `n` tokens."""

    ids: np.ndarray  # int [n], -1 where they are not known
    logits: np.ndarray  # float32 [n, vocab]
    answer: Sequence[int]
    version: str


def ask_transformers(request: Request) -> Computed:
    """Compute a prompt with transformers. Raises UserError where it is not installed, or fails."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "request.json"
        path.write_text(json.dumps(asdict(request)))
        ended = subprocess.run(
            [sys.executable, "-m", "mmjax.inference.transformers_answer", str(path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
            if "ModuleNotFoundError" in reason:
                reason += "; pip install 'mmjax[peer]'"
            raise UserError(f"transformers: {reason.removeprefix('error: ')}")
        with np.load(path.with_name(ANSWER)) as stored:
            return Computed(
                stored["ids"], stored["logits"], stored["answer"].tolist(), str(stored["version"])
            )
