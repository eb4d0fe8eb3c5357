"""Named devices and clusters: data-sheet rates, and the fraction of them that training is assumed to reach.

`h100x8x8` is 8 nodes of 8 H100, `h100x8` one node of 8, `h100` a single one. Planning for them
needs no such device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from mmjax.config.codec import did_you_mean
from mmjax.errors import UserError

GIB = 2**30


class Rates(NamedTuple):
    """Rates that a device sustains."""

    flops: float  # FLOP/s of matrix products
    memory: float  # bytes per second
    host: float  # bytes per second, each way
    attention: float | None = None  # FLOP/s of the attention kernel; None: those of matrix products
    launch: float = 0.0  # seconds that a kernel takes beside what it computes
    # FLOP/s of products in FP8, with their rounding; None: those of other products
    float8: float | None = None

    def seconds(self, flops: float, attention: float, float8: float = 0.0) -> float:
        """Compute the seconds of so many FLOPs, some of which are the attention kernel's or of products in FP8."""
        rest = (flops - attention - float8) / self.flops
        return (
            rest + attention / (self.attention or self.flops) + float8 / (self.float8 or self.flops)
        )


@dataclass(frozen=True)
class CudaTarget:
    """Describe an absent GPU to XLA's compiler, beside its data sheet."""

    name: str  # JAX's `device_kind`
    capability: int  # 90 = compute capability 9.0
    cores: int  # streaming multiprocessors
    clock: float  # GHz
    memory: int  # bytes that CUDA reports, more than the data sheet's


@dataclass(frozen=True)
class MeasuredRates:
    """Rates measured on a device, which replace the assumed ones; None: not measured."""

    products: float | None = None  # share of the data sheet's FLOP/s that matrix products reach
    attention: float | None = None  # share of the same that the attention kernel reaches
    launch: float | None = None  # seconds that a kernel takes beside what it computes
    memory: float | None = None  # bytes/s of the device's memory
    host: float | None = None  # bytes/s to the memory of its host
    link: float | None = None  # bytes/s to devices of its node
    network: float | None = None  # bytes/s to other nodes, of each device


@dataclass(frozen=True)
class Device:
    """One accelerator. FLOP/s of dense products; bytes; bytes/s, of links in one direction.

    float32 is what JAX runs by default: TF32 on these GPUs, one bfloat16 pass on TPUs.
    """

    name: str
    kind: str  # pattern of JAX's `device_kind`
    platform: str  # as JAX calls it: gpu, tpu or cpu
    bfloat16: float
    float32: float
    memory: float
    bandwidth: float  # of the memory
    link: float  # to devices of its node
    network: float  # to other nodes: its share of the node's adapters
    host: float  # to the memory of its host
    cuda: CudaTarget | None = None  # None: not compiled for where it is absent
    measured: MeasuredRates = MeasuredRates()
    measured_in: str = ""  # the file that states what was measured
    float8: float | None = None  # FLOP/s of dense products in FP8; None: it has none

    def peak(self, precision: Literal["bfloat16", "float32"]) -> float:
        """Return the data sheet's FLOP/s."""
        return self.float32 if precision == "float32" else self.bfloat16

    def rates(self, precision: Literal["bfloat16", "float32"]) -> Rates:
        """Return the rates that a training step sustains, as measured or assumed."""
        gpu = self.platform == "gpu"
        measured = self.measured
        launch = LAUNCH_SECONDS if gpu else 0.0
        return Rates(
            flops=(measured.products or COMPUTE_EFFICIENCY) * self.peak(precision),
            memory=measured.memory or BANDWIDTH_EFFICIENCY * self.bandwidth,
            host=measured.host or BANDWIDTH_EFFICIENCY * self.host,
            attention=(measured.attention or ATTENTION_EFFICIENCY) * self.peak(precision)
            if gpu
            else None,
            launch=launch if measured.launch is None else measured.launch,
            float8=FLOAT8_EFFICIENCY * self.float8 if self.float8 else None,
        )

    @property
    def link_rate(self) -> float:
        """Return the bytes/s to devices of its node, as measured or assumed."""
        return self.measured.link or BANDWIDTH_EFFICIENCY * self.link

    @property
    def network_rate(self) -> float:
        """Return the bytes/s to other nodes, as measured or assumed."""
        return self.measured.network or BANDWIDTH_EFFICIENCY * self.network


