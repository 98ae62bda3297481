"""Run the stages of a rank in the order of the table, and send activations and gradients between stages.

The schedules of ``torch.distributed.pipelining`` (as of torch 2.13) have the same order of passes, but: they keep a
receive buffer for each micro-batch of the step instead of those in flight, so 1F1B loses its memory bound; they learn
shapes by an additional forward and backward of the first micro-batch, through hooks that count micro-batches and reduce
gradients; they refuse 1F1B with fewer micro-batches than stages; and they only split batches of tensors of equal rows.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.errors import LaunchError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.pipeline.deferral import Deferral, Later
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.stage import StageModel, check_sources
from galvatron_lite.parallelism.pipeline.table import Link, Pipeline, RankSchedule, rank_schedule, receiver, sender
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.sharded.tensor import locals_only

Value = Any
"""Output of a layer: a tensor, or a tuple, list or mapping of tensors and plain values."""
Template = tuple[Value, Any]
"""A value with its tensors on the meta device, and a header of its sender."""


_PURPOSES = {
    (Pass.FORWARD, True): "pipeline forward",
    (Pass.BACKWARD, False): "pipeline backward",
    (Pass.FORWARD, False): "pipeline forth",
    (Pass.BACKWARD, True): "pipeline back",
}
PipelineGroups = Mapping[tuple[Pass, bool], dist.ProcessGroup]
"""Process groups of the ranks with the same index in all groups of devices, by pass and whether it goes to a later
group.

NCCL runs the transfers between two ranks of a process group in order, and a send that waits for its receiver must not
block the opposite direction, nor forward passes to an earlier group of devices.
"""


def pipeline_groups(stages: int, groups: ProcessGroups | None = None, *, turns: bool = False) -> PipelineGroups:
    """Create the groups of this rank. All ranks of the world must call this together.

    Args:
        stages: groups of devices; divides the world size. Group s has the consecutive ranks [s*n, (s+1)*n).
        groups: creates process groups.
        turns: whether stages go round the groups of devices more than once.

    Raises:
        LaunchError: the world size is not divisible.
    """
    chains = place_groups(range(stages), stages)
    groups = ProcessGroups() if groups is None else groups
    links = list(_PURPOSES)[: 4 if turns else 2]
    created = {link: group for link in links if (group := groups.create(chains, _PURPOSES[link])) is not None}
    if len(created) < len(links):
        raise LaunchError(f"{dist.get_world_size()} processes cannot be split into {stages} equal stages.")
    return created


def place_groups(chosen: Sequence[int], stages: int) -> list[list[int]]:
    """Return, for each index in a stage, the world ranks with that index in the chosen stages."""
    width = dist.get_world_size() // stages
    return [[stage * width + place for stage in chosen] for place in range(width)]


class Sender:
    """Sends messages to another group of devices.

    Args:
        group: the ranks with this rank's index in all groups of devices.
        peer: index of the other group of devices.
        device: of tensors.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)
        self._sending: deque[list[tuple[dist.Work | None, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], room: int, announcement: Any = None) -> None:
        """Start sending a message.

        Args:
            tensors: of the message.
            room: messages that may be in flight, including this one; waits for earlier ones if there are more.
            announcement: sent before it; None: nothing. It is pickled, as in torch's object collectives, since it comes
                from ranks of this program.
        """
        while len(self._sending) >= room:
            self._finish_oldest()
        data = [tensor.detach().contiguous() for tensor in tensors]
        if announcement is not None:
            text = torch.frombuffer(bytearray(pickle.dumps(announcement)), dtype=torch.uint8)
            size = torch.tensor([text.numel()], dtype=torch.int64, device=self._device)
            data = [size, text.to(self._device), *data]
        self._sending.append([(dist.isend(tensor, self._peer, group=self._group), tensor) for tensor in data])

    def finish(self) -> None:
        """Wait for all sends in flight."""
        while self._sending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work, _ in self._sending.popleft():
            if work is not None:
                work.wait()


class Receiver:
    """Receives the messages of a ``Sender``, with the same arguments."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)

    def announced(self) -> Any:
        """Wait for an announcement."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, self._peer, group=self._group)
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(text, self._peer, group=self._group)
        return pickle.loads(text.cpu().numpy().tobytes())

    def receive(self, templates: Sequence[Tensor]) -> Incoming:
        """Start receiving tensors with the shapes of templates."""
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=self._device) for like in templates]
        return Incoming(buffers, [dist.irecv(buffer, self._peer, group=self._group) for buffer in buffers])


