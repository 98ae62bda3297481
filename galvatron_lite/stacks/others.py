"""Training frameworks outside the Megatron family. No torch here."""

from __future__ import annotations

from dataclasses import replace

from galvatron_lite.cluster.transport import Transport
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.parallelism.base import PictureSplit
from galvatron_lite.stacks.facts import (
    AMP,
    CORE_KERNELS,
    EAGER_KERNELS,
    GRAPH_KERNELS,
    HALF_GRADIENTS,
    MEGATRON_KERNELS,
    MIXED,
    SHARDED,
)
from galvatron_lite.stacks.schema import Stack

_MASKED = 5 / 32
"""Share of a sample's tokens whose logits BERT's recipes compute: max_predictions_per_seq is 20 of 128 and 80 of 512
(github.com/google-research/bert, and NVIDIA's, MXNet's, Paddle's and OneFlow's scripts after it)."""
_NVIDIA = "github.com/NVIDIA/DeepLearningExamples"

TITAN = Stack(
    name="torchtitan",
    source="github.com/pytorch/torchtitan, docs/fsdp.md: FSDP2, torch.compile by block, loss parallel",
    # "TODO: compiling loss function causes CUDA errors, turning off for now" (train.py until 2025).
    kernels=Kernels(parallel_loss=True, compiled=True, fp8_kept=False, selective="alternate"),
    states=SHARDED,
    optimizer="adamw-fused",
    zero_stage=3,
    # pipeline_parallel_microbatches: "the default value will be the number of pipeline stages, if unspecified"
    # (torchtitan/config_manager.py; parallelize takes the degree).
    splits_by_stage=True,
    copies_gathered=True,
    gathers_once=True,
    early_stop=True,
    reports_reserved=True,  # torchtitan/metrics.py: max_reserved_gib
)
"""torchtitan with torch.compile."""

TITAN_EAGER = replace(
    TITAN,
    name="torchtitan-eager",
    # norms.py, and torch.nn.RMSNorm before PyTorch 2.8: step by step in fp32.
    kernels=Kernels(fused_norm=False, parallel_loss=True, fp8_kept=False, selective="alternate"),
)
"""torchtitan without it, and FSDP2 elsewhere."""

AUTOMODEL = replace(
    TITAN,
    name="automodel",
    source="docs.nvidia.com/nemo/automodel/performance/performance-summary.md (FSDP2; mixtures: TE + DeepEP)",
    kernels=replace(TITAN.kernels, unique_dispatch=True),
    # TransformerEngine's FusedAdam with store_param_remainders and both moments in bf16, as its recipes set it.
    states=replace(SHARDED, parameters="bf16", optimizer_bytes=6),
    reports_reserved=False,
)
"""NeMo AutoModel."""

FOUNDRY = Stack(
    name="llm-foundry",
    source="github.com/mosaicml/llm-foundry, scripts/train/benchmarking: FSDP, learned positions, no biases",
    # Wqkv in one, flash-attn's cross-entropy (loss_fn: fused_crossentropy).
    kernels=Kernels(merged_projections=True, compiled_loss=True),
    states=SHARDED,
    zero_stage=3,
    biases=False,
    early_stop=True,  # activation_checkpointing_reentrant: false
)
"""MosaicML's llm-foundry over Composer."""

NANOTRON = Stack(
    name="nanotron",
    splits_by_work=True,
    source="github.com/huggingface/nanotron: bf16 parameters, fp32 gradient accumulation and master copy",
    # qkv_proj and gate_up_proj in one each, flash-attn's rotary, an eager GLUActivation; the model casts its logits to
    # fp32 and the loss subtracts the largest out of place.
    kernels=Kernels(fused_rotary=True, merged_projections=True, parallel_loss=True, regather=False, jit_loss=True),
    # FP32GradientAccumulator: fp32 buffers of all gradients beside those in bf16, which are None again after every
    # backward pass; DistributedDataParallel's buckets are no views of them (gradient_as_bucket_view is off).
    states=replace(MIXED, bucket_bytes=2, passing_bytes=2),
    optimizer="adamw-fused",
    # parallelism.tp_recompute_allgather: [Empirical] the memory of published runs that fit without it says it is off.
    regathers_at_need=True,
)
"""Hugging Face's nanotron."""

JAX = Stack(
    name="jax",
    source="github.com/NVIDIA/JAX-Toolbox (Pax and MaxText under XLA): fp32 weights, bf16 compute",
    kernels=Kernels(merged_projections=True, compiled=True, compiled_loss=True),
    states=SHARDED,
    optimizer="adamw-fused",
    early_stop=True,  # XLA removes what nothing uses
    vocab_multiple=128,
)
"""Pax and MaxText."""

META = Stack(
    name="meta",
    source="Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2: FSDP without resharding, fp32 reduction",
    kernels=replace(CORE_KERNELS, remade=True),
    states=SHARDED,
    optimizer="adamw-fused",
    zero_stage=2,
    gathers_once=True,
    # The same section: the first chunk is the embedding alone, the last one the head alone.
    virtual_stages=0,
)
"""Meta's own trainer of Llama 3."""

