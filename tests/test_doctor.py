"""Faults of a machine that are planted, named, and mended by the commands that doctor says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from started import ROOT

from mmjax import doctor

OLD_DRIVER = "NVIDIA H100 80GB HBM3, 535.104.05"
NVIDIA_SMI = f"""#!/usr/bin/env bash
case "$*" in
*clocks_event_reasons*) echo "Not Active, Active, Active" ;;
*) echo "{OLD_DRIVER}" ;;
esac
"""
SMALL_SHM = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


def diagnose(
    before: str, variables: dict[str, str], *prefix: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code and findings of a doctor that a shell starts behind the commands `before`, by name."""
    script = f"{before}\nexec {shlex.quote(sys.executable)} -m mmjax.doctor --json"
    found = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    ended = subprocess.run(
        [*prefix, "bash", "-c", script], env=found, capture_output=True, text=True
    )
    assert ended.stderr == ""
    findings: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(ended.stdout):
        findings.setdefault(finding["name"], []).append(finding)
    return ended.returncode, findings


@pytest.fixture(scope="module")
def small_shm() -> tuple[list[str], str]:
    """How to run a shell with 64 MB of shared memory, where this machine lets us."""
    allowed = subprocess.run([*SMALL_SHM, "bash", "-c", MOUNT], capture_output=True).returncode == 0
    return (SMALL_SHM, MOUNT) if allowed else ([], "true")


def test_each_planted_fault_is_named_with_a_command_that_mends_it(
    tmp_path: Path, small_shm: tuple[list[str], str]
) -> None:
    prefix, mount = small_shm
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NCCL_SOCKET_IFNAME": "nosuch0",
        "XDG_CACHE_HOME": "/proc/nowhere",
    }
    code, found = diagnose(f"{mount}\nulimit -n 1000", variables, *prefix)
    assert code == 1
    wanted = {
        "driver": ("535.104.05 is too old for CUDA 13", "nvidia-driver-580-open"),
        "clocks": ("GPU clocks are locked below their maximum", "sudo nvidia-smi -rgc -rac"),
        "nccl": ("NCCL_SOCKET_IFNAME=nosuch0 names no interface", "unset NCCL_SOCKET_IFNAME"),
        "cache": ("/proc/nowhere/mmjax cannot be written", "export XDG_CACHE_HOME="),
        "limits": ("1000 open files, fewer than 4096", "nofile"),
    }
    if prefix:
        wanted["/dev/shm"] = ("64 MiB in all; data workers", "")
    for name, (text, remedy) in wanted.items():
        assert found[name][0]["state"] == "broken", found
        assert text in found[name][0]["text"]
        assert remedy in found[name][0]["remedy"]
    for finding in (finding for findings in found.values() for finding in findings):
        assert bool(finding["remedy"]) == (finding["state"] != "ok")
        assert subprocess.run(["bash", "-n", "-c", finding["remedy"]]).returncode == 0

    # Mended: by those commands, and, as after a new log-in, without the low limit of files. JAX is
    # asked for a platform that is not there instead.
    mend = f"{found['nccl'][0]['remedy']}\nexport XDG_CACHE_HOME={tmp_path}"
    more = {
        "JAX_PLATFORMS": "nosuch",
        "TMPDIR": str(tmp_path / "not there"),
        "MMJAX_COORDINATOR": "localhost",
    }
    code, mended = diagnose(mend, variables | {"PATH": os.environ["PATH"]} | more)
    assert code == 1
    assert [mended[name][0]["state"] for name in ("limits", "cache")] == ["ok", "ok"]
    assert [finding["text"] for finding in mended["nccl"]] == [
        "MMJAX_COORDINATOR=localhost: it is not HOST:PORT"
    ]
    assert "JAX" in mended["jax"][0]["text"]
    assert "nosuch" in mended["jax"][0]["text"]
    assert mended["jax"][0]["remedy"] == "unset JAX_PLATFORMS"
    assert mended["temporary"][0]["remedy"] == f"mkdir -p {shlex.quote(more['TMPDIR'])}"


@pytest.mark.parametrize(
    ("name", "value"), [("XLA_FLAGS", "--xla_nosuch=1"), ("JAX_PLATFORMS", "cuda")]
)
def test_a_variable_without_which_jax_starts_is_what_to_unset(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(name, value)
    (finding,) = doctor.check_jax(doctor.Gpus(0, (), "", (), ""))
    assert (finding.state, finding.remedy) == ("broken", f"unset {name}")
    assert f"{name}={value}" in finding.text


def test_a_machine_without_faults_is_all_right_and_the_exit_code_says_so(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(doctor, "LEAST_SHM", 0)
    monkeypatch.setattr(doctor, "LEAST_DISK", 0)
    monkeypatch.setattr(doctor, "LEAST_FILES", 0)
    monkeypatch.setattr(doctor, "find_gpus", lambda: doctor.Gpus(0, (), "", (), ""))
    monkeypatch.setattr(doctor, "check_packages", lambda: iter(()))
    monkeypatch.setattr(doctor, "check_jax", lambda gpus: iter(()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = run(capsys, doctor.main, tmp_path / "runs")
    assert (ended.code, ended.err) == (0, "")
    assert f"ok      runs       {tmp_path / 'runs'}, " in ended.out
    assert "broken" not in ended.out


@pytest.mark.parametrize(
    ("gpus", "state", "text"),
    [
        (doctor.Gpus(8, (), "", (), ""), "broken", "8 NVIDIA GPU(s), but no driver for them here"),
        (
            doctor.Gpus(1, (), "", (), "Driver/library version mismatch"),
            "broken",
            "version mismatch",
        ),
        (doctor.Gpus(2, ("H100", "H100"), "580.65.06", (), ""), "ok", "580.65.06, 2 x H100"),
    ],
)
def test_the_driver_is_judged_by_the_bus_and_by_what_nvidia_smi_says(gpus, state, text):
    (finding,) = doctor.check_driver(gpus)
    assert finding.state == state
    assert text in finding.text


def test_a_python_that_keeps_no_compiled_modules_is_noted(monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert list(doctor.check_bytecode()) == []
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (finding,) = doctor.check_bytecode()
    assert (finding.state, finding.remedy) == ("note", "unset PYTHONDONTWRITEBYTECODE")
    assert "compiles all modules" in finding.text
