"""Whether the tensor group may also share the tokens, and where each region must gather them.

The proof: the block is run on each half of the tokens. Where a region takes its input, the half must equal that half
of the unsplit run's input; the region then gets all tokens, and its result is cut to the half again. If the block's
output equals that half of the unsplit output, everything outside the regions works token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any

from torch import Tensor, nn

from galvatron_lite.parallelism.tensor.infer_check import Mismatch, close
from galvatron_lite.parallelism.tensor.infer_flow import ReferenceRun, identical_argument
from galvatron_lite.parallelism.tensor.infer_probe import Handler, LowRank, Probe, describe
from galvatron_lite.parallelism.tensor.regions import Region, TokenGather

MAX_TRIALS = 64
"""Most combinations of gathering places that are tried."""


def place_gathers(probe: Probe, reference: ReferenceRun, regions: Sequence[Region]) -> tuple[Region, ...] | str:
    """The regions with the place where each gathers tokens, or why tokens cannot be shared."""
    shape = probe.hidden.shape
    if probe.hidden.dim() != 3 or any(output.shape != shape for output in reference.outputs):
        return "its hidden states are not all [batch, tokens, hidden]"
    if shape[1] < 2 or shape[1] % 2:
        return f"{shape[1]} tokens cannot be halved to check it"
    why = ""
    for places in islice(product(*(list(_places(reference, region)) for region in regions)), MAX_TRIALS):
        placed = tuple(replace(region, gather=place) for region, place in zip(regions, places, strict=True))
        wrong = _check_halves(probe, reference, placed)
        if not wrong:
            return placed
        why = why or wrong
    return why


def _places(reference: ReferenceRun, region: Region) -> Iterator[TokenGather | None]:
    """The columns themselves, then modules around them that take in the same tensor, innermost first."""
    yield None
    if _reads_several(reference, region):
        return
    tensor = reference.calls[region.columns[0].path][0].tensor
    path = region.columns[0].path.rpartition(".")[0]
    while path:
        argument = identical_argument(reference, path, tensor)
        if argument is not None and all(column.path.startswith(f"{path}.") for column in region.columns):
            yield TokenGather(path, argument)
        path = path.rpartition(".")[0]


def _reads_several(reference: ReferenceRun, region: Region) -> bool:
    """Whether columns of a region take in unlike tensors, as attention to another sequence does.

    A module around them then has a tensor whose gradient the gathering of tokens would not sum.
    """
    return len({id(reference.calls[column.path][0].tensor) for column in region.columns}) > 1


def _check_halves(probe: Probe, reference: ReferenceRun, regions: Sequence[Region]) -> str:
    half = probe.hidden.shape[1] // 2
    for start in (0, half):
        hooks = [_install_gather(probe.block, reference, region, start, half) for region in regions]
        handlers: dict[str, Handler] = {}
        for region in regions:
            for column in region.columns:
                handlers[column.path] = partial(_column, reference, column.path, region.gather is None, start, half)
            handlers[region.row] = partial(_row, reference, region.row, start, half)
        try:
            outputs = probe.run(handlers, probe.hidden.narrow(1, start, half))
            for output, expected in zip(outputs, reference.outputs, strict=True):
                _expect(output, expected.narrow(1, start, half))
        except Exception as error:  # the block is the user's code: any error means that it cannot run this way
            return str(error) if isinstance(error, Mismatch) else describe(error)
        finally:
            for hook in hooks:
                hook.remove()
    return ""


def _install_gather(block: nn.Module, reference: ReferenceRun, region: Region, start: int, length: int) -> Any:
    """Hook that gives a module around the region all tokens."""
    whole = reference.calls[region.columns[0].path][0].tensor
    gather = region.gather
    if gather is None:
        return block.register_forward_pre_hook(lambda *_: None)

    def give(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: Any = kwargs if isinstance(gather.argument, str) else args
        _expect(values[gather.argument], whole.narrow(1, start, length))
        if isinstance(gather.argument, str):
            return args, {**kwargs, gather.argument: whole}
        return (*args[: gather.argument], whole, *args[gather.argument + 1 :]), kwargs

    return block.get_submodule(gather.path).register_forward_pre_hook(give, with_kwargs=True)


def _column(
    reference: ReferenceRun, path: str, gathers: bool, start: int, length: int, weight: LowRank, tensor: Tensor
) -> Tensor:
    whole = reference.calls[path][0].tensor
    _expect(tensor, whole.narrow(1, start, length) if gathers else whole)
    return weight(whole)


def _row(reference: ReferenceRun, path: str, start: int, length: int, _weight: LowRank, tensor: Tensor) -> Tensor:
    call = reference.calls[path][0]
    _expect(tensor, call.tensor)
    return call.output.narrow(1, start, length)


def _expect(tensor: Tensor, expected: Tensor) -> None:
    if not close(tensor, expected):
        raise Mismatch("outside the sharded regions it does not work token by token")
