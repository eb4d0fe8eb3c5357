"""Check what training needs of this machine: ``python -m mmjax.doctor [FOLDER] [--json]``.

Every fault comes with the command that mends it; the exit code is 1 where there is one. Imports the
standard library only, and asks JAX in another process: this must work where nothing else does.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from mmjax import __version__
from mmjax.disk import user_cache
from mmjax.errors import command_parser, exit_process, run_command

GIB = 2**30
CUDA13_DRIVER = 580  # the oldest major version that runs CUDA 13
LEAST_DISK = 1 * GIB
LEAST_SHM = 1 * GIB  # data workers hand over a few batches each in shared memory
LEAST_FILES = 4096  # checkpoints and archives of many shards are opened at once
NVIDIA = "0x10de"  # PCI vendor
DISPLAY = "0x03"  # PCI class, by its first byte
GPU_FIELDS = ("name", "driver_version")
SLOW_FIELDS = ("hw_slowdown", "sw_thermal_slowdown", "applications_clocks_setting")
ASK_JAX = """
import json, jax
print(json.dumps([[device.platform, device.device_kind] for device in jax.local_devices()]))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. remedy: a command for a shell, where something is broken or could be better."""

    name: str
    state: Literal["ok", "note", "broken"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpus:
    """The NVIDIA GPUs of this machine, as its driver and its bus tell."""

    on_bus: int
    named: tuple[str, ...]
    driver: str
    slow: tuple[str, ...]  # reasons why clocks are low
    error: str  # of nvidia-smi


def find_gpus() -> Gpus:
    """Look for GPUs on the bus, and ask nvidia-smi of them."""
    on_bus = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        on_bus += _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY)
    if shutil.which("nvidia-smi") is None:
        return Gpus(on_bus, (), "", (), "")
    rows, error = _ask_nvidia_smi(GPU_FIELDS)
    reasons, _ = _ask_nvidia_smi([f"clocks_event_reasons.{field}" for field in SLOW_FIELDS])
    slow = [
        field
        for row in reasons
        for field, value in zip(SLOW_FIELDS, row, strict=False)
        if value == "Active"
    ]
    driver = rows[0][1] if rows else ""
    return Gpus(on_bus, tuple(row[0] for row in rows), driver, tuple(dict.fromkeys(slow)), error)


def check_packages() -> Iterator[Finding]:
    """Compare the installed packages with what mmjax requires."""
    try:
        required = metadata.requires("mmjax") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "packages", "note", "mmjax is not installed, only found on the path", "pip install -e ."
        )
        return
    broken = False
    for line in required:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?(?:>=([\d.]+))?", line)
        if match is None or "extra ==" in line:
            continue
        name, oldest = match.groups()
        version = _installed(name)
        if not version or _numbers(version) < _numbers(oldest or "0"):
            text = f"{name} {version} is older than {oldest}" if version else f"{name} is missing"
            broken = True
            yield Finding(
                "packages",
                "broken",
                text,
                f"pip install {shlex.quote(line.partition(';')[0].strip())}",
            )
    if not broken:
        yield Finding(
            "packages",
            "ok",
            f"mmjax {__version__}, Python {platform.python_version()}, all it requires",
        )


def check_bytecode() -> Iterator[Finding]:
    """Check that Python keeps the modules that it has compiled."""
    if variable := os.environ.get("PYTHONDONTWRITEBYTECODE"):
        text = f"PYTHONDONTWRITEBYTECODE={variable}: every process, data workers too, compiles all modules for some 6 s"
        yield Finding("python", "note", text, "unset PYTHONDONTWRITEBYTECODE")


def check_driver(gpus: Gpus) -> Iterator[Finding]:
    """Check that the driver is there, answers, and is new enough for CUDA 13."""
    install = f"sudo apt-get install -y nvidia-driver-{CUDA13_DRIVER}-open && sudo reboot"
    if gpus.error:
        remedy = "sudo reboot" if "mismatch" in gpus.error else "sudo dmesg | grep -iE 'nvrm|xid'"
        yield Finding("driver", "broken", f"nvidia-smi says: {gpus.error}", remedy)
    elif gpus.on_bus and not gpus.named:
        remedy = "docker run --gpus all IMAGE" if _in_container() else install
        yield Finding(
            "driver", "broken", f"{gpus.on_bus} NVIDIA GPU(s), but no driver for them here", remedy
        )
    elif not gpus.named:
        yield Finding("driver", "ok", "no NVIDIA GPU here")
    elif _numbers(gpus.driver)[:1] < (CUDA13_DRIVER,) and not _installed("jax-cuda12-plugin"):
        text = f"{gpus.driver} is too old for CUDA 13, which needs {CUDA13_DRIVER} or newer"
        yield Finding("driver", "broken", text, install)
    else:
        kinds = ", ".join(
            f"{gpus.named.count(kind)} x {kind}" for kind in dict.fromkeys(gpus.named)
        )
        yield Finding("driver", "ok", f"{gpus.driver}, {kinds}")


def check_jax(gpus: Gpus) -> Iterator[Finding]:
    """Check that JAX, its CUDA plugin and the driver go together, and that JAX finds every GPU."""
    version = _installed("jax")
    if not version:
        return  # check_packages says so
    plugin = next((name for cuda in (13, 12) if _installed(name := f"jax-cuda{cuda}-plugin")), "")
    cuda = f"cuda{plugin[8:10]}" if plugin else "cuda13"
    install = f'pip install "jax[{cuda}]=={version}"'
    names = ["jaxlib", *([plugin, plugin.replace("plugin", "pjrt")] if plugin else [])]
    for name in names:
        if _numbers(_installed(name))[:3] != _numbers(version)[:3]:
            text = f"{name} {_installed(name) or 'is missing'}, while JAX is {version}"
            yield Finding(
                "jax", "broken", text, install if plugin else f'pip install "jax=={version}"'
            )
    has_gpu = bool(gpus.named)
    if has_gpu and not plugin:
        yield Finding(
            "jax", "broken", f"JAX {version} has no CUDA plugin: it cannot use the GPU", install
        )
        return
    devices, error = _ask_jax()
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if not devices:
        remedy = install.replace("install", "install --force-reinstall", 1)
        set_here = [name for name in ("JAX_PLATFORMS", "XLA_FLAGS") if os.environ.get(name)]
        culprit = next((name for name in set_here if _ask_jax(without=name)[0]), "")
        text = f"JAX {version} does not start"
        if culprit:
            text += f" with {culprit}={os.environ[culprit]}"
            remedy = f"unset {culprit}"
        yield Finding("jax", "broken", f"{text}: {error}", remedy)
    elif has_gpu and devices[0][0] == "cpu" and platforms:
        yield Finding(
            "jax", "broken", f"JAX_PLATFORMS={platforms} hides the GPU", "unset JAX_PLATFORMS"
        )
    elif has_gpu and devices[0][0] == "cpu":
        shadowed = "LD_LIBRARY_PATH" in os.environ
        text = f"JAX {version} finds no GPU though its plugin is there"
        text += (
            "; libraries in LD_LIBRARY_PATH come before those that it brings"
            if shadowed
            else f": {error}"
        )
        yield Finding("jax", "broken", text, "unset LD_LIBRARY_PATH" if shadowed else install)
    elif has_gpu and len(devices) != len(gpus.named):
        text = f"JAX {version} finds {len(devices)} of {len(gpus.named)} GPUs"
        yield Finding("jax", "note", text, "unset CUDA_VISIBLE_DEVICES")
    else:
        yield Finding(
            "jax",
            "ok",
            f"JAX {version}, {len(devices)} x {devices[0][1]}" + (f", {cuda}" if plugin else ""),
        )


def check_network(gpus: Gpus) -> Iterator[Finding]:
    """Check NCCL, the interfaces and adapters that it is told to use, and the coordinator's name."""
    broken = False
    names = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    for variable, present, kind in (
        ("NCCL_SOCKET_IFNAME", names, "interface"),
        ("NCCL_IB_HCA", adapters, "adapter"),
    ):
        setting = os.environ.get(variable, "")
        if (
            setting
            and not setting.startswith("^")
            and not any(_nccl_matches(setting, name) for name in present)
        ):
            broken = True
            text = f"{variable}={setting} names no {kind} of this machine ({', '.join(present) or 'it has none'})"
            yield Finding("nccl", "broken", text, f"unset {variable}")
    coordinator = os.environ.get("MMJAX_COORDINATOR", "")
    if coordinator:
        host, _, port = coordinator.rpartition(":")
        text = "" if port.isdecimal() and host else "it is not HOST:PORT"
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except OSError as error:
            text = text or f"{host!r} is not known here ({error.strerror})"
        if text:
            broken = True
            remedy = "export MMJAX_COORDINATOR=ADDRESS_OF_PROCESS_0:20000"
            yield Finding("nccl", "broken", f"MMJAX_COORDINATOR={coordinator}: {text}", remedy)
    nccl = next((v for cuda in (13, 12) if (v := _installed(f"nvidia-nccl-cu{cuda}"))), "")
    if len(gpus.named) > 1 and _installed("jax-cuda13-plugin") and not nccl:
        broken = True
        yield Finding(
            "nccl",
            "broken",
            "NCCL is missing, which several GPUs need",
            'pip install "nvidia-nccl-cu13"',
        )
    active = [
        a
        for a in adapters
        if any(
            "ACTIVE" in _read(p) for p in Path("/sys/class/infiniband", a, "ports").glob("*/state")
        )
    ]
    if active and os.environ.get("NCCL_IB_DISABLE", "0") != "0":
        yield Finding(
            "nccl",
            "note",
            f"NCCL_IB_DISABLE leaves {', '.join(active)} unused",
            "unset NCCL_IB_DISABLE",
        )
    elif not broken:
        text = f"NCCL {nccl or 'not installed'}; {len(active)} active InfiniBand or RoCE adapter(s)"
        yield Finding("nccl", "ok", text)


