"""A training framework as the cost model sees it."""

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
    """Precisions in which training software stores and communicates parameters, gradients and optimizer states."""

    parameters: str = "fp32"  # precision of parameters at rest
    gradients: str = "fp32"  # precision of gradients at rest (``fp32`` for Megatron's main gradients)
    reduce: str = "fp32"  # precision in which gradients are reduced
    gather: str = "bf16"  # precision in which ZeRO gathers parameters
    # bytes of optimizer state for each parameter item: two fp32 moments 8, with an fp32 master 12
    optimizer_bytes: int = 8
    # whether gradients stay in one buffer (data parallel buckets) rather than being allocated in each step
    buffered_gradients: bool = True
    bucket_bytes: int = 0  # further gradient buffers if replicas sum gradients, bytes for each parameter item
    # gradients that exist during a backward pass only and are then added to the buffers, bytes for each parameter item
    passing_bytes: int = 0
    # whether weights are cast to the precision of compute once a step, and the copies kept until its end
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Strict):
    """One training framework and version; its recipes decide what a published run does not state."""

    name: str  # ``megatron-core``; key of its calibrated constants
    source: str = ""  # where the facts below come from (documentation, default arguments)
    # the kernels it runs
    kernels: Kernels = Kernels()  # noqa: RUF009  frozen
    states: StateLayout = StateLayout()  # precisions of training states
    fp16_states: StateLayout | None = None  # the same under fp16 with loss scaling, if it differs
    # calibrated costs
    constants: StackConstants = StackConstants()  # noqa: RUF009  frozen
    optimizer: str = "adamw"  # the optimizer's implementation, a key of ``OPTIMIZERS``
    vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times the tensor degree; 1: not padded
    uneven_shares: bool = False  # whether tensor slices of an extent that does not divide differ by one
    parallel_vocabulary: bool = True  # whether embedding and head are split over the tensor group
    dropout: float = 0.0  # dropout probability of plain (not gated) transformers
    zero_stage: int = 0  # default ZeRO stage of data parallelism
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"  # position encoding of plain decoders
    biases: bool = True  # whether plain decoders have biases
    # whether masked language models are scripted where they are pretrained: scale, mask and softmax are one kernel
    scripted: bool = False
    multiplies_tf32: bool = False  # whether products of fp32 run in TF32 where the device has it
    predicted_share: float = 1.0  # share of a masked language model's tokens that logits are computed for
    virtual_stages: int = 2  # default of interleaved schedules; 0: one for each block (2: torchtitan's default)
    # whether tensors whose tokens are gathered or scattered are copied besides, since samples come first
    # (``all_gather_tensor`` and ``reduce_scatter_tensor`` along any but the first dimension)
    copies_gathered: bool = False
    # whether a pipelined run splits its batch into one micro-batch for each pipeline rank by default, rather than into
    # micro-batches of one sample
    splits_by_stage: bool = False
    # whether sharded parameters are gathered and gradients reduced once a step under a pipeline, rather than in every
    # micro-batch (torch.distributed.pipelining, ``backward_maybe_with_nosync``)
    gathers_once: bool = False
    # whether full recomputation stops once backward has its inputs, so that a block's last matmul does not run again
    # (``torch.utils.checkpoint`` without reentry: ``set_checkpoint_early_stop``, on by default)
    early_stop: bool = False
    # whether ranks of a tensor group each send a part of the boundary tensor between pipeline stages
    scattered_sends: bool = False
    # whether stages begin a step before the others have ended the last, under zero-bubble schedules (post-validation of
    # the optimizer's step: Qi et al. 2023, section 4)
    steps_overlap: bool = False
    # whether pipeline stages balance the work of layers, the head's included, rather than their number
    splits_by_work: bool = False
    expert_tensor: int = 1  # devices that share the matmuls of one expert under expert parallelism; 0: the tensor group
    spreads_experts: bool = False  # whether experts are spread over as many replicas as divide them by default
    transformer_engine: bool = False  # whether matmuls of blocks go through TransformerEngine
    cublas_workspace: int = (
        0  # bytes of a cuBLAS handle's workspace by ``CUBLAS_WORKSPACE_CONFIG``; 0: PyTorch's default
    )
    # whether inputs gathered over the tensor group are kept, but gathered again in backward by runs that would not
    # fit otherwise (an option of the software that runs do not state)
    regathers_at_need: bool = False
    # whether it reports the memory that PyTorch's allocator reserved rather than allocated
    reports_reserved: bool = False
    fuses_norms: bool = False  # whether batch normalisation, addition and ReLU are one kernel (``model.shapes.images``)
    transport: Transport = STRAIGHT  # how it sends
    pictures: PictureSplit = SPARING  # how it splits pictures


_MIB = 2**20
_HANDLES = 2
"""cuBLAS has a handle, with a workspace for each stream, for the thread of forward and for autograd's
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_SINCE_HOPPER = re.compile(r"^(H|GH|B|GB)\d")


def workspace_bytes(stack: Stack, device: Device) -> int:
    """Return the bytes of workspaces of cuBLAS and TransformerEngine on one device, a part of ``Device.context``.

    PyTorch's default for cuBLAS (``parseChosenWorkspaceSize``) is ``:4096:2:16:8``, 8.125 MiB, and 32 MiB since Hopper;
    ``CUBLAS_WORKSPACE_CONFIG`` overrides it. TransformerEngine's workspace has 32 MiB since Hopper, 4 MiB before
    (``get_cublas_workspace_size_bytes``).
    """
    is_recent = bool(_SINCE_HOPPER.match(device.name))
    default = 32 * _MIB if is_recent else 2 * 4 * _MIB + 8 * 16 * 2**10
    transformer_engine = (32 if is_recent else 4) * _MIB if stack.transformer_engine else 0
    return _HANDLES * (stack.cublas_workspace or default) + transformer_engine
