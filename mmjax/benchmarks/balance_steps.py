"""The model, the samples and the planned steps of `balance-run`: four ways to balance the same steps.

Lengths of real samples are divided by `--scale`, and images, clips and tokens of these lengths are made from a sample's
number: what a step costs depends on lengths alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmjax.balance.waits import Waits, mean_waits
from mmjax.config import (
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    LlmBalance,
    LogMel,
    ModelConfig,
    NoBalance,
    NoGrouping,
    PostBalance,
    Samples,
    TrainingConfig,
    VisionConfig,
)
from mmjax.data.media.patches import positions_per_token
from mmjax.data.plan.grouping import Budget, StepGrouper, make_budget, prices_of
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import Balance, MicrobatchPlan, Topology, waits_of
from mmjax.data.plan.step_plan import RankLayout, StepPlan, StepPlanner, lay_out, make_placer
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.planning.flops import executed, frozen_modules

MODES: dict[str, Balance] = {
    "none": NoBalance(),
    "llm": LlmBalance(),
    "off": PostBalance(locality="off"),  # every phase by itself: OrchMLLM
    "post": PostBalance(),
}
PHASES = ("llm", "vision", "audio")
VOCAB = 256
RANKS_PER_NODE = 8

# The lengths of a step are divided, and so are its operations, but not what an update, the sum of gradients and reading
# the weights cost. So that these do not hide the phases, only connectors are trained, as in the first stage of LLaVA,
# and layers are narrow. The LLM and the vision encoder have as many operations each, whatever that gains.
_TOWER = {"width": 256, "heads": 16, "mlp_width": 1024, "frozen": True}
_CONNECTOR = ConnectorConfig(mlp_width=128)
MODEL = ModelConfig(
    DecoderConfig(**_TOWER, layers=80, kv_heads=16, head_width=16, vocab=VOCAB),
    {
        "vision": VisionConfig(**_TOWER, layers=96, patch=4, channels=1, connector=_CONNECTOR),
        "audio": AudioConfig(
            **_TOWER,
            layers=48,
            clips=LogMel(mels=16, sample_rate=4000, window=64, hop=32),
            connector=_CONNECTOR,
        ),
    },
)


# ---------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class LengthSource:
    """Samples of given lengths: at most an image and a clip, then text. int64 `[n]`: text tokens, patches, frames."""

    text: np.ndarray
    vision: np.ndarray
    audio: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    def fingerprint(self) -> str:
        """Return no fingerprint: nothing keeps an index of these."""
        return ""

    def facts(self, index: int) -> SampleLengths:
        """Make an image a strip of two rows of patches, so that it has as many as the length, or one more."""
        items: list[tuple[str, tuple[int, ...]]] = []
        clips = MODEL.encoders["audio"].clips
        if patches := int(self.vision[index]):
            side = MODEL.encoders["vision"].patch
            items.append(("vision", (2 * side, -(-patches // 2) * side)))  # 7 patches: 2 rows of 4
        if frames := int(self.audio[index]):
            items.append(("audio", (clips.window + (frames - 1) * clips.hop,)))
        return SampleLengths(int(self.text[index]), tuple(items))

    def sample(self, index: int) -> Sample:
        """Put items first, then text; every text token but a sample's very first is learned."""
        count = int(self.text[index])
        encoders = [encoder for encoder, _ in self.facts(index).items]
        tokens = np.random.default_rng((index, 0)).integers(VOCAB, size=count, dtype=np.int32)
        weights = np.ones(count, np.float32)
        weights[0] = len(encoders) > 0
        return Sample((*(Item(encoder, k) for k, encoder in enumerate(encoders)), Text(tokens, weights)))

    def item(self, index: int, number: int) -> np.ndarray:
        """Draw noise of the item's size."""
        encoder, size = self.facts(index).items[number]
        rng = np.random.default_rng((index, 1 + number))
        if encoder == "vision":
            return rng.integers(256, size=(*size, 1), dtype=np.uint8)
        return rng.uniform(-1, 1, size).astype(np.float32)


