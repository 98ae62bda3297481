"""Calibrated constants: what device types, link types and software stacks reach in practice.

Nothing here may depend on which published run, family of runs or model is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from galvatron_lite.files import Strict


@dataclass(frozen=True, slots=True)
class LinkConstants(Strict):
    """What collectives reach of a link type's data sheet."""

    efficiency: float  # share of the bandwidth on large messages
    latency: float  # seconds before the first byte arrives
    half_size: float = 0.0  # bytes of a message that reaches half of that bandwidth


@dataclass(frozen=True, slots=True)
class StackConstants(Strict):
    """What a software stack (framework and version) costs beyond the time of its kernels."""

    kernel_host: float = 0.0  # host seconds of a kernel launch; compute cannot run faster than the host launches
    microbatch_host: float = 0.0  # seconds once a micro-batch and stage
    step_host: float = 0.0  # seconds once a step
    matmul: float = 1.0  # factor on the time of matmuls, besides the device's efficiency
    attention: float = 1.0  # the same for attention kernels
    ring: float = 1.0  # further factor on attention under context parallelism, which merges partial results
    memory: float = 1.0  # factor on the time of memory-bound kernels
    optimizer: float = 1.0  # factor on the time of the optimizer's update
    # share of a dimension's communication that compute may hide, by the dimension's name
    hidden: dict[str, float] = field(default_factory=dict)
    straggling: float = 0.0  # relative growth of the step time with each doubling of the number of nodes
    pictures: float = 0.0  # image networks: replaces ``memory``, as they have few large kernels; 0: as ``memory``
    # image networks: how many times faster 3 x 3 convolutions of stride 1 run in fp32 if cuDNN has the workspace for
    # Winograd's algorithm (Lavin and Gray 2015, arXiv:1509.09308: up to 2.25)
    winograd: float = 1.0
    volumes: float = 1.0  # rate of 3D convolutions in 32 bits over that of 2D ones
    # image networks: relative growth of the step time with each doubling of the devices of a node, whose host reads
    # and decodes the pictures of all
    sharing: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceConstants(Strict):
    """What kernels reach of a device type's data sheet."""

    # share of peak FLOP/s by precision (``bf16`` serves ``fp16`` too), before tile and wave quantisation
    matmul: dict[str, float]
    attention: float  # share of peak FLOP/s in forward of fused attention, with head size 128 and long sequences
    attention_backward: float  # the same in backward
    memory: float  # share of memory bandwidth in memory-bound kernels
    # share of peak FLOP/s by precision in convolutions with dense channels
    convolution: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConstantsOrigin(Strict):
    """Where the constants of one entry come from."""

    source: str  # a publication, a data sheet, a public benchmark, or what the constants were fitted to
    date: str = ""  # ISO date of the fit; empty if nothing was fitted
    rows: int = 0  # published runs that this entry was fitted to
    residual: float = 0.0  # mean absolute relative error of step times on those rows after the fit
    # standard deviations of priors by field, on the scale of the fit, if they differ from ``FitScale.deviation``
    deviations: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calibration(Strict):
    """All calibrated constants by name; the entry ``default`` serves names without an entry."""

    devices: dict[str, DeviceConstants]  # by device type (first part of a device's name: ``A100``)
    links: dict[str, LinkConstants]  # by link type (``nvlink3``, ``infiniband-hdr``)
    stacks: dict[str, StackConstants]  # by software stack
    # entries that share the constants of another entry of their kind: ``devices/A800`` and the other's name
    like: dict[str, str] = field(default_factory=dict)
    # where the constants of an entry come from, by kind and name: ``devices/A100``
    origins: dict[str, ConstantsOrigin] = field(default_factory=dict)
    provenance: tuple[str, ...] = ()  # what the constants were calibrated on, for people
    # Mean absolute relative error of step times of published runs, by what the fit left out: ``without_model``,
    # ``without_family`` (and their software); ``images`` of image networks, with nothing left out; empty without
    # cross-validation. ``memory_estimated`` and ``memory_measured`` are the share of a memory budget to keep free, as
    # measured peaks exceed predictions.
    expected_error: dict[str, float] = field(default_factory=dict)
