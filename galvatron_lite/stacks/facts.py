"""What several training frameworks have in common: kernels and layouts of states. No torch here."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.model.kernels import Kernels
from galvatron_lite.stacks.schema import StateLayout

MEGATRON_KERNELS = Kernels(
    flash_attention=False,
    fused_softmax=True,
    fused_norm=True,
    fused_activation=True,
    fused_residual=True,
    merged_projections=True,
    parallel_loss=True,
    fused_loss=True,
    regather=True,
    regather_recomputed=True,
    selective="attention",
)
"""Megatron-LM's own kernels: masked_softmax_fusion, persistent layer norm, bias_gelu_fusion, bias_dropout_fusion and
vocab_parallel_cross_entropy are on by default (megatron/training/arguments.py); sequence parallelism and selective
recomputation as in Korthikanti et al. 2022."""

CORE_KERNELS = replace(MEGATRON_KERNELS, flash_attention=True, fused_rotary=True)
"""Megatron-Core over Transformer Engine: fused attention and rotary positions beside the above."""

EAGER_KERNELS = Kernels(flash_attention=False, autocast=True)
"""PyTorch before 2.0 and frameworks alike: one kernel an operator, norms and cross-entropy in one each; under mixed
precision weights are cast at every use."""

GRAPH_KERNELS = replace(EAGER_KERNELS, fused_activation=True, fused_residual=True)
"""Frameworks that fuse element-wise chains themselves (TensorFlow grappler, OneFlow, MXNet pointwise fusion)."""

MIXED = StateLayout(parameters="bf16", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=12)
"""Half-precision parameters with fp32 main gradients, master copy and moments: 18 bytes a parameter item
(Megatron-Core's distributed optimizer documentation, table "bf16 param, fp32 grads")."""

HALF_GRADIENTS = replace(MIXED, gradients="bf16", reduce="bf16")
"""Half-precision gradient buffers too: 16 bytes an item (Rajbhandari et al. 2020, section 3.1)."""

SHARDED = StateLayout(
    parameters="fp32", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=8, buffered_gradients=False
)
"""FSDP with mixed precision: fp32 shards gathered in bf16; gradients form in backward (docs.pytorch.org, FSDP)."""

AMP = StateLayout(parameters="fp32", gradients="fp32", reduce="fp32", gather="bf16", optimizer_bytes=8)
"""DistributedDataParallel under autocast: everything at rest in fp32, gradients in buckets."""
