"""Eight CPU devices for every test, and the shapes written in the models' annotations checked at every call."""

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where it is set, every process that a test starts would compile all modules anew: 6 of its 9 s of
# start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers are as many as cores; PyTorch's threads beyond one would wait for each other in busy
# loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import jax
import pytest
from compilation import compile_quickly, optimized
from cpu_times import CpuTimes
from shape_checks import check_shapes
from smoke import allow_no_program_and_no_process, assign_smoke, must_be_light, smoke
from started import kill_started
from tiers import MARKERS, assign_tiers, long_files_first

# The same examples every time, and none is refused because a busy machine was slow to make it.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")
gc.disable()  # while everything is imported
compile_quickly()
jax.config.update("jax_num_cpu_devices", 8)
check_shapes("mmjax.models")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", type=Path, metavar="FOLDER", help="write every test's CPU time there"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if folder := config.getoption("cpu_times"):
        config.pluginmanager.register(CpuTimes(folder.absolute()))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker more than cores for the long tests, which wait for processes, kills and timeouts."""
    return None if "not exhaustive" in config.getoption("markexpr") else (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    assign_tiers(items)
    assign_smoke(items)
    long_files_first(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for the smoke tier that has no test of it."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (
        is_test
        and config.getoption("markexpr") == "smoke"
        and not smoke().has_file(collection_path)
    ) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with allow_no_program_and_no_process() if must_be_light(item) else contextlib.nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave a million objects of imported libraries and collected tests out of every later collection of garbage.

    Looking through them took a twelfth of the time of tests that trace and compile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """A program of the CPU takes a thousand of the 65,530 memory maps that Linux gives a process."""
    imported = len(sys.modules)
    yield
    jax.clear_caches()
    gc.collect()
    if len(sys.modules) > imported + 100:
        # these tests have imported PyTorch or the like, which all later collections would look
        # through
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A test that fails leaves no training beside those that follow, and no data worker that pytest would wait for."""
    yield
    kill_started()
    for worker in multiprocessing.active_children():
        worker.kill()


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, session_runs: Path
) -> Iterator[None]:
    """What a user's own runs have measured changes nothing that a test sees. All workers sign runs as one user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(session_runs.parent / "settings"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def session_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what several modules look at, and of compiled programs: one for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs"
    (folder / ".programs").mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, session_runs: Path) -> Path:
    """The folder of a module's runs, which share compiled programs with all others."""
    folder = session_runs / request.module.__name__
    folder.mkdir()
    (folder / ".programs").symlink_to(session_runs / ".programs")
    return folder


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """Of the run of one test."""
    return runs / tmp_path.name


@pytest.fixture
def optimized_programs() -> Iterator[None]:
    """For a test of many steps."""
    with optimized():
        yield
