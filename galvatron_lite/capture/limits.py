"""Limits on splitting a captured model: sizes of its dims, code that needs one pipeline stage, and dead parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import map_tensors, places, tensors_of
from galvatron_lite.model.graph import DeadParameters, Layer, Operator, OperatorClass, Role, SplitDims
from galvatron_lite.model.sides import SIDES, sides_of
from galvatron_lite.model.trace.flow import DataFlow, at
from galvatron_lite.model.trace.meta import left_to_the_plan
from galvatron_lite.model.trace.record import Recorder
from galvatron_lite.model.trace.run import BlockCall, Observation, argument_name, is_folded, items_a_sample, shapes_only
from galvatron_lite.parallelism.context.rules import RING_RULES
from galvatron_lite.parallelism.sharded.tensor import Call, in_place, name_of

_NAMES = {
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "ffn_hidden": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden"),
    "vocab": ("vocab_size", "vocab"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""Names of each dim in configurations: those of Hugging Face first, then those of the zoo."""


def split_dims(
    model: nn.Module,
    modules: Sequence[nn.Module],
    role: Role,
    operators: Sequence[Operator],
    sequence: int,
    entering: Sequence[int] = (),
) -> SplitDims:
    """Return the dims of one layer: from the model's ``config``, else from the layer's operators and modules.

    Args:
        model: that the layer is part of.
        modules: of the layer.
        role: of the layer; only blocks have heads and an MLP, only edges a vocabulary.
        operators: of the layer.
        sequence: tokens per sample.
        entering: shape of one sample of the layer's input.
    """
    config = getattr(model, "config", None)
    dims = _dims_of_operators(modules, operators)
    for name, aliases in _NAMES.items():
        values = (getattr(config, alias, None) for alias in aliases)
        if value := next((value for value in values if isinstance(value, int) and value > 0), 0):
            dims[name] = value
    if role is Role.BLOCK:
        attention = [operator.shape for operator in operators if operator.kind is OperatorClass.ATTENTION]
        heads, kv_heads = attention[0][:2] if attention else (0, 0)
        heads = dims.get("heads", heads)
        dims = dims | {"heads": heads, "kv_heads": dims.get("kv_heads", min(kv_heads, heads) or heads)}
    names = ("hidden", "vocab") if role is not Role.BLOCK else ("hidden", "ffn_hidden", "experts", "heads", "kv_heads")
    of_role = {name: dims[name] for name in names if name in dims}
    return SplitDims(sequence=sequence, **of_role, **_picture_dims(modules, operators, entering))


def _dims_of_operators(modules: Sequence[nn.Module], operators: Sequence[Operator]) -> dict[str, int]:
    """Dims of a layer's embedding tables and matmuls."""
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
    """Channels in and out, and extents of the picture or volume that a layer takes; empty if it takes none.

    The input is a picture if the layer convolves it, passes a window over it, sums over its pixels, multiplies all its
    pixels as one row, or has no weights except vectors of one item per channel. If the input is something else, the
    first convolution's input is the picture.
    """
    by_kind = {kind: [operator for operator in operators if operator.kind is kind] for kind in OperatorClass}
    convolutions, matmuls = by_kind[OperatorClass.CONVOLUTION], by_kind[OperatorClass.MATMUL]
    vectors = all(tuple(p.shape) == tuple(entering[:1]) for module in modules for p in module.parameters())
    light = not matmuls and not by_kind[OperatorClass.ATTENTION] and vectors
    flattens = len(entering) > 2 and [matmul.shape[1] for matmul in matmuls[:1]] == [prod(entering)]
    memory = by_kind[OperatorClass.MEMORY]
    channels_of = [window.shape[1] for window in memory if len(window.shape) > 1]  # of pictures that operators take
    channels_of += [mean.statistics for mean in memory] + [convolution.shape[0] for convolution in convolutions[:1]]
    channels_of += entering[:1] if light or flattens else ()
    if entering and entering[0] in channels_of and len(entering) - 1 in (2, 3):
        channels, extents = entering[0], tuple(entering[1:])
    elif convolutions:
        channels, extents = convolutions[0].shape[0], tuple(side.extent for side in sides_of(convolutions[0]))
    else:
        return {}
    outputs = [
        operator.shape[1] if operator.kind is OperatorClass.CONVOLUTION else operator.shape[2]
        for operator in operators
        if operator.kind is OperatorClass.CONVOLUTION
        or (operator.kind is OperatorClass.MATMUL and operator.weight_bytes)
    ]
    sides = dict(zip(SIDES[-len(extents) :], extents, strict=True))
    return {"in_channels": channels, "out_channels": outputs[-1] if outputs else channels, **sides}


