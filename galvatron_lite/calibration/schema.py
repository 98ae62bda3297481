"""Calibrated constants: what a device type, a link type and a software stack reach in practice.

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
    half_size: float = 0.0  # bytes a rank at which a message reaches half of that bandwidth


@dataclass(frozen=True, slots=True)
class StackConstants(Strict):
    """What a software stack (framework and version) costs beyond the kernels' own time."""

    # seconds of host time a kernel launch takes; compute cannot run faster than the host launches
    kernel_host: float = 0.0
    microbatch_host: float = 0.0  # seconds once a micro-batch and stage
    step_host: float = 0.0  # seconds once a step
    matmul: float = 1.0  # factor on the time of matmuls beside the device's own efficiency
    attention: float = 1.0  # the same for attention kernels
    # further factor on attention where a sample's tokens are spread over devices: it runs piece by piece, and the
    # pieces' results are merged
    ring: float = 1.0
    memory: float = 1.0  # the same for memory-bound kernels
    optimizer: float = 1.0  # the same for the optimizer's update
    # share of a dimension's communication that compute may hide, by the dimension's name
    hidden: dict[str, float] = field(default_factory=dict)
    straggling: float = 0.0  # relative growth of the step time with each doubling of the number of nodes
    pictures: float = 0.0  # of networks of pictures, in place of ``memory``: theirs are few large kernels; 0: the same
    # of networks of pictures, how many times faster 3 x 3 convolutions of stride 1 run in fp32 where cuDNN has the
    # workspace for Winograd's algorithm (Lavin and Gray 2015, arXiv:1509.09308: up to 2.25)
    winograd: float = 1.0
    # share of the rate of pictures' convolutions that those of volumes reach in 32 bits
    volumes: float = 1.0
    # of networks of pictures, relative growth of the step time with each doubling of the devices of a node, whose
    # host reads and decodes the pictures of all
    sharing: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceConstants(Strict):
    """What kernels reach of a device type's data sheet."""

    # share of peak FLOP/s by precision (``bf16`` stands for ``fp16`` too), before tile and wave quantisation
    matmul: dict[str, float]
    # share of peak FLOP/s in the fused attention kernel's forward, at head size 128 and long sequences
    attention: float
    attention_backward: float  # the same in its backward
    memory: float  # share of memory bandwidth in memory-bound kernels
    # share of peak FLOP/s by precision in convolutions with dense channels
    convolution: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConstantsOrigin(Strict):
    """Where the constants of one entry come from."""

    source: str  # a publication, a data sheet or a public benchmark; or what the constants were fitted to
    date: str = ""  # of the fit (ISO), empty where nothing was fitted
    rows: int = 0  # how many published runs the fit of this entry rests on
    residual: float = 0.0  # mean absolute relative error of step times on those rows after the fit
    # of priors: how far a field is expected from its value, on the scale of the fit, where that is not what fields of
    # its name have
    deviations: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calibration(Strict):
    """All calibrated constants, each by name; the entry ``default`` serves names that have none of their own."""

    devices: dict[str, DeviceConstants]  # by device type (first part of a device's name: ``A100``)
    links: dict[str, LinkConstants]  # by link type (``nvlink3``, ``infiniband-hdr``)
    stacks: dict[str, StackConstants]  # by software stack
    # entries without constants of their own, as ``devices/A800``, and the entry of the same kind they share
    like: dict[str, str] = field(default_factory=dict)
    # where the constants of an entry come from, by kind and name: ``devices/A100``
    origins: dict[str, ConstantsOrigin] = field(default_factory=dict)
    provenance: tuple[str, ...] = ()  # what the whole was calibrated on, for people
    # mean absolute relative error of step times of published runs by what the fit left out: ``without_model``,
    # ``without_family`` (and their software); empty where it was not cross-validated. Of image networks, of which
    # nothing is left out, ``images``. ``memory_estimated`` and ``memory_measured``: the share of a memory budget to
    # keep free for what measured peaks are above predictions (``memory_margin``)
    expected_error: dict[str, float] = field(default_factory=dict)
