"""What limits how a model is split: layers that stay in one stage, and parameters that train nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import DeadParameters, Layer, Operator, OperatorClass, Role, SplitDims
from galvatron_lite.model.sides import SIDES, sides_of
from galvatron_lite.model.trace.flow import DataFlow, at
from galvatron_lite.model.trace.meta import left_to_the_plan
from galvatron_lite.model.trace.record import Recorder
from galvatron_lite.model.trace.run import BlockCall, Observation, is_folded, items_a_sample, shapes_only
from galvatron_lite.parallelism.context.rules import RING_RULES
from galvatron_lite.parallelism.sharded.calls import in_place
from galvatron_lite.parallelism.sharded.tensor import Call, name_of

_NAMES = {
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "ffn_hidden": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden"),
    "vocab": ("vocab_size", "vocab"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""What configs call each dim: those of Hugging Face first, then our own."""


def split_dims(
    model: nn.Module,
    modules: Sequence[nn.Module],
    role: Role,
    operators: Sequence[Operator],
    sequence: int,
    entering: Sequence[int] = (),
) -> SplitDims:
    """Dims of one layer; those the config does not give are read off its operators and modules.

    Args:
        model: the whole model; its ``config`` is looked at where it has one.
        modules: what the layer is made of.
        role: where it stands; only blocks have heads and an MLP, only edges a vocabulary.
        operators: what it calls.
        sequence: tokens per sample.
        entering: shape of one sample of what enters.
    """
    config = getattr(model, "config", None)
    dims = _read_off(modules, operators)
    for name, aliases in _NAMES.items():
        values = (getattr(config, alias, None) for alias in aliases)
        if value := next((value for value in values if isinstance(value, int) and value > 0), 0):
            dims[name] = value
    if role is Role.BLOCK:
        attention = [operator.shape for operator in operators if operator.kind is OperatorClass.ATTENTION]
        heads, kv_heads = attention[0][:2] if attention else (0, 0)
        heads = dims.get("heads", heads)
        dims = dims | {"heads": heads, "kv_heads": dims.get("kv_heads", min(kv_heads, heads) or heads)}
    held = ("hidden", "vocab") if role is not Role.BLOCK else ("hidden", "ffn_hidden", "experts", "heads", "kv_heads")
    heavy = {name: dims[name] for name in held if name in dims}
    return SplitDims(sequence=sequence, **heavy, **_picture_dims(modules, operators, entering))


def _read_off(modules: Sequence[nn.Module], operators: Sequence[Operator]) -> dict[str, int]:
    """What tables of embeddings and matmuls say of a layer's dims."""
    parts = [part for module in modules for part in module.modules()]
    tables = [(part.num_embeddings, part.embedding_dim) for part in parts if isinstance(part, nn.Embedding)]
    matmuls = [operator.shape for operator in operators if operator.kind is OperatorClass.MATMUL]
    extents = dict(zip(("vocab", "hidden"), max(tables), strict=True)) if tables else {}
    if matmuls:
        extents |= {"hidden": matmuls[0][1], "ffn_hidden": max(shape[2] for shape in matmuls)}
    return extents


def _picture_dims(
    modules: Sequence[nn.Module], operators: Sequence[Operator], entering: Sequence[int]
) -> dict[str, int]:
    """Channels in and out, and extents of the picture or volume that enters; nothing where none does.

    A layer with convolutions works on one. One without does where it passes windows over what enters or sums over its
    pixels, or has no weights but one for each channel. Where something else enters, the first convolution's input is
    the picture.
    """
    by_kind = {kind: [one for one in operators if one.kind is kind] for kind in OperatorClass}
    convolutions, matmuls = by_kind[OperatorClass.CONVOLUTION], by_kind[OperatorClass.MATMUL]
    vectors = all(tuple(p.shape) == tuple(entering[:1]) for module in modules for p in module.parameters())
    light = not matmuls and not by_kind[OperatorClass.ATTENTION] and vectors
    # the first matmul takes all pixels as one row
    flattens = len(entering) > 2 and [one.shape[1] for one in matmuls[:1]] == [prod(entering)]
    memory = by_kind[OperatorClass.MEMORY]  # windows and means of channels
    taken = [one.shape[1] for one in memory if len(one.shape) > 1] + [one.statistics for one in memory]
    taken += [one.shape[0] for one in convolutions[:1]] + list(entering[:1] if light or flattens else ())
    if entering and entering[0] in taken and len(entering) - 1 in (2, 3):
        channels, extents = entering[0], tuple(entering[1:])
    elif convolutions:
        channels, extents = convolutions[0].shape[0], tuple(side.extent for side in sides_of(convolutions[0]))
    else:
        return {}
    weighted = [
        one.shape[1] if one.kind is OperatorClass.CONVOLUTION else one.shape[2]
        for one in operators
        if one.kind is OperatorClass.CONVOLUTION or (one.kind is OperatorClass.MATMUL and one.weight_bytes)
    ]
    named = zip(SIDES[-len(extents) :], extents, strict=True)
    return {"in_channels": channels, "out_channels": weighted[-1] if weighted else channels, **dict(named)}


