"""A software stack as the cost model sees it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.cluster.transport import STRAIGHT, Transport
from galvatron_lite.files import STRICT
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.parallelism.base import SPARING, PictureSplit

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """In which precision the states of training are held and moved.

    Attributes:
        parameters: precision of parameters at rest.
        gradients: precision of gradients at rest (``fp32`` for Megatron's main gradients).
        reduce: precision in which gradients are reduced.
        gather: precision in which ZeRO gathers parameters.
        optimizer_bytes: bytes of optimizer state for one parameter item: two fp32 moments 8, with an fp32 master 12.
        buffered_gradients: whether gradients live in one buffer throughout (data parallel buckets), or form anew in
            every step.
        bucket_bytes: of further gradient buffers, bytes for one parameter item, where replicas sum gradients.
        passing_bytes: of gradients that form in every backward pass and are gone at its end, bytes for one parameter
            item (what is added to the buffers afterwards).
        copies: whether weights are cast to the precision of compute once a step, and the copies held through it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    parameters: str = "fp32"
    gradients: str = "fp32"
    reduce: str = "fp32"
    gather: str = "bf16"
    optimizer_bytes: int = 8
    buffered_gradients: bool = True
    bucket_bytes: int = 0
    passing_bytes: int = 0
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One training framework and version.

    Attributes:
        name: ``megatron-core``; key of its calibrated constants.
        source: where the facts below come from (documentation, default arguments).
        kernels: which kernels it runs.
        states: how it holds states.
        fp16_states: the same under fp16 with loss scaling, where it differs.
        constants: calibrated costs.
        optimizer: name of the optimizer's implementation (a key of ``OPTIMIZERS``).
        vocab_multiple: the vocabulary is padded to a multiple of this times the tensor degree; 1: not padded.
        uneven_shares: whether tensor slices of an extent that does not divide differ by one; all wait for the slower.
        parallel_vocabulary: whether embedding and head are split over the tensor group.
        dropout: probability its recipes train plain (not gated) transformers with.
        zero_stage: of data parallelism where a run does not say.
        positions: how plain (not gated) decoders of its recipes tell places.
        biases: whether plain decoders of its recipes have biases.
        virtual_stages: of interleaved schedules that do not say how many; 0: one block each (2: torchtitan's default).
        copies_gathered: whether tensors whose tokens are gathered or scattered are copied besides, samples coming
            first (``all_gather_tensor`` and ``reduce_scatter_tensor`` along any but the first dimension).
        splits_by_stage: whether a pipelined run that does not say its micro-batch has as many of them as there are
            pipeline ranks, else one sample each.
        gathers_once: whether sharded parameters are gathered and gradients reduced once a step under a pipeline, not in
            every micro-batch (torch.distributed.pipelining, ``backward_maybe_with_nosync``).
        predicted_share: of a masked language model's tokens, how many logits are computed for.
        early_stop: whether full recomputation ends where backward has what it needs, so that a block's last matmul is
            not run again (``torch.utils.checkpoint`` without reentry: ``set_checkpoint_early_stop``, on by default).
        transformer_engine: whether matmuls of blocks go through TransformerEngine.
        cublas_workspace: bytes of cuBLAS's workspace a handle where ``CUBLAS_WORKSPACE_CONFIG`` is set; 0: PyTorch's.
        regathers_at_need: whether inputs gathered over the tensor group are kept, but gathered again in backward by
            runs that would not fit otherwise (an option of the software that runs do not state).
        fuses_norms: whether batch normalisation, addition and ReLU are one kernel, where there is one for it
            (``model.shapes.images.fusion``).
        transport: how it sends.
        pictures: how it splits pictures.
        reports_reserved: whether the memory it reports is what PyTorch's allocator reserved, not what it allocated.
        expert_tensor: devices that share the matmuls of one expert where experts are spread; 0: the tensor group.
        splits_by_work: whether pipeline stages are cut by the work of their layers, the head's too, not their number.
        scattered_sends: whether tensor groups share the sending of whole boundary tensors between pipeline stages.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    source: str = ""
    kernels: Kernels = Kernels()  # noqa: RUF009  frozen
    states: StateLayout = StateLayout()
    fp16_states: StateLayout | None = None
    constants: StackConstants = StackConstants()  # noqa: RUF009  frozen
    optimizer: str = "adamw"
    vocab_multiple: int = 1
    uneven_shares: bool = False
    parallel_vocabulary: bool = True
    dropout: float = 0.0
    zero_stage: int = 0
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    biases: bool = True
    predicted_share: float = 1.0
    virtual_stages: int = 2
    copies_gathered: bool = False
    splits_by_stage: bool = False
    gathers_once: bool = False
    early_stop: bool = False
    scattered_sends: bool = False
    splits_by_work: bool = False
    expert_tensor: int = 1
    transformer_engine: bool = False
    cublas_workspace: int = 0
    regathers_at_need: bool = False
    reports_reserved: bool = False
    fuses_norms: bool = False
    transport: Transport = STRAIGHT
    pictures: PictureSplit = SPARING