@dataclass(frozen=True, slots=True)
class Incoming:
    """Tensors in flight to this rank."""

    buffers: list[Tensor]
    works: list[dist.Work | None]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.buffers


class P2PChannel:
    """Sends results of passes to the stages that read them, and receives their inputs, in the order of the table.

    Messages of a link are received in the order they are sent, also if a later one is needed first. The first message
    of a kind announces its shapes.

    Args:
        groups: process groups.
        index: of this rank's group of devices.
        device: of tensors.
    """

    def __init__(self, groups: PipelineGroups, index: int, device: torch.device) -> None:
        self._groups, self._index, self._device = groups, index, device
        self._senders: dict[Link, Sender] = {}
        self._receivers: dict[Link, Receiver] = {}
        self._templates: dict[Hashable, Template] = {}
        self._announced: set[Hashable] = set()

    def begin(
        self, schedule: RankSchedule, kind: Hashable, gradients: Callable[[Action], Sequence[Tensor] | None]
    ) -> None:
        """Begin a step.

        Args:
            schedule: of this rank's group of devices.
            kind: key of the shapes of values: the shapes of a micro-batch, and of which parameters gradients are
                computed.
            gradients: returns the shapes of the gradients for a backward pass; None before its forward pass.
        """
        self._schedule, self._kind, self._gradients = schedule, kind, gradients
        self._due = {link: deque(actions) for link, actions in schedule.arriving.items()}
        self._arriving: dict[Action, Incoming] = {}

    def template(self, action: Action) -> Template:
        """Return the template of the value that arrived for a forward pass."""
        return self._templates[action.chunk, self._kind]

    def arrived(self, action: Action) -> list[Tensor]:
        """Wait for the inputs of a pass and return them; empty if it receives none."""
        self._expect(action, waits=True)
        incoming = self._arriving.pop(action, None)
        return incoming.wait() if incoming is not None else []

    def foresee(self, action: Action | None) -> None:
        """Start receiving the inputs of a later pass if their shapes are known; this takes one more buffer."""
        if action is not None:
            self._expect(action, waits=False)

    def send(self, action: Action, value: Value, header: Any = None) -> None:
        """Send the result of a pass: a value with its template, or gradients, whose shapes the receiver has."""
        target = receiver(self._schedule.course, self._index, action)
        assert target is not None
        group, wanted = target
        tensors = list(tensors_of(value))
        if group == self._index:
            if wanted.what is Pass.FORWARD:
                self._templates[wanted.chunk, self._kind] = template_of(value), header
            # a copy, as code of this rank's other stage may change it in place
            self._arriving[wanted] = Incoming([tensor.detach().clone() for tensor in tensors], [])
            return
        link = action.what, self._index, group
        if link not in self._senders:
            self._senders[link] = Sender(self._groups[action.what, self._index < group], group, self._device)
        key = wanted.chunk, group, self._kind
        silent = action.what is not Pass.FORWARD or key in self._announced
        self._announced.add(key)
        self._senders[link].send(tensors, self._schedule.room, None if silent else (template_of(value), header))

    def finish(self) -> None:
        """Wait for all sends in flight."""
        for item in self._senders.values():
            item.finish()

    def _expect(self, action: Action, *, waits: bool) -> None:
        source = sender(self._schedule.course, self._index, action)
        if source is None or source == self._index:
            return
        link = action.what, source, self._index
        while action not in self._arriving:
            shapes = self._shapes_of_next(link, waits)
            if shapes is None:
                return
            self._arriving[self._due[link].popleft()] = self._receivers[link].receive(shapes)

    def _shapes_of_next(self, link: Link, waits: bool) -> Sequence[Tensor] | None:
        """The shapes of a link's next message; None if they are not known yet and ``waits`` is False."""
        if link not in self._receivers:
            self._receivers[link] = Receiver(self._groups[link[0], link[1] < self._index], link[1], self._device)
        following = self._due[link][0]
        if following.what is Pass.BACKWARD:
            shapes = self._gradients(following)
            assert shapes is not None or not waits, f"{following} comes before its forward pass"
            return shapes
        key = following.chunk, self._kind
        if key not in self._templates and waits:
            self._templates[key] = self._receivers[link].announced()
        return list(tensors_of(self._templates[key][0])) if key in self._templates else None