def folded_argument(few: Sequence[BlockCall], more: Sequence[BlockCall], samples: tuple[int, int]) -> str:
    """What a block takes or returns with samples times something else (heads) along dim 0, or with samples along
    another dim; empty where there is nothing.

    Args:
        few: calls of blocks with the first number of samples.
        more: the same with the second number.
        samples: both numbers.
    """
    for one, other in zip(few, more, strict=True):
        for place, each in items_a_sample(one, other, samples).items():
            if is_folded(place, each):
                return f"{place.lstrip('.')} of {one.path}"
    return ""


class _Writes(TorchFunctionMode):
    """Notes functions that write to activations and have no rule for shares of the tokens."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._activations = {id(input_): input_ for input_ in inputs}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(function, name_of(function), args, kwargs or {}, RING_RULES)
        if any(id(one) in self._activations for one in tensors_of((args, kwargs or {}))):
            target = call.args[0] if call.args else None
            if in_place(call) and id(target) in self._activations and call.name not in RING_RULES.handlers:
                self.names.append(call.name)
            result = function(*args, **(kwargs or {}))
            self._activations.update((id(one), one) for one in tensors_of(result))
            return result
        return function(*args, **(kwargs or {}))


def token_writes(block: nn.Module, call: BlockCall) -> str:
    """The first function of a block's forward that writes to activations and cannot write to shares of the tokens;
    empty where there is none.
    """
    args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: tensor.detach().clone())
    writes = _Writes(tensors_of((args, kwargs)))
    with torch.no_grad(), shapes_only(Recorder()), left_to_the_plan(), writes:
        block(*args, **kwargs)
    return next(iter(writes.names), "")


def check_replaced(model: nn.Module, twin: nn.Module) -> None:
    """Refuse a model that replaces modules of its own while it runs: plans are applied to the modules there are.

    Args:
        model: the whole model, which has not run.
        twin: its copy, which has.

    Raises:
        TraceError: a module of the copy is of another class.
    """
    before = dict(model.named_modules())
    for path, module in twin.named_modules():
        if path in before and type(module) is not type(before[path]):
            value = (
                f"{path}, a {type(before[path]).__name__} that the forward pass replaces by a {type(module).__name__}"
            )
            raise TraceError("model", value, "Run the model once on such a batch before.")


def one_stage_reason(
    model: nn.Module, layers: Sequence[Layer], seen: Observation, ends: Sequence[Tensor], flow: DataFlow
) -> str:
    """Why not every layer can begin a stage; empty where it can.

    A stage has its own layers' parameters and runs once. So no layer may run again behind a later one, code behind the
    first block may read no parameter that no layer's modules hold, and the loss nothing that was taken out of a block.
    Nor may values that layers made decide what runs between them.

    Args:
        ends: what the loss is made of.
        flow: of a run, what tensors are made of.
    """
    places = {path: number for number, layer in enumerate(layers) for path in layer.modules}
    if len(layers) == 2 and not layers[1].modules:
        return "no pipeline stages: the model has no repeated blocks, and no module behind its first layer"
    current = 0
    for call in seen.calls:
        home = places.get(call.path, current)
        if home < current and next(model.get_submodule(call.path).parameters(), None) is not None:
            return (
                f"no pipeline stages: {call.path} runs before {layers[current].name} and again after it (call it once, "
                "and hand its output on; or give each of them a module of its own)"
            )
        current = max(current, home)
    later = [tensor for call in seen.calls if places.get(call.path, 0) > 1 for tensor in call.inputs]
    name = _loose_read(model, places, seen, [*later, *ends])
    if name:
        return (
            f"no pipeline stages: code after the first block reads the parameter {name}, which no layer holds (move it "
            "into the module that reads it)"
        )
    for path, bits in flow.asked:
        if not any(at(path, layer) for layer in places):
            read = (
                layer for layer in places if any(bits & bit for name, bit in flow.modules.items() if at(name, layer))
            )
            if layer := next(read, ""):
                return (
                    f"no pipeline stages: code between layers reads values of what {layer} gives, to decide what runs"
                )
    rewritten = next((path for path in seen.rewritten if path in places), "")
    if rewritten:
        return f"no pipeline stages: code behind {rewritten} changes in place what it gives"
    lent = _lent(model, layers, seen, ends)
    if lent:
        return f"no pipeline stages: {lent}, a parameter of a module that never runs, is handed to other layers"
    heard = _heard_of(seen, ends)
    return f"no pipeline stages: the loss is made of what {heard} gives inside its block, too" if heard else ""


def _lent(model: nn.Module, layers: Sequence[Layer], seen: Observation, ends: Sequence[Tensor]) -> str:
    """A parameter of a layer's module that never runs, which code between layers hands to another layer."""
    ran, homes = set(seen.order), {path: number for number, layer in enumerate(layers) for path in layer.modules}
    for path, home in homes.items():
        if path not in ran:
            inside = {home, home + 1} if home == 0 else {home}  # what enters the first block, the layer before it makes
            entering = [
                tensor for call in seen.calls if homes.get(call.path, home) not in inside for tensor in call.inputs
            ]
            others = [*entering, *(ends if home < len(layers) - 1 else ())]
            name = _loose_read(model, dict.fromkeys(set(homes) - {path}, 0), seen, others)
            if name.startswith(f"{path}."):
                return name
    return ""