def check_disks(folder: Path) -> Iterator[Finding]:
    """Check that runs, the cache and temporary files can be written, and how much space there is."""
    places = (
        ("runs", folder, "python -m mmjax.train run=FOLDER_ON_ANOTHER_DISK/NAME"),
        ("cache", user_cache(), "export XDG_CACHE_HOME=FOLDER_ON_ANOTHER_DISK"),
        (
            "temporary",
            Path(os.environ.get("TMPDIR") or "/tmp"),
            "export TMPDIR=FOLDER_ON_ANOTHER_DISK",
        ),
    )
    for name, path, remedy in places:
        if name == "temporary" and not path.exists():  # unlike the others, nobody makes it
            text = f"TMPDIR={path} is not there, so programs put their files elsewhere or fail"
            yield Finding(name, "broken", text, f"mkdir -p {shlex.quote(str(path))}")
            continue
        writable = next(
            parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()
        )
        try:
            with tempfile.TemporaryFile(dir=writable) as file:
                file.write(b"mmjax")
            disk = os.statvfs(writable)
        except OSError as error:
            yield Finding(name, "broken", f"{path} cannot be written: {error.strerror}", remedy)
            continue
        free = disk.f_bavail * disk.f_frsize
        if free < LEAST_DISK or (disk.f_files and not disk.f_favail):
            text = f"{path} has {_size(free)} free" + (
                "" if disk.f_favail or not disk.f_files else " and no inode"
            )
            yield Finding(name, "broken", text, remedy)
        else:
            yield Finding(name, "ok", f"{path}, {_size(free)} free")


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the shared memory in which data workers hand over their batches."""
    remedy = "sudo mount -o remount,size=50% /dev/shm"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        remedy = (
            "kubectl apply -f launch/jobset.yaml  # mounts a volume of medium Memory at /dev/shm"
        )
    elif _in_container():
        remedy = "docker run --shm-size=16g IMAGE"
    if not path.is_dir():
        yield Finding(
            "/dev/shm", "broken", "is not there", "sudo mount -t tmpfs -o size=50% tmpfs /dev/shm"
        )
        return
    disk = os.statvfs(path)
    total = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    if total < LEAST_SHM:
        yield Finding(
            "/dev/shm",
            "broken",
            f"{_size(total)} in all; data workers hand batches over there",
            remedy,
        )
    elif free < LEAST_SHM / 2:
        text = f"{_size(free)} free of {_size(total)}; data workers hand batches over there"
        yield Finding(
            "/dev/shm", "broken", text, "ls -lS /dev/shm | head  # then rm what no process uses"
        )
    else:
        yield Finding("/dev/shm", "ok", f"{_size(free)} free of {_size(total)}")


def check_clocks(gpus: Gpus) -> Iterator[Finding]:
    """Check that nothing holds the GPUs' clocks down, and that the machine's time is set by the network."""
    if "applications_clocks_setting" in gpus.slow:
        yield Finding(
            "clocks",
            "broken",
            "GPU clocks are locked below their maximum",
            "sudo nvidia-smi -rgc -rac",
        )
    if hot := [reason for reason in gpus.slow if reason != "applications_clocks_setting"]:
        text = f"GPU clocks are held down: {', '.join(hot)}; cooling or power"
        yield Finding("clocks", "broken", text, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER")
    if sys.platform == "linux" and _unsynchronised():
        text = (
            "the time of this machine is not set by the network; logs of several hosts may disagree"
        )
        yield Finding("clocks", "note", text, "sudo timedatectl set-ntp true")
    elif not gpus.slow:
        yield Finding(
            "clocks", "ok", "time set by the network" + (", GPU clocks free" if gpus.named else "")
        )


def check_limits() -> Iterator[Finding]:
    """Check the limits of open files, and of locked memory where network adapters need it."""
    # the hard one, to which every command raises it
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        remedy = (
            "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf  # then log in again"
        )
        if _in_container():
            remedy = "docker run --ulimit nofile=65536 IMAGE"
        yield Finding("limits", "broken", f"{soft} open files, fewer than {LEAST_FILES}", remedy)
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if list(Path("/sys/class/infiniband").glob("*")) and locked != resource.RLIM_INFINITY:
        remedy = (
            "docker run --ulimit memlock=-1 IMAGE" if _in_container() else "ulimit -l unlimited"
        )
        text = f"{_size(locked)} of locked memory; network adapters register more"
        yield Finding("limits", "broken", text, remedy)
        return
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Finding(
        "limits",
        "ok",
        f"{cores} cores, {'unlimited' if soft == resource.RLIM_INFINITY else soft} open files",
    )


def examine(folder: Path) -> list[Finding]:
    """Run all checks. folder: where runs are to be written."""
    gpus = find_gpus()
    return [
        *check_packages(),
        *check_bytecode(),
        *check_driver(gpus),
        *check_jax(gpus),
        *check_network(gpus),
        *check_disks(folder),
        *check_shared_memory(),
        *check_clocks(gpus),
        *check_limits(),
    ]


def _ask_nvidia_smi(fields: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return a row of values for every GPU, and the first line of what went wrong."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    out, errors = _output(command, 30)
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line]
    return rows, "" if rows else (errors or ["it names no GPU"])[0]


def _ask_jax(without: str = "") -> tuple[list[list[str]], str]:
    """Return platform and kind of each device that JAX finds, and the last line of what went wrong.

    without: an environment variable that this JAX is not to see.
    """
    out, errors = _output([sys.executable, "-c", ASK_JAX], 180, without)
    error = errors[-1] if errors else ""
    try:
        return json.loads(out.splitlines()[-1]), error
    except (ValueError, IndexError):
        return [], error or "it prints nothing"


def _output(command: Sequence[str], seconds: float, without: str = "") -> tuple[str, list[str]]:
    """Return what a command prints where it succeeds, and the lines of its complaints."""
    # take no GPU memory from a run
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    variables.pop(without, None)
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=variables
        )
    except subprocess.TimeoutExpired:
        return "", [f"no answer within {seconds:.0f} s"]
    except OSError as error:
        return "", [str(error.strerror)]
    if ended.returncode == 0:
        return ended.stdout, ended.stderr.strip().splitlines()
    complaints = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    return "", complaints or [f"exit code {ended.returncode}"]


def _nccl_matches(setting: str, name: str) -> bool:
    """Return whether NCCL takes `name` for one of the list `setting`: by its beginning, or exactly behind `=`."""
    exact = setting.startswith("=")
    words = [word.partition(":")[0] for word in setting.lstrip("=").split(",")]
    return name in words if exact else any(name.startswith(word) for word in words)


def _unsynchronised() -> bool:
    """Return whether the kernel says that nothing sets its clock (TIME_ERROR of adjtimex)."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    return adjtimex is not None and adjtimex(ctypes.create_string_buffer(512)) == 5


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or "container" in os.environ


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _installed(name: str) -> str:
    """Return the version of an installed distribution; empty where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:4])


def _size(n: float) -> str:
    return f"{n / GIB:.1f} GiB" if n >= GIB else f"{n / 2**20:.0f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("doctor", __doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("runs"), help="where runs are to be written"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects, for programs")
    args = parser.parse_args(argv)
    findings = examine(args.folder)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.state:<6}  {finding.name:<9}  {finding.text}")
            if finding.remedy:
                print(
                    f"{'':19}{'mend it' if finding.state == 'broken' else 'better'}: {finding.remedy}"
                )
    return int(any(finding.state == "broken" for finding in findings))


if __name__ == "__main__":
    exit_process(run_command(main))