def template_of(value: Value) -> Value:
    """Return a value with its tensors on the meta device."""
    return map_tensors(
        value, lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    )


class GradientSlot:
    """Holds the gradient of a received tensor.

    Attributes:
        like: the tensor's shape and dtype.
        gradient: None until backward, and if the tensor was not used.
    """

    __slots__ = ("gradient", "like")

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.gradient: Tensor | None = None

    def taken(self, device: torch.device) -> Tensor:
        """Return the gradient; zeros if there is none, since the sender waits for one."""
        return torch.zeros_like(self.like, device=device) if self.gradient is None else self.gradient


def arrived(template: Value, tensors: list[Tensor]) -> tuple[Value, list[GradientSlot]]:
    """Return a value like the template with these tensors, and a slot for each tensor that needs a gradient.

    These tensors are no leaves, so code may change them in place, and they live no longer than autograd needs them.
    """
    source, slots = iter(tensors), list[GradientSlot]()

    def fill(like: Tensor) -> Tensor:
        tensor = next(source)
        if not like.requires_grad:
            return tensor
        slots.append(GradientSlot(like))
        # a tensor without data makes the result require a gradient
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)
        filled: Tensor = _Arrival.apply(anchor, tensor, slots[-1])  # type: ignore[no-untyped-call]
        return filled

    return map_tensors(template, fill), slots


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tensor: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return tensor.data  # the same storage, but no view, which later code could not change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.slot.gradient = gradient
        return None, None, None


