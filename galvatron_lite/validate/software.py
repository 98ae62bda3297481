"""The software a published run trains with: its framework's stack, changed by what the run says of itself."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import constants_for_stack
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import Stack, StateLayout
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.validate.plans import gathers_once, integer_argument
from galvatron_lite.validate.rows import PublishedRun

_OPTIMIZERS = (
    ("momentum", "sgd"),
    ("rmsprop", "sgd"),  # one state an item, too
    ("sgd", "sgd-plain"),
    ("lamb", "lamb"),
    ("decoupled", "adamw-loop"),
    ("fused", "adamw-fused"),
)
"""Optimizers by words that name an implementation; Composer's decoupled AdamW goes through the tensors one by one
(github.com/mosaicml/composer, composer/optim/decoupled_weight_decay.py). Else the stack's own runs."""

_ASYNC_TENSOR = {"tensor": 0.2, "tensor-async": 0.2}
"""[Empirical] share of gathers and scatters that PyTorch's asynchronous tensor parallelism hides, what smaller matmuls
lose taken off: they run piece by piece beside the matmuls that make or take them, and no copy into the order of tokens
follows (discuss.pytorch.org/t/209487; a tenth of the step of Llama 3 8B and 70B all told)."""

_HIDDEN_EXPERTS = 0.8
"""[Empirical] share of the exchange of tokens that Megatron-Core's ``--overlap-moe-expert-parallel-comm`` hides:
forward of one micro-batch runs beside backward of another (arXiv 2412.19437, section 3.2.1: DualPipe hides nearly all).
"""

_SHARDED = {"zero": 0.9}
"""[Empirical] share that Megatron-FSDP hides, which prefetches parameters and reduces gradients beside compute whatever
the options of Megatron-LM's own data parallelism say (Megatron-Core's user guide, "Megatron FSDP"), as PyTorch's
does."""

_UNIQUE_DISPATCH = ("deepep", "hybridep")
"""Dispatchers that send a token once to a rank and to a node (github.com/deepseek-ai/DeepEP)."""


def stack_of(run: PublishedRun, precision: str, calibration: Calibration) -> Stack:
    """The run's framework with what the run itself says: attention kernel, precision of states, optimizer.

    Variants of the constants have names of their own: prices are remembered by them.
    """
    stack = match_stack(run.framework)
    optimizer, overlapped = optimizer_of(run.optimizer, stack), "asynctp" in (run.precision or "").lower()
    # Megatron-LM's distributed optimizer is stage 1: what shards parameters is Megatron-FSDP.
    megatron = stack.name in ("megatron-lm", "megatron-ci", "megatron-core", "megatron-bridge")
    variants = {
        "async tensor": _ASYNC_TENSOR if overlapped else {},
        "expert overlap": {"expert": _HIDDEN_EXPERTS} if "a2a overlap" in run.remarks else {},
        "sharded": _SHARDED if megatron and (run.zero_stage or 0) > 1 else {},
    }
    constants = constants_for_stack(calibration, stack.name)
    for hidden in variants.values():
        constants = replace(constants, hidden={**constants.hidden, **hidden})
    return replace(
        stack,
        name=", ".join((stack.name, *(name for name, hidden in variants.items() if hidden))),
        kernels=_kernels(run, stack, precision),
        copies_gathered=stack.copies_gathered and not overlapped,
        states=_states(run, stack, precision, optimizer),
        optimizer=optimizer,
        constants=constants,
    )


def optimizer_of(text: str | None, stack: Stack) -> str:
    """The optimizer's implementation by what a run calls it."""
    said = (text or "").lower()
    return next((name for word, name in _OPTIMIZERS if word in said), stack.optimizer)


def _kernels(run: PublishedRun, stack: Stack, precision: str) -> Kernels:
    """Attention, selective recomputation and loss as the run says; nothing is cast where compute is in 32 bits.

    What selective recomputation runs again is told by the modules a run names, and Megatron-LM's fused cross-entropy by
    its argument ``--cross-entropy-loss-fusion`` (native, or Transformer Engine's). torchtitan compiles its loss since
    it has ``float8.force_recompute_fp8_weight_in_bwd`` (2025).
    """
    kernels = stack.kernels
    if run.flash_attn is not None:
        kernels = replace(kernels, flash_attention=run.flash_attn)
    if _is_fp32(precision):
        kernels = replace(kernels, autocast=False)
    if precision == "fp8-rowwise":
        kernels = replace(kernels, fp8_rows=True)
    if "norm" in (run.act_ckpt or "").lower():
        kernels = replace(kernels, selective="norms")
    if "force_recompute_fp8_weight_in_bwd" in run.remarks:
        kernels = replace(kernels, compiled_loss=True)
    if "cross-entropy-loss-fusion=true" in run.remarks:
        te = "cross-entropy-fusion-impl=te" in run.remarks
        kernels = replace(kernels, inplace_loss=te, jit_loss=not te)
    if (run.n_experts or 0) > 1:
        kernels = replace(kernels, folded_experts=folds_experts(run))
    if any(word in run.remarks for word in _UNIQUE_DISPATCH):
        kernels = replace(kernels, unique_dispatch=True)
    return kernels


def folds_experts(run: PublishedRun) -> bool:
    """Whether experts are whole on their devices: as a run says, else where its devices leave no other way."""
    tensor, spread = run.tp or 1, run.ep or 1
    said = integer_argument(run.remarks, "expert-tensor-parallel-size")
    left = (run.n_gpus or 1) // ((run.pp or 1) * spread)
    return tensor > 1 and min(said or tensor, max(left, 1)) == 1


def _states(run: PublishedRun, stack: Stack, precision: str, optimizer: str) -> StateLayout:
    """States at rest; parameters gathered for a whole step are there in the gathered precision, beside fp32 shards."""
    said = (run.precision or "").lower()
    states = (stack.fp16_states if said == "fp16" else None) or stack.states
    if gathers_once(run, stack) and states.parameters == "fp32":
        states = replace(states, parameters=states.gather, optimizer_bytes=states.optimizer_bytes + 4)
    if _is_fp32(precision) or "fp32+" in said:
        gather = "fp32" if _is_fp32(precision) else states.gather
        states = replace(states, parameters="fp32", gradients="fp32", reduce="fp32", gather=gather, optimizer_bytes=8)
    elif "fp32 grad" in said:
        states = replace(states, gradients="fp32", reduce="fp32")
    elif "pure" in said:
        # Composer's mixed precision PURE reduces in the precision of compute, DEFAULT in fp32.
        states = replace(states, reduce="bf16")
    moments = -4 if optimizer.startswith("sgd") else 0
    return replace(states, optimizer_bytes=states.optimizer_bytes + moments)


def _is_fp32(precision: str) -> bool:
    return ITEM_BYTES.get(precision) == 4