def folded_argument(few: Sequence[BlockCall], more: Sequence[BlockCall], samples: tuple[int, int]) -> str:
    """Name an argument or output of a block whose dim 0 is not the samples; empty if there is none.

    Its dim 0 may be samples times something else (heads), or its samples may lie along another dim.

    Args:
        few: calls of blocks with the first number of samples.
        more: the same calls with the second number.
        samples: both numbers.
    """
    for small, large in zip(few, more, strict=True):
        for place, items in items_a_sample(small, large, samples).items():
            if is_folded(place, items):
                return f"{argument_name(place)} of {small.path}"
    return ""


def folded_hidden(few: Sequence[BlockCall], more: Sequence[BlockCall], samples: tuple[int, int]) -> str:
    """Name a block with a hidden state, its first floating-point argument, whose dim 0 is not the samples; or empty.

    Args: see ``folded_argument``.
    """
    for small, large in zip(few, more, strict=True):
        hidden = [place for place, tensor in places((large.args, large.kwargs)) if tensor.is_floating_point()][:1]
        items = items_a_sample(small, large, samples)
        if any(is_folded(place, items.get(place, 0)) for place in hidden):
            return small.path
    return ""


class _WriteRecorder(TorchFunctionMode):
    """Records functions that write to activations and have no rule for shards of the tokens."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._activations = {id(input_): input_ for input_ in inputs}
        self._rows = set[int]()  # of those, rows of a token

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if peek_interpreter_stack() is not None:  # inside of a transform, which would read the memory of a share
            self.names.append("torch.func")
        elif any(id(tensor) in self._activations for tensor in tensors_of((args, kwargs))):
            call = Call(function, name_of(function), args, kwargs, RING_RULES)
            if in_place(call) and args and id(args[0]) in self._activations and self._is_refused(call):
                self.names.append(call.name)
            self._activations.update((id(tensor), tensor) for tensor in tensors_of(result))
            if args and call.name in ("__getitem__", "select") and result.dim() < args[0].dim() > 1:
                self._rows |= {id(result)} if args[0].shape[1] not in result.shape else set()
        return result

    def _is_refused(self, call: Call) -> bool:
        """Whether a call without a rule writes to activations, or one to places that a tensor names, or to a row."""
        if call.name == "__setitem__":
            entries = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
            return any(isinstance(entry, (Tensor, list)) for entry in entries)
        is_row = id(call.args[0]) in self._rows and not call.name.startswith("__")  # x[:, 0] += 1 assigns it then
        return is_row or call.name not in RING_RULES.handlers


def token_writes(block: nn.Module, call: BlockCall) -> str:
    """Name the first function of a block that writes to activations and cannot write to shards of the tokens; empty if
    there is none."""
    with torch.enable_grad():  # as in training: blocks may register hooks on what they compute
        args, kwargs = map_tensors(
            (call.args, call.kwargs), lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone()
        )
        recorder = _WriteRecorder(tensors_of((args, kwargs)))
        with shapes_only(Recorder()), left_to_the_plan(), recorder:
            block(*args, **kwargs)
    return next(iter(recorder.names), "")


def check_replaced(model: nn.Module, twin: nn.Module) -> None:
    """Refuse a model that replaces its own modules while it runs: plans are applied to the modules that exist before.

    Args:
        model: that has not run.
        twin: its copy, which has run.

    Raises:
        TraceError: a module of the copy has another class.
    """
    before = dict(model.named_modules())
    for path, module in twin.named_modules():
        if path in before and type(module) is not type(before[path]):
            value = (
                f"{path}, a {type(before[path]).__name__} that the forward pass replaces by a {type(module).__name__}"
            )
            raise TraceError("model", value, "Run the model once on such a batch before.")


def one_stage_reason(
    model: nn.Module, layers: Sequence[Layer], run: Observation, ends: Sequence[Tensor], flow: DataFlow
) -> str:
    """Return why the model must stay in one pipeline stage; empty if each layer can begin a stage.

    A stage has its own layers' parameters and runs once. Hence no layer with parameters may run again after a later
    one, code after the first block may read no parameter from outside the layers' modules, and neither the loss nor the
    choice of what runs between layers may depend on values taken out of a layer by other means than its output.

    Args:
        run: of the model.
        ends: tensors that the loss is made of.
        flow: sources of the run's tensors.
    """
    prefix = "no pipeline stages:"
    owners = {path: index for index, layer in enumerate(layers) for path in layer.modules}
    if len(layers) == 2 and not layers[1].modules:
        return f"{prefix} the model has no repeated blocks, and no module behind its first layer"
    current = 0
    for call in run.calls:
        owner = owners.get(call.path, current)
        if owner < current and next(model.get_submodule(call.path).parameters(), None) is not None:
            return (
                f"{prefix} {call.path} runs before {layers[current].name} and again after it (call it once, and hand "
                "its output on; or give each of them a module of its own)"
            )
        current = max(current, owner)
    later = [tensor for call in run.calls if owners.get(call.path, 0) > 1 for tensor in call.inputs]
    if name := _outside_parameter(model, owners, run, [*later, *ends]):
        return (
            f"{prefix} code after the first block reads the parameter {name}, which no layer holds (move it into the "
            "module that reads it)"
        )
    for path, bits in flow.asked:
        if not any(at(path, module) for module in owners):
            read = (m for m in owners if any(bits & bit for name, bit in flow.modules.items() if at(name, m)))
            if module := next(read, ""):
                return f"{prefix} code between layers reads values of what {module} gives, to decide what runs"
    if rewritten := next((path for path in run.rewritten if path in owners), ""):
        return f"{prefix} code behind {rewritten} changes in place what it gives"
    if name := _parameter_of_unused_module(model, layers, run, ends):
        return f"{prefix} {name}, a parameter of a module that never runs, is handed to other layers"
    hooked = _hooked_module_in_loss(run, ends)
    return f"{prefix} the loss is made of what {hooked} gives inside its block, too" if hooked else ""


def _parameter_of_unused_module(
    model: nn.Module, layers: Sequence[Layer], run: Observation, ends: Sequence[Tensor]
) -> str:
    """A parameter of a layer's module that never runs, which code between layers hands to another layer."""
    ran, owners = set(run.order), {path: index for index, layer in enumerate(layers) for path in layer.modules}
    for path, owner in owners.items():
        if path not in ran:
            # the first layer makes the first block's inputs
            inside = {owner, owner + 1} if owner == 0 else {owner}
            inputs = [x for call in run.calls if owners.get(call.path, owner) not in inside for x in call.inputs]
            others = [*inputs, *(ends if owner < len(layers) - 1 else ())]
            name = _outside_parameter(model, owners.keys() - {path}, run, others)
            if name.startswith(f"{path}."):
                return name
    return ""


