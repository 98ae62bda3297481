"""Bytes that libraries take from PyTorch's allocator for themselves, so that they count as allocated. No torch here."""

from __future__ import annotations

import re

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.stacks.schema import Stack

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
