import os
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, TINY_MEDIA, files

from mmjax.config import Config
from mmjax.config.loading import load, to_json
from mmjax.errors import UserError
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder, claim, run_folder_of


def config_in(folder: Path, *lines: str) -> Config:
    return load(TINY, [f"run={folder}", *lines])


def start(config: Config, mode="new", source=TINY, permitted=NO_CHANGES) -> bool:
    """Claim the folder for a start that works; whether a run goes on."""
    with claim(config, Path(source), mode, permitted) as resumed:
        (run_folder_of(config).path / "written.txt").write_text("by the start")
    return resumed


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    start(config_in(folder))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "weights").write_bytes(b"days of work")
    return folder


def test_a_new_folder_holds_the_resolved_config_and_the_file_it_came_from(tmp_path):
    folder = tmp_path / "runs" / "one"
    assert not start(config_in(folder, "seed=5"))
    assert RunFolder(folder).read_config() == config_in(folder, "seed=5")
    assert (folder / "config.py").read_text() == Path(TINY).read_text()


def test_a_config_is_kept_with_the_files_that_it_derives_from(tmp_path):
    start(replace(load(TINY_MEDIA), run=str(tmp_path / "run")), source=TINY_MEDIA)
    assert {"config.py", "tiny.py"} <= set(files(tmp_path / "run"))


def test_without_a_folder_a_run_goes_under_runs_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start(load(TINY))
    assert (tmp_path / "runs" / "tiny" / "config.json").is_file()


def test_an_existing_run_needs_a_word_and_stays_as_it_is(run):
    before = files(run)
    with pytest.raises(
        UserError,
        match=r"already holds a run; continue it with --resume, replace it with --overwrite",
    ):
        start(config_in(run))
    assert files(run) == before


def test_resume_needs_a_run_and_auto_does_not(tmp_path):
    config = config_in(tmp_path / "run")
    with pytest.raises(UserError, match="holds no run to resume"):
        start(config, "resume")
    assert not start(config, "auto")
    assert start(config, "auto")
    assert start(config, "resume")


def test_a_folder_that_is_no_run_is_never_taken(tmp_path):
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    for mode in ("new", "auto", "overwrite"):
        with pytest.raises(UserError, match="is not empty and not a run"):
            start(config_in(tmp_path), mode)
    assert files(tmp_path) == {"thesis.tex": b"irreplaceable"}


def test_overwriting_replaces_the_run_and_leaves_nothing_of_it(run):
    start(config_in(run, "seed=1"), "overwrite")
    assert set(files(run)) == {"config.json", "config.py", "id", "signatures", "written.txt"}
    assert RunFolder(run).read_config().seed == 1
    assert [p.name for p in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("mode", ["overwrite", "resume", "auto"])
@pytest.mark.parametrize(
    "fault", [UserError("no sample fits"), KeyboardInterrupt(), RuntimeError("out of memory")]
)
def test_a_start_that_fails_leaves_the_run_to_the_byte(run, mode, fault):
    before = files(run)
    with pytest.raises(type(fault)), claim(config_in(run, "training.steps=9"), Path(TINY), mode):
        raise fault
    assert files(run) == before
    assert [p.name for p in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("existed", [False, True])
def test_a_first_start_that_fails_leaves_no_run(tmp_path, existed):
    folder = tmp_path / "run"
    if existed:
        folder.mkdir()
    with pytest.raises(FileExistsError), claim(config_in(folder), Path(TINY), "new"):
        RunFolder(folder).config.mkdir()
    assert folder.exists() == existed
    assert not start(config_in(folder))


def test_an_overwriting_start_that_was_killed_can_be_said_again(run):
    kept = files(run)
    os.rename(run, run.with_name(".run.replaced"))  # where a kill leaves them
    run.mkdir()
    (run / "config.json").write_text(to_json(config_in(run)))
    with pytest.raises(UserError), claim(config_in(run), Path(TINY), "overwrite"):
        raise UserError("no sample fits")
    assert files(run) == kept
    start(config_in(run), "overwrite")
    assert [p.name for p in run.parent.iterdir()] == ["run"]


def test_a_run_reached_through_a_link_is_overwritten_where_it_is(run, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(run)
    start(config_in(link, "seed=1"), "overwrite")
    assert link.is_symlink()
    assert RunFolder(run).read_config().seed == 1


def test_resuming_may_change_how_long_and_how_fast_which_is_said_and_nothing_else(run, capsys):
    lines = (
        "training.steps=9",
        "mesh.data=4",
        "mesh.fsdp=2",
        "data.workers=2",
        "training.keep_every=4",
    )
    assert start(
        config_in(run, *lines, "model.llm.remat=full", "training.loss_chunks=43"), "resume"
    )
    assert RunFolder(run).read_config().training.steps == 9
    assert "changed training.steps: 6 -> 9\n" in capsys.readouterr().out
    before = files(run)
    for line, told in {
        "seed=3": "seed: 0 -> 3",
        "model.llm.layers=3": "model.llm.layers: 2 -> 3",
        "batch.size.count=9": "batch.size.count: 8 -> 9",
        "data.sources.few.weight=2": "data.sources.few.weight: 1.0 -> 2.0",
        "training.precision=bfloat16": "training.precision: float32 -> bfloat16",
        "optimizer.learning_rate=1e-4": "optimizer.learning_rate: 0.001 -> 0.0001",
        "schedule.final=0.5": "schedule.final: 0.02 -> 0.5",
    }.items():
        with pytest.raises(UserError, match="is a run of another config") as error:
            start(config_in(run, line), "resume")
        assert told in str(error.value)
        assert "init_from=" in str(error.value)
        word = (
            "--new-data"
            if line.startswith("data.sources")
            else f"--change {line.partition('=')[0]}"
        )
        assert f"that they shall change: {word};" in str(error.value)
    assert files(run) == before


def test_what_is_named_may_change_and_is_said(run, capsys):
    config = config_in(run, "seed=3", "batch.size.count=9", "data.sources.few.weight=2")
    assert start(config, "resume", permitted=AllowedChanges(True, ("seed", "batch")))
    out = capsys.readouterr().out
    for line in ("seed: 0 -> 3", "batch.size.count: 8 -> 9", "data.sources.few.weight: 1.0 -> 2.0"):
        assert f"changed {line}\n" in out
    # the same line again, after a restart
    assert start(config, "resume", permitted=AllowedChanges(True, ("seed",)))
    with pytest.raises(UserError, match=r"that they shall change: --new-data --change seed;"):
        start(config_in(run, "batch.size.count=9"), "resume")
    with pytest.raises(UserError, match=r"--change batc: a config has no such key: did you mean"):
        start(config, "resume", permitted=AllowedChanges(keys=("batc",)))


def test_a_run_whose_config_is_torn_says_where(run):
    whole = (run / "config.json").read_text()
    for torn in (whole[: len(whole) // 2], "[]", whole.replace('"seed"', '"sed"')):
        (run / "config.json").write_text(torn)
        with pytest.raises(UserError, match=r"config\.json: ") as error:
            RunFolder(run).read_config()
        assert "checkpoints" in str(error.value)


def test_its_own_folder_is_nothing_to_start_from(run):
    before = files(run)
    with pytest.raises(UserError, match="is this run's own folder"):
        start(config_in(run, f"init_from={run}"), "overwrite")
    assert files(run) == before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/mmjax/run")):
        with pytest.raises(
            UserError,
            match=f"cannot write the run folder {place}: .*; choose another with run=FOLDER",
        ):
            start(config_in(place))
    assert files(tmp_path) == {"file": b"not a folder"}
