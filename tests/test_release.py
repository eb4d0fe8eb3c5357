"""What is released: the wheel in fresh environments, the lock file, the container file, the version."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from started import ROOT

from mmjax import __version__, cli

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_JAX = next(
    line for line in PROJECT["dependencies"] if line.startswith("jax>=")
).removeprefix("jax>=")

SHORT = "training.steps=30 schedule.warmup=5 training.evaluate_every=15"
README = {  # its commands, and what makes them short or names what the README leaves to the reader
    "python -m mmjax.train": f"python -m mmjax.train {SHORT}",
    "python -m mmjax.train --show": "python -m mmjax.train --show",
    "python -m mmjax.train tiny_vlm training.steps=300": f"python -m mmjax.train tiny_vlm {SHORT}",
    "python -m mmjax.evaluate runs/tiny_omni --json": "python -m mmjax.evaluate runs/tiny_omni --json",
    'python -m mmjax.generate FOLDER --image x.jpg "What is this?"': (
        "python -m mmjax.generate runs/tiny_omni --image x.png 'read a?' --max-tokens=4"
    ),
    "python -m mmjax.report runs/tiny_omni": "python -m mmjax.report runs/tiny_omni",
    "python -m mmjax.inspect runs/tiny_omni --step 120": "python -m mmjax.inspect runs/tiny_omni --step 20",
    "python -m mmjax.train --resume runs/tiny_omni": (
        "python -m mmjax.train --resume runs/tiny_omni training.steps=32"
    ),
    "python -m mmjax.supervise -- python -m mmjax.train --resume=auto": (
        f"python -m mmjax.supervise -- python -m mmjax.train --resume=auto my.py {SHORT}"
    ),
    "python -m mmjax.verify my.py": "python -m mmjax.verify my.py --backend dense",
    "python -m mmjax.plan omni_84b cluster=h100x320x8": "python -m mmjax.plan omni_84b cluster=h100x320x8",
    "python -m mmjax.bench fill": "python -m mmjax.bench fill",
}
MY_CONFIG = """
from dataclasses import replace
from mmjax.config.loading import sibling

base = sibling(__file__, "tiny_text")

def config():
    return replace(base.config(), name="mine")
"""
CONFIGS = """
from mmjax.config.loading import load, shipped_configs
from mmjax.errors import UserError
for name in shipped_configs():
    try:
        load(name)
    except UserError as error:
        assert "say it after the config's name" in str(error), error
    print(name)
"""


def test_the_version_is_one_number_which_the_program_and_the_changelog_say(capsys):
    ended = run(capsys, cli.main, "--version")
    assert ended.code == 0
    assert re.fullmatch(
        rf"mmjax {re.escape(__version__)} \(JAX \d[\d.]+, Python \d[\d.]+\)\n", ended.out
    )
    assert PROJECT["dynamic"] == ["version"]
    versions = re.findall(r"^## (\d\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == __version__
    for name in ("Dockerfile", "launch/jobset.yaml", "launch/slurm.sbatch"):
        assert set(re.findall(r"mmjax:(\d[\d.]*)", (ROOT / name).read_text())) == {__version__}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_holds_a_version_of_all_that_the_project_asks_for(python: str) -> None:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
    }
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}
    pins = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(environment):
                pins[canonicalize_name(pin.name)] = next(iter(pin.specifier)).version
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cuda13"]]
    for requirement in map(Requirement, wanted):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"]


def python_of(version: str) -> str:
    """An interpreter of that version on the PATH or kept by pyenv; skips the test where there is none."""
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    places = [shutil.which(f"python{version}"), *kept.glob(f"{version}.*/bin/python{version}")]
    for path in filter(None, places):
        if (
            subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode
            == 0
        ):
            return str(path)
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True
    )
    (path,) = folder.glob("mmjax-*.whl")
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("jax", [OLDEST_JAX, "newest"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_commands_of_the_readme_run_from_the_wheel(
    wheel: Path, tmp_path: Path, version: str, jax: str
) -> None:
    """In an environment with nothing else in it, from an empty folder."""
    programs = tmp_path / "venv" / "bin"
    subprocess.run([python_of(version), "-m", "venv", programs.parent], check=True)
    pins = [] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
    subprocess.run(
        [programs / "pip", "install", "-q", wheel, *pins],
        check=True,
        env=os.environ | {"PIP_COMPILE": "0"},
    )
    work = tmp_path / "work"
    work.mkdir()
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "JAX_", "XLA_"))
    }
    variables |= {"PATH": f"{programs}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}

    def told(*words: str) -> str:
        ended = subprocess.run(words, cwd=work, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, (words, ended.stdout[-2000:], ended.stderr[-4000:])
        return ended.stdout

    print(told("mmjax", "--version"), end="")
    assert told("python", "-c", CONFIGS).split() == sorted(
        path.stem for path in (ROOT / "configs").glob("*.py")
    )
    (work / "my.py").write_text(MY_CONFIG)
    told("python", "-c", "import PIL.Image; PIL.Image.new('L', (24, 16), 255).save('x.png')")
    text = (ROOT / "README.md").read_text()
    for written, short in README.items():
        assert written in text
        told(*shlex.split(short))
    assert (work / "runs/tiny_omni/checkpoints/32").is_dir()
