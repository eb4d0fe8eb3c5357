"""What one benchmark measured: its figures, the result that they follow from, and what a paper says of the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """figures: what `--json` prints. arrays: what `--out` writes. paper: by figure, the published one beside it."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)
