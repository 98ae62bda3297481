"""A software stack as the cost model sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.cluster.transport import STRAIGHT, Transport
from galvatron_lite.files import Strict
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.parallelism.base import SPARING, PictureSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout(Strict):
    """In which precision the states of training are held and moved."""

    parameters: str = "fp32"  # precision of parameters at rest
    gradients: str = "fp32"  # precision of gradients at rest (``fp32`` for Megatron's main gradients)
    reduce: str = "fp32"  # precision in which gradients are reduced
    gather: str = "bf16"  # precision in which ZeRO gathers parameters
    # bytes of optimizer state for one parameter item: two fp32 moments 8, with an fp32 master 12
    optimizer_bytes: int = 8
    # whether gradients live in one buffer throughout (data parallel buckets), or form anew in every step
    buffered_gradients: bool = True
    bucket_bytes: int = 0  # of further gradient buffers, bytes for one parameter item, where replicas sum gradients
    # of gradients that form in every backward pass and are gone at its end, bytes for one parameter item (what is
    # added to the buffers afterwards)
    passing_bytes: int = 0
    # whether weights are cast to the precision of compute once a step, and the copies held through it
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Strict):
    """One training framework and version."""

    name: str  # ``megatron-core``; key of its calibrated constants
    source: str = ""  # where the facts below come from (documentation, default arguments)
    # which kernels it runs
    kernels: Kernels = Kernels()  # noqa: RUF009  frozen
    states: StateLayout = StateLayout()  # how it holds states
    fp16_states: StateLayout | None = None  # the same under fp16 with loss scaling, where it differs
    # calibrated costs
    constants: StackConstants = StackConstants()  # noqa: RUF009  frozen
    optimizer: str = "adamw"  # name of the optimizer's implementation (a key of ``OPTIMIZERS``)
    vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times the tensor degree; 1: not padded
    # whether tensor slices of an extent that does not divide differ by one; all wait for the slower
    uneven_shares: bool = False
    parallel_vocabulary: bool = True  # whether embedding and head are split over the tensor group
    dropout: float = 0.0  # probability its recipes train plain (not gated) transformers with
    zero_stage: int = 0  # of data parallelism where a run does not say
    # how plain (not gated) decoders of its recipes tell places
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    biases: bool = True  # whether plain decoders of its recipes have biases
    predicted_share: float = 1.0  # of a masked language model's tokens, how many logits are computed for
    # of interleaved schedules that do not say how many; 0: one block each (2: torchtitan's default)
    virtual_stages: int = 2
    # whether tensors whose tokens are gathered or scattered are copied besides, samples coming first
    # (``all_gather_tensor`` and ``reduce_scatter_tensor`` along any but the first dimension)
    copies_gathered: bool = False
    # whether a pipelined run that does not say its micro-batch has as many of them as there are pipeline ranks, else
    # one sample each
    splits_by_stage: bool = False
    # whether sharded parameters are gathered and gradients reduced once a step under a pipeline, not in every
    # micro-batch (torch.distributed.pipelining, ``backward_maybe_with_nosync``)
    gathers_once: bool = False
    # whether full recomputation ends where backward has what it needs, so that a block's last matmul is not run again
    # (``torch.utils.checkpoint`` without reentry: ``set_checkpoint_early_stop``, on by default)
    early_stop: bool = False
    # whether tensor groups share the sending of whole boundary tensors between pipeline stages
    scattered_sends: bool = False
    # whether stages begin a step before the others have ended the last, under zero-bubble schedules (post-validation of
    # the optimizer's step: Qi et al. 2023, section 4)
    steps_overlap: bool = False
    # whether pipeline stages are cut by the work of their layers, the head's too, not their number
    splits_by_work: bool = False
    expert_tensor: int = 1  # devices that share the matmuls of one expert where experts are spread; 0: the tensor group
    transformer_engine: bool = False  # whether matmuls of blocks go through TransformerEngine
    # bytes of cuBLAS's workspace a handle where ``CUBLAS_WORKSPACE_CONFIG`` is set; 0: PyTorch's
    cublas_workspace: int = 0
    # whether inputs gathered over the tensor group are kept, but gathered again in backward by runs that would not
    # fit otherwise (an option of the software that runs do not state)
    regathers_at_need: bool = False
    # whether the memory it reports is what PyTorch's allocator reserved, not what it allocated
    reports_reserved: bool = False
    # whether batch normalisation, addition and ReLU are one kernel, where there is one for it
    # (``model.shapes.images.layout``)
    fuses_norms: bool = False
    transport: Transport = STRAIGHT  # how it sends
    pictures: PictureSplit = SPARING  # how it splits pictures


_MIB = 2**20
_HANDLES = 2
"""cuBLAS handles belong to threads, and each has a workspace of its own for a stream: the thread that runs forward and
autograd's (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_SINCE_HOPPER = re.compile(r"^(H|GH|B|GB)\d")


def workspace_bytes(stack: Stack, device: Device) -> int:
    """Bytes of workspaces of cuBLAS and TransformerEngine on one device; part of ``Device.context``.

    PyTorch's default for cuBLAS (``parseChosenWorkspaceSize``) is ``:4096:2:16:8``, 8.125 MiB, and 32 MiB since Hopper;
    ``CUBLAS_WORKSPACE_CONFIG`` goes before it. TransformerEngine's matmuls have one of 32 MiB since Hopper, of 4 MiB
    before (``get_cublas_workspace_size_bytes``).
    """
    recent = bool(_SINCE_HOPPER.match(device.name))
    usual = 32 * _MIB if recent else 2 * 4 * _MIB + 8 * 16 * 2**10
    narrow = (32 if recent else 4) * _MIB if stack.transformer_engine else 0
    return _HANDLES * (stack.cublas_workspace or usual) + narrow