def differentiable(value: Value) -> list[Tensor]:
    """Return the tensors of a value that require gradients."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


Call = Callable[[int, Any], Any]
"""``call(chunk, microbatch)`` runs a stage's model."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stage of a rank, and how its values are sent: by default unchanged."""

    stage: StageModel
    # turns an output into plain tensors and a header, which the next stage gets with their shapes
    pack: Callable[[Value], tuple[Value, Any]] = lambda value: (value, None)
    unpack: Callable[[Value, Any], Value] = lambda value, _: value  # the inverse of ``pack`` of the stage before
    deferral: Deferral | None = None  # of gradients of weights; None: backward computes them


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The state of a micro-batch between its passes.

    Outputs are edges of the autograd graph instead of tensors, so that their data is freed once sent, unless autograd
    needs it.
    """

    inputs: list[GradientSlot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


class PipelineRunner:
    """Runs a rank's share of a training step.

    A rank sends what ``StageModel.run`` returns, in the layout of the layer that computed it, to the rank with the same
    index in the group of devices of the next stage; the layers that read it redistribute it. Values for later stages
    are forwarded together with a stage's outputs, and the gradients of all their readers are added on the way back.

    Attributes:
        pipeline: the stages on groups of devices, and the order of their passes.

    Args:
        chunks: the rank's stages, in the order of the model; this attaches their hooks, after all other hooks.
        groups: of ``pipeline_groups``.
        pipeline: see the attribute.
        index: of this rank's group of devices.
        device: of activations.
    """

    def __init__(
        self, chunks: Sequence[Chunk], groups: PipelineGroups, pipeline: Pipeline, index: int, device: torch.device
    ) -> None:
        for chunk in chunks:
            chunk.stage.attach()
        self.pipeline, self._chunks, self._index, self._device = pipeline, tuple(chunks), index, device
        self._channel = P2PChannel(groups, index, device)

    def step(
        self,
        microbatches: Sequence[Sequence[Any]],
        call: Call,
        before_pass: Callable[[Action, bool], None] | None = None,
        begun: Callable[[], None] | None = None,
        trained: Hashable = (),
    ) -> Tensor:
        """Run all passes of all micro-batches.

        Args:
            microbatches: for each stage of this rank, this rank's rows of each micro-batch in the layout of the stage's
                glue code; all of equal shapes.
            call: runs the model of a stage on a micro-batch and returns its loss, scaled such that the sum over
                micro-batches and batch ranks is the loss to minimise. On other stages than the last, the call ends
                where the model returns.
            before_pass: called before each pass, with the pass and whether it is the stage's last of this kind.
            begun: called when the inputs of a pass have arrived; not in passes of weights.
            trained: which parameters require gradients: on it depends which values do. The same on all ranks.

        Returns:
            The sum of the scaled losses on ranks of the last stage, zero on others.
        """
        actions = self._begin(microbatches, call, begun, trained)
        last = {(action.what, action.chunk): action for action in actions}
        run = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward, Pass.WEIGHT: self._weight}
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if before_pass is not None:
                before_pass(action, last[action.what, action.chunk] == action)
            run[action.what](action, following)
        self._end()
        return self._loss

    def outputs(self, microbatches: Sequence[Sequence[Any]], call: Call) -> list[Any]:
        """Run forward passes only, without gradients.

        Args:
            microbatches: see ``step``.
            call: runs the model of a stage on a micro-batch; on the last stage it returns the output.

        Returns:
            The outputs of all micro-batches on ranks of the last stage; empty on others.

        Raises:
            InputError: an output depends on values that only an earlier stage has.
        """
        with torch.no_grad():
            actions = self._begin(microbatches, call, forward_only=True)
            for action, following in zip(actions, (*actions[1:], None), strict=True):
                self._forward(action, following)
            outputs = self._outputs
            self._end()
        return outputs

    def _begin(
        self,
        microbatches: Sequence[Sequence[Any]],
        call: Call,
        begun: Callable[[], None] | None = None,
        trained: Hashable = (),
        *,
        forward_only: bool = False,
    ) -> tuple[Action, ...]:
        for chunk in self._chunks:
            chunk.stage.check_ends()
        schedule = rank_schedule(self.pipeline, len(microbatches[0]), self._index, forward_only=forward_only)
        self._microbatches, self._call, self._begun = microbatches, call, begun or (lambda: None)
        self._loss, self._outputs = torch.zeros((), device=self._device), list[Any]()
        self._later: dict[tuple[int, int], list[Later]] = {}
        self._in_flight = in_flight = dict[tuple[int, int], _InFlight]()
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for part in microbatches for tensor in tensors_of(part[0]))

        def gradients(action: Action) -> list[Tensor] | None:
            done = in_flight.get((action.chunk, action.microbatch))
            return None if done is None else done.shapes

        self._channel.begin(schedule, (torch.is_grad_enabled() and (trained,), shapes), gradients)
        return schedule.actions

    def _end(self) -> None:
        self._channel.finish()
        self._microbatches, self._outputs = (), []
        del self._call, self._begun

    def _forward(self, action: Action, following: Action | None) -> None:
        chunk = self._chunks[action.chunk]
        tensors, received, slots = self._channel.arrived(action), None, list[GradientSlot]()
        self._begun()
        if not chunk.stage.first:
            template, header = self._channel.template(action)
            value, slots = arrived(template, tensors)
            received = chunk.unpack(value, header)
        self._channel.foresee(following)
        part = self._microbatches[action.chunk][action.microbatch]
        produced = chunk.stage.run(lambda: self._call(action.chunk, part), received)
        header = None
        if not chunk.stage.last:
            produced, header = chunk.pack(produced)
        if torch.is_grad_enabled():
            outputs = differentiable(produced)
            edges = [get_gradient_edge(tensor) for tensor in outputs]
            shapes = [torch.empty_like(tensor, device="meta") for tensor in outputs]
            self._in_flight[action.chunk, action.microbatch] = _InFlight(slots, edges, shapes)
        if not chunk.stage.last:
            self._channel.send(action, produced, header)
        elif torch.is_grad_enabled():
            self._loss = self._loss + produced.detach()  # whose dtype may be wider
        else:
            check_sources("the model's outputs", produced)
            self._outputs.append(produced)

    def _backward(self, action: Action, following: Action | None) -> None:
        chunk, key = self._chunks[action.chunk], (action.chunk, action.microbatch)
        gradients = self._channel.arrived(action)
        self._begun()
        self._channel.foresee(following)
        done = self._in_flight.pop(key)
        if done.outputs:
            with locals_only():  # recomputation compares shapes of local shards
                torch.autograd.backward(done.outputs, None if chunk.stage.last else gradients)
        if chunk.deferral is not None:
            self._later[key] = chunk.deferral.take()
        if not chunk.stage.first:
            self._channel.send(action, [slot.taken(self._device) for slot in done.inputs])

    def _weight(self, action: Action, following: Action | None) -> None:
        self._channel.foresee(following)
        tasks = self._later.pop((action.chunk, action.microbatch))
        while tasks:
            tasks.pop(0)()
