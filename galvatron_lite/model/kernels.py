"""The kernels of the training software, where an operation has several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from galvatron_lite.files import Strict

Selective = Literal["operators", "alternate", "attention", "norms"]
"""What selective recomputation recomputes.

operators: everything but matmuls and attention (PyTorch's per-operator policy).
alternate: as ``operators``, and every second matmul of a layer (torchtitan's policy ``op``).
attention: scores, softmax, dropout and context (Korthikanti et al. 2022, section 5; Megatron's
    ``--recompute-granularity selective``).
norms: normalisations and activations (Megatron's ``--recompute-modules layernorm moe_act``).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(Strict):
    """The kernels of a layer, which decide its operators and what autograd keeps."""

    # attention is one fused kernel that keeps no score matrix; else scores, softmax and dropout are separate operators
    # whose results are kept
    flash_attention: bool = True
    # of plain attention: scale, mask and softmax are one kernel that keeps its output only; else there are three, and
    # under ``autocast`` softmax runs and is kept in fp32
    fused_softmax: bool = False
    # a relative bias of scores and the mask are added in a separate tensor that the fused kernel keeps (PyTorch's
    # ``scaled_dot_product_attention``); else the kernel adds the bias
    bias_in_mask: bool = False
    fused_norm: bool = True  # a normalisation is one kernel
    # bias and activation (GELU, SwiGLU's product too) are one kernel that keeps its input only
    fused_activation: bool = False
    # of a gated MLP only the input of the activation function is kept, from which backward computes its result again
    # (``model.gates``)
    remade_gates: bool = False
    fused_residual: bool = False  # bias, dropout and residual addition are one kernel
    fused_rotary: bool = False  # rotary positions are one kernel
    # query, key and value are one matmul, and so are a gated MLP's gate and up projections
    merged_projections: bool = False
    # logits stay split over the tensor group and the loss is computed on the parts; embedding and head then take part
    # in sequence parallelism too
    parallel_loss: bool = False
    fused_loss: bool = False  # cross-entropy works in place on the fp32 logits and keeps no copy of them
    # as ``fused_loss``, but the exponentials take a second fp32 tensor beside the copy (Megatron's
    # ``--cross-entropy-loss-fusion``, TorchScript)
    jit_loss: bool = False
    compiled_loss: bool = False  # cross-entropy reads the logits as they are (no fp32 copy) and keeps them
    inplace_loss: bool = False  # cross-entropy reads the logits as they are, and their gradient takes their place
    # chains of element-wise operators run as one kernel (torch.compile, XLA); what only such chains read in backward is
    # not kept if they can compute it from other tensors that are kept
    compiled: bool = False
    # under sequence parallelism a share of the input of a column-split matmul is kept, and gathered again in backward
    # (Korthikanti et al. 2022, section 4.2.2)
    regather: bool = False
    regather_recomputed: bool = False  # also where the layer is recomputed, which gathers it anyway (Megatron)
    # parameters are fp32 and cast to the precision of compute at each use, and normalisations run in fp32; else
    # parameters are in the precision of compute
    autocast: bool = False
    fp8: bool = False  # matmuls of blocks run in fp8; separate kernels cast their inputs
    fp8_kept: bool = True  # such a matmul keeps the fp8 copy of its input instead of the input (TransformerEngine)
    # fp8 casts scale row by row: inputs are gathered over the tensor group before they are cast, not after
    fp8_rows: bool = False
    # the tensor group shares tokens inside the experts, too, and each device has complete experts (Megatron-Core's
    # ``--expert-tensor-parallel-size 1``); else every device of the group works on all tokens with its slice of each
    # expert
    folded_experts: bool = False
    # outputs of normalisations and activations are not kept but computed again in backward, whatever else is recomputed
    # (a backward pass written by hand: Touvron et al. 2023, arXiv 2302.13971, section 2.4)
    remade: bool = False
    # a token is sent once to a node and once to a rank, not once to each of its experts there (DeepEP)
    unique_dispatch: bool = False
    selective: Selective = "operators"  # what selective recomputation recomputes


EAGER = Kernels(regather=True, remade_gates=True)
"""PyTorch's kernels on a CUDA device, without extensions, as the runtime splits them."""