INTERNEVO = Stack(
    name="internevo",
    source="github.com/InternLM/InternEvo, configs/7B_sft.py: bf16, flash attention, hybrid ZeRO",
    # wqkv in one, flash-attn's rotary and cross-entropy.
    kernels=Kernels(merged_projections=True, fused_rotary=True, parallel_loss=True, inplace_loss=True),
    states=HALF_GRADIENTS,
    zero_stage=1,
)
"""InternEvo."""

ONEFLOW = Stack(
    name="oneflow",
    source="github.com/Oneflow-Inc/libai: AMP, fused bias-gelu and bias-dropout, graph mode",
    kernels=replace(MEGATRON_KERNELS, autocast=True),
    states=AMP,
    vocab_multiple=128,
    dropout=0.1,
    fuses_norms=True,
    predicted_share=_MASKED,
)
"""OneFlow and LiBai."""

TENSORFLOW = Stack(
    name="tensorflow",
    source=f"{_NVIDIA}, TensorFlow (graph mode)",
    kernels=GRAPH_KERNELS,
    states=AMP,
    dropout=0.1,
    predicted_share=_MASKED,
)
"""TensorFlow 1 and 2."""

MXNET = Stack(
    name="mxnet", source=f"{_NVIDIA}, MxNet", kernels=GRAPH_KERNELS, states=AMP, dropout=0.1, predicted_share=_MASKED
)
"""MXNet."""

MXNET_NGC = replace(
    MXNET, name="mxnet-ngc", source=f"{_NVIDIA}, MxNet (--fuse-bn-relu, --fuse-bn-add-relu)", fuses_norms=True
)
"""NVIDIA's MXNet with its own recipes."""

PADDLE = Stack(
    name="paddle",
    source="github.com/PaddlePaddle/Paddle",
    kernels=EAGER_KERNELS,
    states=AMP,
    dropout=0.1,
    fuses_norms=True,
    predicted_share=_MASKED,
)
"""PaddlePaddle."""

PYTORCH = Stack(
    name="pytorch-ddp",
    # apex: opt_level O2 (parameters in half precision beside a master copy), FusedLayerNorm, FusedLAMB; softmax takes
    # what it is given.
    source=f"{_NVIDIA}, PyTorch: DistributedDataParallel, apex amp O2 (run_pretraining.py, run_squad.py)",
    kernels=replace(EAGER_KERNELS, autocast=False, fused_activation=True, fused_softmax=True),
    states=HALF_GRADIENTS,
    optimizer="adamw-fused",
    dropout=0.1,
    predicted_share=_MASKED,
)
"""PyTorch's DistributedDataParallel in NVIDIA's examples."""

LAMBDA = replace(
    PYTORCH,
    source="github.com/lambdal/deeplearning-benchmark, pytorch/scripts: NVIDIA's examples, BERT fine-tuned on SQuAD",
    predicted_share=0.0,
)
"""The same as Lambda's benchmark runs them."""

TIMM = Stack(
    name="timm",
    source="github.com/huggingface/pytorch-image-models, benchmark.py; query, key and value in one",
    kernels=replace(EAGER_KERNELS, merged_projections=True),
    states=AMP,
    optimizer="sgd",
)
"""timm's benchmark script."""

CHAINER = Stack(
    name="chainer",
    source="github.com/chainer/chainer, ChainerMN's functions (MPI); Kahira et al. 2021 (arXiv 2104.09075), section 5",
    kernels=replace(EAGER_KERNELS, autocast=False),
    states=AMP,
    dropout=0.1,
    # Halos, layer-wise collectives and gathers are mpi4py calls on device buffers, without GPUDirect; about 3 ms a
    # message (paraDL-analysis, parallel_analysis.py). NCCL 2.4.8 sums gradients: [Empirical] over one adapter, as VGG
    # on two nodes of ABCI says (553 MB in 0.19 s), whereas ResNet-50's gathers by filters need both (report, table 8).
    transport=Transport(direct=False, sum_rings=1, staged=("spatial", "channel", "layout"), message=3e-3),
    pictures=PictureSplit(gathers_each=True, own_statistics=True, whole_weights=True),
)
"""Chainer and ChainerMN."""

CHAINER_NCCL = replace(
    CHAINER,
    name="chainer-nccl",
    source=f"{CHAINER.source}; layer-wise collectives by NCCL 2.4.8",
    transport=replace(CHAINER.transport, staged=("spatial", "layout")),
)
"""The same with layer-wise collectives of its own, by NCCL, as the measurements of ParaDL's report ran."""

GPIPE = Stack(
    name="torchgpipe",
    source="Kim et al. 2020 (arXiv 2004.09910)",
    kernels=EAGER_KERNELS,
    states=AMP,
    optimizer="sgd",
)
"""torchgpipe."""