def nodes_behind(tensors: Sequence[Tensor], ends: Collection[Node | None]) -> Iterator[Node]:
    """The calls that tensors were made by, and those before them; what is before ``ends`` left out."""
    waiting, met = [tensor.grad_fn for tensor in tensors], set(ends)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            yield node
            waiting += [one for one, _ in node.next_functions]


def _block_ends(seen: Observation) -> set[Node | None]:
    return {tensor.grad_fn for call in seen.calls for tensor in tensors_of(call.output)}


def _heard_of(seen: Observation, ends: Sequence[Tensor]) -> str:
    """A module inside a block of whose output, which a hook of the model took, the loss is made."""
    heard = {tensor.grad_fn: one.path for call in seen.calls for one in call.heard for tensor in tensors_of(one.output)}
    behind = nodes_behind(ends if heard else (), _block_ends(seen) - heard.keys())
    return next((heard[node] for node in behind if node in heard), "")


def _loose_read(model: nn.Module, held: dict[str, int], seen: Observation, tensors: Sequence[Tensor]) -> str:
    """A parameter that no layer's modules hold and of which code between layers made one of the tensors."""
    inside = {id(parameter) for path in held for parameter in model.get_submodule(path).parameters()}
    loose = {id(one): name for name, one in model.named_parameters() if id(one) not in inside}
    behind = nodes_behind(tensors if loose else (), _block_ends(seen))
    read = chain(tensors, (getattr(node, "variable", None) for node in behind))
    return next((loose[id(one)] for one in read if id(one) in loose), "")


def dead_parameters(model: nn.Module, flow: DataFlow, outputs: Any) -> tuple[DeadParameters, ...]:
    """Parameters of which no output is made, by the outermost modules that hold no others; shared ones count once.

    A parameter counts as living where it may decide what is run, where the model remembers what was made of it, and
    where a buffer that reaches an output may have been written with it.

    Args:
        flow: of its run.
        outputs: what it returned, or the loss.
    """
    living = flow.reaching(everything_in(outputs), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dead = {name for name, bit in flow.parameters.items() if not living & bit}
    return tuple(_outermost(model, "", {key: name for key, name in names.items() if name in dead}, set()))


def _outermost(module: nn.Module, path: str, dead: Mapping[int, str], counted: set[int]) -> Iterator[DeadParameters]:
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    if path and parameters and parameters.keys() <= dead.keys():
        items = sum(parameter.numel() for key, parameter in parameters.items() if key not in counted)
        counted |= parameters.keys()
        if items:
            yield DeadParameters(path, items)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in dead and id(parameter) not in counted:
            counted.add(id(parameter))
            yield DeadParameters(_join(path, name), parameter.numel())
    for name, child in module.named_children():
        yield from _outermost(child, _join(path, name), dead, counted)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def everything_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in a value: nests of mappings, sequences, sets, dataclasses and plain objects."""
    met = set[int]() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in met and not isinstance(value, (str, bytes, int, float, nn.Module, type, type(None))):
        met.add(id(value))
        if is_dataclass(value) and not isinstance(value, Collection):
            value = [getattr(value, field.name) for field in fields(value)]
        elif not isinstance(value, Collection):
            value = getattr(value, "__dict__", {})
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from everything_in(part, met)
