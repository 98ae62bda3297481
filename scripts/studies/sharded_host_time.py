"""Host time that sharded tensors add to a call and to its backward pass: convolutions, batch norm, ReLU, addition.

python scripts/studies/sharded_host_time.py

Two ranks share the height of a small image; the other rank is a group without communication, so only this process's
Python and launches count. The plain call works on a tensor of the shard's size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardSpec, from_local, to_local
from galvatron_lite.parallelism.spatial.apply import bind_modules
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES

ROUNDS, CALLS = 15, 200
CHANNELS, EXTENT = 4, 8


def seconds_a_call(run: Callable[[], object]) -> float:
    """The least mean over rounds, of processor time: the machine may be busy."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            run()
        best = min(best, (time.process_time() - start) / CALLS)
    return best


def both(run: Callable[[Tensor], Tensor], image: Tensor, leaves: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of a call, and of its backward pass to those leaves that it uses."""
    output = to_local(run(image))
    back = partial(torch.autograd.grad, output, leaves, torch.ones_like(output), retain_graph=True, allow_unused=True)
    return seconds_a_call(partial(run, image)), seconds_a_call(back)


def main() -> None:
    torch.set_num_threads(1)
    local = torch.randn(1, CHANNELS, EXTENT, EXTENT, requires_grad=True)
    spec = ShardSpec(2, 2 * EXTENT, ShapeOnlyAxisGroup(2))
    sharded = from_local(local.view_as(local), (spec,), PIXELS_RULES)
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, requires_grad=True)
    scale, shift = torch.ones(CHANNELS, requires_grad=True), torch.zeros(CHANNELS, requires_grad=True)
    running = torch.zeros(CHANNELS), torch.ones(CHANNELS)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "convolution with borders": lambda x: functional.conv2d(x, weight, None, 1, 1),
        "convolution of 1x1": lambda x: functional.conv2d(x, weight[:, :, :1, :1]),
        "batch norm": lambda x: functional.batch_norm(x, *running, scale, shift, True),
        "max pool with borders": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "relu": functional.relu,
        "add": lambda x: x + x,
    }
    modules = {
        "module with borders": nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1, bias=False),
        "batch norm module": nn.BatchNorm2d(CHANNELS),
    }
    # first without what split_pixels binds
    leaves = {name: [local, *module.parameters()] for name, module in modules.items()}
    plain = {
        name: both(run, local, leaves.get(name, [local, weight, scale, shift]))
        for name, run in (functions | modules).items()
    }
    for module in modules.values():
        bind_modules(module)
    for name, run in (functions | modules).items():
        found = both(run, sharded, leaves.get(name, [local, weight, scale, shift]))
        pairs = zip(plain[name], found, strict=True)
        (there, more), (back, again) = [(1e6 * one, 1e6 * (two - one)) for one, two in pairs]
        print(f"{name}: {there:.0f} us plain, {more:+.0f} us on shards; backward {back:.0f} us, {again:+.0f} us")


if __name__ == "__main__":
    main()