# Data sheets, halved where they give only the rate with 2:4 sparsity or the sum of both directions:
# NVIDIA's A40, A100, A800, H100 and H200 (nvidia.com/data-center); cloud.google.com/tpu/docs/v5e
# and /v5p. Networks are those of NVIDIA's own systems (DGX A100: 200 Gbit/s per GPU; DGX H100 and
# H200: 400), for A40s one adapter of 200 Gbit/s per 8. All chips of a TPU slice share the same
# links, whichever host they are attached to.
_COLUMNS = (
    "name",
    "kind",
    "platform",
    "bfloat16",
    "float32",
    "memory",
    "bandwidth",
    "link",
    "network",
    "host",
)
_ROWS = (
    ("a40", r"\bA40\b", "gpu", 149.7e12, 74.8e12, 48e9, 696e9, 32e9, 3.1e9, 32e9),
    ("a100", r"\bA100\b", "gpu", 312e12, 156e12, 80e9, 2039e9, 300e9, 25e9, 32e9),
    ("a800", r"\bA800\b", "gpu", 312e12, 156e12, 80e9, 2039e9, 200e9, 25e9, 32e9),
    ("h100-pcie", r"\bH100 PCIe\b", "gpu", 756.5e12, 378e12, 80e9, 2000e9, 64e9, 50e9, 64e9),
    ("h100-nvl", r"\bH100 NVL\b", "gpu", 835.5e12, 417.5e12, 94e9, 3900e9, 300e9, 50e9, 64e9),
    ("h200-nvl", r"\bH200 NVL\b", "gpu", 835.5e12, 417.5e12, 141e9, 4800e9, 450e9, 50e9, 64e9),
    ("h100", r"\bH100\b", "gpu", 989.4e12, 494.7e12, 80e9, 3350e9, 450e9, 50e9, 64e9),
    ("h200", r"\bH200\b", "gpu", 989.4e12, 494.7e12, 141e9, 4800e9, 450e9, 50e9, 64e9),
    ("v5e", r"\bTPU v5( lite|e)", "tpu", 197e12, 197e12, 16 * GIB, 819e9, 200e9, 200e9, 16e9),
    ("v5p", r"\bTPU v5(p|$)", "tpu", 459e12, 459e12, 95 * GIB, 2765e9, 600e9, 600e9, 32e9),
)
# Multiprocessors and clocks of the data sheets; bytes of `cudaGetDeviceProperties`.
_CUDA = {
    "a100": CudaTarget("NVIDIA A100-SXM4-80GB", 80, 108, 1.41, 85_100_068_864),
    "h100": CudaTarget("NVIDIA H100 80GB HBM3", 90, 132, 1.98, 84_929_347_584),
    "h100-pcie": CudaTarget("NVIDIA H100 PCIe", 90, 114, 1.755, 84_942_979_072),
    "h200": CudaTarget("NVIDIA H200", 90, 132, 1.98, 150_754_820_096),
}
_FLOAT8 = {
    "h100-pcie": 1513e12,
    "h100-nvl": 1671e12,
    "h200-nvl": 1671e12,
    "h100": 1978.9e12,
    "h200": 1978.9e12,
}
DEVICES = tuple(
    Device(
        **dict(zip(_COLUMNS, row, strict=True)), cuda=_CUDA.get(row[0]), float8=_FLOAT8.get(row[0])
    )
    for row in _ROWS
)
SLICE_OF_GPU = r"\bMIG\b"

# Fractions of the data sheet that a training step is assumed to reach where the device was not
# profiled.
COMPUTE_EFFICIENCY = 0.65  # of FLOP/s of matrix products
# Of FLOP/s, in the attention kernel with all that it recomputes: FlashAttention-2 in Triton reaches
# 350-450 TFLOP/s forward on an H100, and 250-350 backward where its 7 products count as 5 (Dao
# 2023; 350-490 of all 7).
ATTENTION_EFFICIENCY = 0.4
# Of FLOP/s in FP8: products of a 7B model and their gradients reached .52 to .59 of it on an H200,
# rounding included.
FLOAT8_EFFICIENCY = 0.55
LAUNCH_SECONDS = 3e-6  # of a GPU's kernel, one after the other in a CUDA graph: 2-4 us
BANDWIDTH_EFFICIENCY = 0.8  # of the bandwidth of memory and links
# Of a GPU's data sheet, as parts of its FLOP/s.
SHEET = Rates(
    flops=COMPUTE_EFFICIENCY,
    memory=math.inf,
    host=math.inf,
    attention=ATTENTION_EFFICIENCY,
    float8=2 * FLOAT8_EFFICIENCY,  # whose peak is twice as high
)
USABLE = 0.92  # of the memory: the rest goes to the driver, the collectives and fragmentation


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of identical devices."""

    device: Device
    nodes: int = 1
    per_node: int = 1

    @property
    def devices(self) -> int:
        """Count the devices of all nodes."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.device.name}x{self.nodes}x{self.per_node}"


def find_device(kind: str) -> Device | None:
    """Look up the device of JAX's `device_kind`; None where we know no data sheet."""
    if re.search(SLICE_OF_GPU, kind):  # a fraction of a GPU has other rates than its name says
        return None
    return next((device for device in DEVICES if re.search(device.kind, kind)), None)


def check_float8(fp8: str, device: Device | None) -> None:
    """Raise UserError where products are to be in FP8 on a device that has none. fp8: as in `DecoderConfig`."""
    if fp8 != "off" and device is not None and device.platform != "cpu" and device.float8 is None:
        raise UserError(
            f"model.llm.fp8={fp8}: {device.name} multiplies nothing in FP8; use model.llm.fp8=off"
        )


def parse_cluster(name: str, others: Mapping[str, Device] = MappingProxyType({})) -> Cluster:
    """Parse a cluster's name: DEVICE, DEVICExCOUNT or DEVICExNODESxCOUNT. Raises UserError for any other.

    others: devices beside those of data sheets, by name.
    """
    match = re.fullmatch(r"(?P<device>.+?)(x(?P<first>\d+))?(x(?P<second>\d+))?", name.lower())
    known = {device.name: device for device in DEVICES} | others
    device = name if match is None else match["device"]
    if match is None or device not in known:
        raise UserError(
            f"cluster={name}: write DEVICExNODESxCOUNT, as in h100x8x8 (8 nodes of 8); there is no device "
            f"{device!r}{did_you_mean(device, known)}"
        )
    counts = [int(n) for n in (match["first"], match["second"]) if n is not None]
    if not all(counts):
        raise UserError(f"cluster={name}: there must be at least one node and one device in it")
    nodes, per_node = [1, 1, *counts][-2:]  # "h100x8" has one count, of one node
    return Cluster(known[device], nodes, per_node)