def nodes_behind(tensors: Sequence[Tensor], ends: Collection[Node | None]) -> Iterator[Node]:
    """Walk the autograd graph backward from tensors, not beyond the nodes ``ends``."""
    waiting, visited = [tensor.grad_fn for tensor in tensors], set(ends)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _block_ends(run: Observation) -> set[Node | None]:
    return {tensor.grad_fn for call in run.calls for tensor in tensors_of(call.output)}


def _hooked_module_in_loss(run: Observation, ends: Sequence[Tensor]) -> str:
    """A module inside a block whose output, taken by a hook of the model, the loss is made of."""
    hooked = {
        tensor.grad_fn: inner.path for call in run.calls for inner in call.heard for tensor in tensors_of(inner.output)
    }
    behind = nodes_behind(ends if hooked else (), _block_ends(run) - hooked.keys())
    return next((hooked[node] for node in behind if node in hooked), "")


def _outside_parameter(model: nn.Module, modules: Iterable[str], run: Observation, tensors: Sequence[Tensor]) -> str:
    """A parameter outside of the modules that code between layers made one of the tensors of."""
    inside = {id(parameter) for path in modules for parameter in model.get_submodule(path).parameters()}
    outside = {id(parameter): name for name, parameter in model.named_parameters() if id(parameter) not in inside}
    behind = nodes_behind(tensors if outside else (), _block_ends(run))
    read = chain(tensors, (getattr(node, "variable", None) for node in behind))
    return next((outside[id(tensor)] for tensor in read if id(tensor) in outside), "")


def dead_parameters(model: nn.Module, flow: DataFlow, outputs: Any) -> tuple[DeadParameters, ...]:
    """Find parameters that no output is made of, grouped by the outermost modules that hold no others.

    A parameter is alive if it may decide what runs, if the model remembers what was made of it, and if it may have been
    written into a buffer that reaches an output. Shared parameters count once.

    Args:
        flow: of the model's run.
        outputs: what it returned, or the loss.
    """
    living = flow.reaching(everything_in(outputs), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dead = {key for key, name in names.items() if not living & flow.parameters[name]}
    return tuple(_outermost(model, "", dead, set()))


def _outermost(module: nn.Module, path: str, dead: Collection[int], counted: set[int]) -> Iterator[DeadParameters]:
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    if path and parameters and all(key in dead for key in parameters):
        items = sum(parameter.numel() for key, parameter in parameters.items() if key not in counted)
        counted |= parameters.keys()
        if items:
            yield DeadParameters(path, items)
        return
    for name, parameter in module.named_parameters(path, recurse=False):
        if id(parameter) in dead and id(parameter) not in counted:
            counted.add(id(parameter))
            yield DeadParameters(name, parameter.numel())
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name, dead, counted)


def everything_in(value: Any, visited: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors in a value: nests of mappings, sequences, sets, dataclasses and plain objects."""
    visited = set() if visited is None else visited
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in visited and not isinstance(value, (str, bytes, int, float, nn.Module, type, type(None))):
        visited.add(id(value))
        if is_dataclass(value) and not isinstance(value, Collection):
            value = [getattr(value, field.name) for field in fields(value)]
        elif not isinstance(value, Collection):
            value = getattr(value, "__dict__", {})
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from everything_in(part, visited)
