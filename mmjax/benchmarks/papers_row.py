"""A figure of a paper beside what is predicted for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SAME_LAYERS = 1.5  # by which factor two totals of the same layers may differ
NEAR = 0.05  # up to this distance a reported ratio says that both sides are about equal


@dataclass(frozen=True)
class Row:
    """A figure of a paper, what is predicted for it, and what our own partition gains."""

    source: str
    case: str
    reported: float | None = None
    predicted: float | None = None
    neutral: float | None = 1.0  # where neither of two sides is better; None where there are no two
    # speed-up of our partition over others, by name
    ours: Mapping[str, float] = field(default_factory=dict)
    contradiction: str = ""  # why the figure cannot follow from what the paper says elsewhere
    same_layers: float = 1.0  # by which factor two totals of the same layers differ in the paper
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.reported is None else abs(self.predicted / self.reported - 1)

    @property
    def direction(self) -> bool | None:
        """True where the better side is predicted; None where the paper reports none."""
        if (
            self.reported is None
            or self.neutral is None
            or abs(self.reported - self.neutral) <= NEAR
        ):
            return None
        return (self.predicted > self.neutral) == (self.reported > self.neutral)

    def conflict(self, same_layers: float = SAME_LAYERS) -> str:
        """Say what contradicts the figure, if anything does. same_layers: the most by which their totals may differ."""
        layers = f"the same layers take {self.same_layers:.2f} times as long"
        return self.contradiction or (layers if self.same_layers > same_layers else "")

    def counts(self, same_layers: float = SAME_LAYERS) -> bool:
        """Return whether there is a figure, and nothing that contradicts it."""
        return self.reported is not None and not self.conflict(same_layers)


def read_table(text: str) -> list[list[str]]:
    """Split a table into its rows of words."""
    return [line.split() for line in text.strip().splitlines()]
