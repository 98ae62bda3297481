"""What training frameworks decide that costs depend on, and where each fact comes from. No torch here.

The facts are those of the framework's defaults and published recipes; what a single run says of itself (attention
kernel, recomputation, precision) goes before them. Calibrated constants are kept apart (``calibration``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from galvatron_lite.model.kernels import Kernels
from galvatron_lite.stacks.schema import Stack, StateLayout

_MEGATRON_KERNELS = Kernels(
    flash_attention=False,
    fused_softmax=True,
    fused_norm=True,
    fused_activation=True,
    fused_residual=True,
    parallel_loss=True,
    fused_loss=True,
)
"""Megatron-LM's own kernels: masked_softmax_fusion, persistent layer norm, bias_gelu_fusion, bias_dropout_fusion and
vocab_parallel_cross_entropy are on by default (megatron/training/arguments.py)."""

_CORE_KERNELS = replace(_MEGATRON_KERNELS, flash_attention=True, fused_rotary=True)
"""Megatron-Core over Transformer Engine: fused attention and rotary positions beside the above."""

_EAGER = Kernels(flash_attention=False, fused_norm=True)
"""PyTorch before 2.0 and frameworks alike: one kernel an operator, norms and cross-entropy in one each."""

_GRAPH = replace(_EAGER, fused_activation=True, fused_residual=True)
"""Frameworks that fuse element-wise chains themselves (TensorFlow grappler, OneFlow, MXNet pointwise fusion)."""

_MIXED = StateLayout(parameters="bf16", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=12)
"""Half-precision parameters with fp32 main gradients, master copy and moments: 18 bytes a parameter item
(Megatron-Core's distributed optimizer documentation, table "bf16 param, fp32 grads")."""

_HALF_GRADIENTS = replace(_MIXED, gradients="bf16", reduce="bf16")
"""Half-precision gradient buffers too: 16 bytes an item (Rajbhandari et al. 2020, section 3.1)."""

_SHARDED = StateLayout(
    parameters="fp32", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=8, buffered_gradients=False
)
"""FSDP with mixed precision: fp32 shards gathered in bf16; gradients form in backward (docs.pytorch.org, FSDP)."""

_AMP = StateLayout(parameters="fp32", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=8)
"""DistributedDataParallel under autocast: everything at rest in fp32, gradients in buckets."""

GALVATRON = Stack(
    name="galvatron",
    source="galvatron_lite/runtime",
    kernels=Kernels(),
    states=_SHARDED,
    optimizer="adamw",
)
"""The project's own runtime: FSDP2 and DTensor under PyTorch's eager mode."""

DEFAULT = Stack(
    name="default",
    source="what most of the frameworks below have in common",
    kernels=_CORE_KERNELS,
    states=_MIXED,
    vocab_multiple=128,
)
"""A framework of which nothing is known."""

_MEGATRON = Stack(
    name="megatron-lm",
    source="github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py (defaults)",
    kernels=_MEGATRON_KERNELS,
    states=_MIXED,
    optimizer="adam-fused",
    vocab_multiple=128,
    dropout=0.1,
)
_CORE = replace(
    _MEGATRON,
    name="megatron-core",
    source="docs.nvidia.com/nemo-framework (performance recipes), Megatron-Core over Transformer Engine",
    kernels=_CORE_KERNELS,
    zero_stage=1,
    dropout=0.0,
)
_DEEPSPEED = replace(
    _MEGATRON,
    name="megatron-deepspeed",
    source="github.com/microsoft/Megatron-DeepSpeed (defaults of its Megatron-LM arguments); no ZeRO unless configured",
    states=_HALF_GRADIENTS,
)
_TITAN = Stack(
    name="torchtitan",
    source="github.com/pytorch/torchtitan, docs/fsdp.md and train_configs (FSDP2, torch.compile per block, loss parallel)",
    kernels=Kernels(flash_attention=True, parallel_loss=True, compiled=True),
    states=_SHARDED,
    optimizer="adamw-fused",
    zero_stage=3,
)

_CATALOG: tuple[tuple[str, Stack], ...] = (
    (
        r"megatron-?deepspeed.*bloom|bloom.*megatron-?deepspeed",
        replace(
            _DEEPSPEED,
            name="megatron-deepspeed-bloom",
            source="github.com/bigscience-workshop/bigscience, train/tr11-176B-ml: ALiBi, bf16 optimizer with fp32 gradient "
            "accumulation, ZeRO-1",
            states=_MIXED,
            zero_stage=1,
            dropout=0.0,
            positions="none",
        ),
    ),
    (r"megatron-?deepspeed|deepspeed", _DEEPSPEED),
    (
        r"megatron-?lm ci",
        replace(
            _MEGATRON,
            name="megatron-ci",
            source="github.com/NVIDIA/Megatron-LM, tests/functional_tests (arguments of each test case)",
        ),
    ),
    (
        r"megatron-?lm fork",
        replace(
            _MEGATRON,
            name="megatron-zero-bubble",
            source="github.com/sail-sg/zero-bubble-pipeline-parallelism (examples/pretrain_zero_bubble.sh: fp16, dropout 0)",
            dropout=0.0,
        ),
    ),
    (r"automodel", replace(_TITAN, name="automodel", source="docs.nvidia.com/nemo/automodel (FSDP2)")),
    (
        r"megatron-?bridge",
        replace(_CORE, name="megatron-bridge", source="github.com/NVIDIA-NeMo/Megatron-Bridge, scripts/performance"),
    ),
    (r"^nemo$", replace(_CORE, name="nemo", source="github.com/NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3")),
    (r"nemo|megatron-?core", _CORE),
    (
        r"megascale",
        replace(
            _CORE,
            name="megascale",
            source="Jiang et al. 2024 (arXiv 2402.15627), sections 3.1-3.6: parallel block, sliding-window attention, LAMB",
        ),
    ),
    (r"megatron", _MEGATRON),
    (
        r"llm-?foundry|composer",
        Stack(
            name="llm-foundry",
            source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking: no biases, learned positions, FSDP",
            kernels=Kernels(flash_attention=True, fused_norm=True),
            states=_SHARDED,
            zero_stage=3,
            biases=False,
        ),
    ),
    (r"torchtitan.*compile", _TITAN),
    (
        r"torchtitan|fsdp",
        replace(_TITAN, name="torchtitan-eager", kernels=Kernels(flash_attention=True, parallel_loss=True)),
    ),
    (
        r"nanotron",
        Stack(
            name="nanotron",
            source="github.com/huggingface/nanotron: bf16 parameters, fp32 gradient accumulation and master copy",
            kernels=Kernels(flash_attention=True, fused_norm=True, fused_activation=True, parallel_loss=True),
            states=_MIXED,
            optimizer="adamw-fused",
        ),
    ),
    (
        r"\bpax\b|maxtext|\bjax\b",
        Stack(
            name="jax",
            source="github.com/NVIDIA/JAX-Toolbox (Pax and MaxText under XLA): fp32 weights, bf16 compute",
            kernels=Kernels(
                flash_attention=True, fused_activation=True, fused_residual=True, fused_loss=True, compiled=True
            ),
            states=_SHARDED,
            optimizer="adamw-fused",
            vocab_multiple=128,
        ),
    ),
    (
        r"meta internal",
        Stack(
            name="meta",
            source="Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2: FSDP without resharding, fp32 reduction",
            kernels=_CORE_KERNELS,
            states=_SHARDED,
            optimizer="adamw-fused",
            zero_stage=2,
        ),
    ),
    (
        r"internevo|internlm",
        Stack(
            name="internevo",
            source="github.com/InternLM/InternEvo, configs/7B_sft.py: bf16, flash attention, hybrid ZeRO",
            kernels=Kernels(flash_attention=True, fused_norm=True, parallel_loss=True),
            states=_HALF_GRADIENTS,
            zero_stage=1,
        ),
    ),
    (
        r"libai|oneflow",
        Stack(
            name="oneflow",
            source="github.com/Oneflow-Inc/libai, docs: AMP, fused bias-gelu and bias-dropout, graph mode",
            kernels=replace(_MEGATRON_KERNELS, parallel_loss=True),
            states=_AMP,
            vocab_multiple=128,
            dropout=0.1,
        ),
    ),
    (r"timm", Stack(name="timm", source="github.com/huggingface/pytorch-image-models, benchmark.py", kernels=_EAGER, states=_AMP, optimizer="sgd")),
    (r"chainer", Stack(name="chainer", source="github.com/chainer/chainer (eager, fp32)", kernels=_EAGER, states=_AMP, dropout=0.1)),
    (r"torchgpipe", Stack(name="torchgpipe", source="Kim et al. 2020 (arXiv 2004.09910)", kernels=_EAGER, states=_AMP, optimizer="sgd")),
    (
        r"tensorflow",
        Stack(name="tensorflow", source="github.com/NVIDIA/DeepLearningExamples, TensorFlow (graph mode)", kernels=_GRAPH, states=_AMP, dropout=0.1),
    ),
    (r"mxnet", Stack(name="mxnet", source="github.com/NVIDIA/DeepLearningExamples, MxNet", kernels=_GRAPH, states=_AMP, dropout=0.1)),
    (r"paddle", Stack(name="paddle", source="github.com/PaddlePaddle/Paddle", kernels=_EAGER, states=_AMP, dropout=0.1)),
    (
        r"pytorch|\bddp\b",
        Stack(
            name="pytorch-ddp",
            source="github.com/NVIDIA/DeepLearningExamples, PyTorch: DistributedDataParallel, AMP, fused LAMB",
            kernels=replace(_EAGER, fused_activation=True),
            states=_AMP,
            optimizer="adamw-fused",
            dropout=0.1,
        ),
    ),
)  # fmt: skip

STACKS: dict[str, Stack] = {stack.name: stack for _, stack in _CATALOG} | {
    GALVATRON.name: GALVATRON,
    DEFAULT.name: DEFAULT,
}
"""Every stack by name."""


def match_stack(framework: str) -> Stack:
    """The stack that a framework's name means; ``DEFAULT`` where it is not known."""
    text = framework.lower()
    for pattern, stack in _CATALOG:
        if re.search(pattern, text):
            return stack
    return DEFAULT