def scaled(corpus: Mapping[str, np.ndarray], scale: int) -> LengthSource:
    """Divide all lengths by `scale`, to at least 1 where there is anything; LLM tokens hold the items."""

    def divided(length: np.ndarray) -> np.ndarray:
        return np.where(length > 0, np.maximum(length // scale, 1), 0)

    vision, audio, llm = (divided(corpus[key]) for key in ("vision", "audio", "llm_tokens"))
    items = sum(
        -(-length // positions_per_token(MODEL.encoders[name]))
        for name, length in (("vision", vision), ("audio", audio))
    )
    return LengthSource(np.maximum(llm - items, 1), vision, audio)


def open_lengths(file: str, split: str) -> LengthSource:
    """Open the samples that were written to an `.npz` file; for `FunctionSource`."""
    del split
    with np.load(file) as lengths:
        return LengthSource(**{key: lengths[key] for key in lengths.files})


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Trial:
    """The same steps of samples balanced in several ways, all in one ladder of shapes but "off", which sends widely."""

    configs: dict[str, Config]  # by mode
    planners: dict[str, StepPlanner]
    budget: Budget
    layouts: dict[str, RankLayout]

    def plans(self, mode: str, steps: int) -> list[StepPlan]:
        """Plan the first steps."""
        return [self.planners[mode].plan(step) for step in range(steps)]

    def waits(self, plans: Sequence[StepPlan]) -> Waits:
        """Compute how long ranks wait in these steps, and what of their time is for padding; mean over steps."""
        planner = self.planners["none"]
        prices = prices_of(self.configs["none"], self.budget)
        return mean_waits([waits_of(plan.microbatches, prices, planner.grouper.index) for plan in plans])


def make_trial(index: LengthIndex, lengths: Path, ranks: int, per_rank: int, seed: int) -> Trial:
    """Plan steps of `per_rank` samples a rank, one row per rank and module. lengths: the file of `open_lengths`."""
    config = Config(
        name="balance-run",
        data=DataConfig({"lengths": FunctionSource(f"{__name__}:open_lengths", {"file": str(lengths)})}, workers=0),
        batch=BatchConfig(
            Samples(ranks * per_rank),
            dict.fromkeys(PHASES, ranks),
            grouping=NoGrouping(),
            alignment=1,  # of lengths that are divided: a real one of 64
        ),
        model=MODEL,
        training=TrainingConfig(steps=1000),
        seed=seed,
    )
    configs = {m: replace(config, batch=replace(config.batch, balance=balance)) for m, balance in MODES.items()}
    budget = make_budget(index, config, [1.0])
    grouper = StepGrouper(index, config.batch, [1.0], seed, budget)
    per_node = next(n for n in range(min(ranks, RANKS_PER_NODE), 0, -1) if ranks % n == 0)
    topology = Topology(ranks, per_node, per_node)
    common_layout = lay_out(grouper, config, topology, tuple(MODES[m] for m in MODES if m != "off"))
    layouts = dict.fromkeys(MODES, common_layout) | {"off": lay_out(grouper, configs["off"], topology)}
    planners = {m: StepPlanner(grouper, make_placer(grouper, c, layouts[m])) for m, c in configs.items()}
    return Trial(configs, planners, budget, layouts)


def work_per_rank(plan: StepPlan) -> np.ndarray:
    """Count positions of each module on each rank, int64 `[modules, ranks]`: no padding of rows."""
    first = plan.microbatches[0]
    work = np.zeros((len(first.rows), first.topology.ranks), np.int64)
    for m in plan.microbatches:
        np.add.at(work, (m.module, m.rank()), m.length)
    return work


def executed_flops(plan: StepPlan) -> float:
    """Count what a rank computes in a step, forward and backward, by the shapes that it runs in."""
    return float(sum(_executed(m) for m in plan.microbatches))


def _executed(plan: MicrobatchPlan) -> int:
    shape = {name: (plan.rows[k], plan.shape.lengths[k]) for k, name in enumerate(PHASES)}
    return sum(f.total for f in executed(MODEL, shape, frozen_modules(MODEL)).values())


def predicted_gain(trial: Trial, steps: int) -> float:
    """Predict how many times as long `none` takes as `post`, median over steps, by executed operations."""
    none, post = (np.array([executed_flops(p) for p in trial.plans(mode, steps)]) for mode in ("none", "post"))
    return float(np.median(none / post))
