"""Whatever is spoiled in an input, there is one line or a list of bad samples: no hang, no traceback, no silence."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from commands import TINY
from started import Ended, finish, start

sys.path.append(str(Path(__file__).parent / "data"))
from mutated import tried
from mutations import (
    SHARES,
    Mutation,
    mutation,
    spoiled_bytes,
    spoiled_record,
    spoiled_source,
    table,
)
from spoilable import CONFIG_TEXT, RECORDS, is_image, lines, save_chat, save_media

# of sums of samples that are not finite
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def faults(mutations: Iterable[Mutation]) -> list[str]:
    outcomes = list(tried(mutations))
    print(
        table({kind: [outcome for one, outcome in outcomes if one.kind == kind] for kind in SHARES})
    )
    return [
        f"{one.number} ({one.kind}, {o.way}): {o.told}"
        for one, o in outcomes
        if o.verdict == "fault"
    ]


def test_a_mutation_is_a_pure_function_of_its_number_and_every_kind_comes_in_its_share() -> None:
    kinds = Counter(mutation(number).kind for number in range(1000))
    assert kinds == {kind: 10 * share for kind, share in SHARES.items()}
    for number in (0, 7, 999):
        one, again = mutation(number), mutation(number)
        assert one == again
        data, record = bytes(range(200)), RECORDS["sharegpt"][0]
        assert spoiled_bytes(data, one.random()) == spoiled_bytes(data, again.random())
        assert spoiled_record(record, one.random()) == spoiled_record(record, again.random())
        assert spoiled_source(CONFIG_TEXT, one.random()) == spoiled_source(
            CONFIG_TEXT, again.random()
        )
    different = {spoiled_bytes(bytes(200), mutation(number).random()) for number in range(40)}
    assert len(different) > 20


def test_a_hundred_spoiled_inputs_are_refused_in_a_line_or_their_samples_listed() -> None:
    """Of every kind its share."""
    assert faults(mutation(number) for number in range(100)) == []


@pytest.mark.exhaustive
def test_a_thousand_spoiled_inputs_are_refused_in_a_line_or_their_samples_listed() -> None:
    assert faults(mutation(number) for number in range(1000)) == []


# --------------------------------------------------------------------------------------------------
# commands


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder with a data set of images and the config of a run on it."""
    folder = tmp_path_factory.mktemp("photos")
    save_chat(folder / "chat")
    names = [name for name in save_media(folder / "media") if is_image(name)]
    records = [{"image": name, "question": "What?", "answer": "A cat."} for name in names]
    (folder / "data.jsonl").write_bytes(lines(records))
    text = f'''
from dataclasses import replace
from mmjax.config import ChatFormat, DataConfig, Placeholder, QuestionsSource
from mmjax.config.loading import sibling

tiny = sibling({TINY!r}, "tiny_media")

def config():
    base = tiny.config()
    chat = ChatFormat("{folder}/chat", placeholders={{"image": Placeholder("<image>")}})
    source = QuestionsSource("{folder}/data.jsonl", images="{folder}/media")
    seeing = replace(base.model.encoders["vision"], channels=3)
    return replace(
        base, name="photos",
        data=DataConfig({{"photos": source}}, "{folder}/cache", chat=chat, workers=0, max_bad_share=0.9),
        batch=replace(base.batch, rows={{"llm": 2, "vision": 1}}, shapes=1),
        model=replace(base.model, llm=replace(base.model.llm, vocab=300), encoders={{"vision": seeing}}),
        training=replace(base.training, steps=2, checkpoint_every=1, evaluate_every=0),
    )
'''
    (folder / "photos.py").write_text(text)
    return folder


def ended_well(ended: Ended) -> None:
    """With 0, or with 2 and one line."""
    assert ended.code in (0, 2), ended
    assert "Traceback" not in ended.err + ended.out, ended
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (ended.code == 2), ended


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(4))
def test_the_index_command_ends_well_on_spoiled_files(
    number: int, photos: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng((1, number))
    folder = Path(shutil.copytree(photos, tmp_path / "copy"))
    for image in sorted((folder / "media").iterdir())[::2]:
        image.write_bytes(spoiled_bytes(image.read_bytes(), rng)[1])
    (folder / "media" / "0.jpg").write_bytes(b"")
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    spoiled = [
        spoiled_record(record, rng)[1] if k % 3 == 1 else json.dumps(record).encode()
        for k, record in enumerate(records)
    ]
    (folder / "data.jsonl").write_bytes(b"\n".join(spoiled))
    words = [
        f"data.sources.photos.path={folder}/data.jsonl",
        f"data.sources.photos.images={folder}/media",
    ]
    ended = finish(start("mmjax.index", photos / "photos.py", *words, f"--out={tmp_path}/out"))
    ended_well(ended)
    assert ended.code == 0
    bad = [
        json.loads(line)["sample"]
        for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()
    ]
    assert "photos[0]" in bad
    assert set(bad) <= {f"photos[{k}]" for k in range(len(records))}


@pytest.fixture(scope="module")
def trained(photos: Path) -> Path:
    """A finished run on the photos, one of which is cut."""
    torn = photos / "media" / "1.png"
    torn.write_bytes(torn.read_bytes()[:-200])
    ended = finish(start("mmjax.train", photos / "photos.py", f"run={photos}/run"))
    ended_well(ended)
    assert ended.code == 0, ended
    return photos / "run"


@pytest.mark.exhaustive
def test_training_names_the_photo_that_was_cut(trained: Path) -> None:
    named = [
        json.loads(line)["sample"]
        for line in (trained / "quarantine.jsonl").read_text().splitlines()
    ]
    assert named == ["photos[1]"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["index", "fit.json", "config.json", "metrics.jsonl"])
def test_resuming_ends_well_with_a_spoiled_file_of_the_run(name: str, trained: Path) -> None:
    run = Path(shutil.copytree(trained, trained.with_name(f"run_{name}")))
    path = next((run / "index").glob("*/item_positions.npy")) if name == "index" else run / name
    spoiled = bytearray(path.read_bytes())
    spoiled[-20] ^= 1
    path.write_bytes(spoiled)
    ended = finish(
        start(
            "mmjax.train",
            trained.parent / "photos.py",
            f"run={run}",
            "--resume",
            "training.steps=3",
        )
    )
    ended_well(ended)
    if name == "index":
        assert ended.code == 0
        assert "item_positions.npy is not what was written; it is made again" in ended.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(2))
def test_scoring_ends_well_with_a_spoiled_checkpoint(number: int, trained: Path) -> None:
    run = Path(shutil.copytree(trained, trained.with_name(f"scored_{number}")))
    for path in sorted((run / "checkpoints" / "2" / "state").rglob("d/*"))[number::2]:
        path.write_bytes(path.read_bytes()[:64])
    ended_well(
        finish(
            start(
                "mmjax.evaluate",
                run,
                f"--data={trained.parent}/data.jsonl",
                f"--images={trained.parent}/media",
                "--limit=2",
            )
        )
    )
