"""Which kernels the training software runs where there are several ways. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from galvatron_lite.files import STRICT

if TYPE_CHECKING:
    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels run; decides the operators of a layer and what autograd keeps of them.

    Attributes:
        flash_attention: one fused kernel that keeps no score matrix; else scores, softmax and dropout are calls of
            their own and their results are kept.
        fused_softmax: of plain attention: scale, mask and softmax are one kernel that keeps its output only.
        fused_norm: a normalisation is one kernel.
        fused_activation: bias and activation (GELU, SwiGLU's product too) are one kernel that keeps its input only.
        fused_residual: bias, dropout and residual addition are one kernel.
        fused_rotary: rotary positions are one kernel.
        parallel_loss: logits stay split over the tensor group and the loss is computed on the parts.
        fused_loss: cross-entropy works in place on the fp32 logits and keeps no copy of them.
        compiled: chains of element-wise operators run as one kernel (torch.compile, XLA).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    flash_attention: bool = True
    fused_softmax: bool = False
    fused_norm: bool = True
    fused_activation: bool = False
    fused_residual: bool = False
    fused_rotary: bool = False
    parallel_loss: bool = False
    fused_loss: bool = False
    compiled: bool = False
