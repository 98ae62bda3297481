"""Runs the stages of one rank in the order of the table; activations and gradients on their way between stages.

Why not the schedules of ``torch.distributed.pipelining`` (read in torch 2.13): they keep a receive buffer for every
micro-batch of the step instead of those in flight, so 1F1B loses its memory bound; they learn shapes by running the
first micro-batch forward and backward once more, through the hooks that count micro-batches and reduce gradients; they
refuse 1F1B with fewer micro-batches than stages; and they split a batch only where it is made of tensors of equal rows.
The order of work is theirs.
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
"""What a layer returns: a tensor, or a tuple, list or mapping of tensors and plain values."""
Template = tuple[Value, Any]
"""What the receiver must know of a value: itself with tensors on the meta device, and what its sender adds."""


_PURPOSES = {
    (Pass.FORWARD, True): "pipeline forward",
    (Pass.BACKWARD, False): "pipeline backward",
    (Pass.FORWARD, False): "pipeline forth",
    (Pass.BACKWARD, True): "pipeline back",
}
PipelineGroups = Mapping[tuple[Pass, bool], dist.ProcessGroup]
"""Ranks with the same place in every group of devices, in their order, by pass and whether it goes to a later group.

Each has a group of processes: with NCCL the transfers between two ranks of one group run in order, and a send that
waits for its receiver must not hold back the opposite direction, or what goes back to an earlier group of devices to be
passed forward there.
"""


def pipeline_groups(stages: int, groups: ProcessGroups | None = None, *, turns: bool = False) -> PipelineGroups:
    """Make the groups of this rank. Every rank of the world calls this at the same time.

    Args:
        stages: groups of devices; divides the world size. Number s holds the consecutive ranks [s*n, (s+1)*n).
        groups: makes them.
        turns: whether stages go round the groups of devices more than once.

    Raises:
        LaunchError: they do not divide the world.
    """
    chains = place_groups(range(stages), stages)
    groups = ProcessGroups() if groups is None else groups
    links = list(_PURPOSES)[: 4 if turns else 2]
    created = {link: group for link in links if (group := groups.create(chains, _PURPOSES[link])) is not None}
    if len(created) < len(links):
        raise LaunchError(f"{dist.get_world_size()} processes cannot be split into {stages} equal stages.")
    return created


def place_groups(chosen: Sequence[int], stages: int) -> list[list[int]]:
    """For every place in a stage: the world ranks with that place in the chosen stages."""
    width = dist.get_world_size() // stages
    return [[stage * width + place for stage in chosen] for place in range(width)]


class Sender:
    """One direction of traffic to another group of devices.

    Args:
        group: the ranks with this rank's place in every group of devices.
        peer: number of the other group of devices.
        device: where tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._peer = dist.get_global_rank(group, peer)
        self._sending: deque[list[tuple[dist.Work | None, Tensor]]] = deque()

    def send(self, tensors: Sequence[Tensor], room: int, announcement: Any = None) -> None:
        """Start sending a message.

        Args:
            tensors: of the message.
            room: messages that may be under way, with this one; waits for earlier ones where there are more.
            announcement: sent ahead of it; None: nothing. Pickled as torch's object collectives do: it comes from this
                program's own ranks.
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
        """Wait for every send under way."""
        while self._sending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for work, _ in self._sending.popleft():
            if work is not None:
                work.wait()


class Receiver:
    """The other end of a ``Sender``; arguments alike."""

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
        """Start receiving tensors shaped like the templates."""
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=self._device) for like in templates]
        return Incoming(buffers, [dist.irecv(buffer, self._peer, group=self._group) for buffer in buffers])


@dataclass(frozen=True, slots=True)
class Incoming:
    """Tensors on their way."""

    buffers: list[Tensor]
    works: list[dist.Work | None]

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.buffers


class P2PChannel:
    """Sends what passes make to where it is needed, and receives what they need, in the order of the table.

    Messages of a link are received in the order they are sent, whichever is needed first. Shapes are announced with the
    first message of a kind.

    Args:
        groups: process groups.
        index: number of this rank's group of devices.
        device: where tensors live.
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
            kind: what shapes of values depend on: those of a micro-batch, and whether gradients will flow.
            gradients: shapes of the gradients that will come for an action whose forward pass is done, else None.
        """
        self._schedule, self._kind, self._gradients = schedule, kind, gradients
        self._due = {link: deque(actions) for link, actions in schedule.arriving.items()}
        self._arriving: dict[Action, Incoming] = {}

    def template(self, action: Action) -> Template:
        """The template of the value that arrived for a forward pass."""
        return self._templates[action.chunk, self._kind]

    def arrived(self, action: Action) -> list[Tensor]:
        """What was sent for a pass, once it is here; empty where nothing comes in."""
        self._expect(action, waits=True)
        incoming = self._arriving.pop(action, None)
        return incoming.wait() if incoming is not None else []

    def foresee(self, action: Action | None) -> None:
        """Start receiving what a later pass needs, as far as shapes are known; it takes one more buffer."""
        if action is not None:
            self._expect(action, waits=False)

    def send(self, action: Action, value: Value, header: Any = None) -> None:
        """Send the result of a pass: a value whose template the receiver needs, or gradients it has the shapes of."""
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
        """Wait for every send under way."""
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
        """Shapes of a link's next message; None where they are not known yet and nobody waits for them."""
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
    """The value with its tensors on the meta device."""
    return map_tensors(
        value, lambda tensor: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    )


class GradientSlot:
    """Where the gradient of a tensor that arrived is put.

    Attributes:
        like: the tensor's shape and dtype.
        gradient: None until backward, and where nobody used the tensor.
    """

    __slots__ = ("gradient", "like")

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.gradient: Tensor | None = None

    def taken(self, device: torch.device) -> Tensor:
        """The gradient; zeros where there is none: the sender waits for one all the same."""
        return torch.zeros_like(self.like, device=device) if self.gradient is None else self.gradient


def arrived(template: Value, tensors: list[Tensor]) -> tuple[Value, list[GradientSlot]]:
    """A value like the template that holds these tensors, and a slot for each that needs a gradient.

    Those are no leaves, so that code may change them in place, and they live no longer than autograd needs them.
    """
    source, slots = iter(tensors), list[GradientSlot]()

    def fill(like: Tensor) -> Tensor:
        tensor = next(source)
        if not like.requires_grad:
            return tensor
        slots.append(GradientSlot(like))
        # without data, but makes the result ask for a gradient
        anchor = torch.empty(0, device=tensor.device, requires_grad=True)
        filled: Tensor = _Arrival.apply(anchor, tensor, slots[-1])  # type: ignore[no-untyped-call]
        return filled

    return map_tensors(template, fill), slots


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, tensor: Tensor, slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        return tensor.data  # the same storage, but no view, which autograd would not let others change

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.slot.gradient = gradient
        return None, None, None


def differentiable(value: Value) -> list[Tensor]:
    """The tensors of a value through which gradients flow."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


Call = Callable[[int, Any], Any]
"""``call(chunk, microbatch)`` runs a stage's model."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of a rank's stages, and how values travel between stages: by default as they are."""

    stage: StageModel  # its part of the model
    # plain tensors to be sent, and a header: what the next stage must know of them beside their shapes
    pack: Callable[[Value], tuple[Value, Any]] = lambda value: (value, None)
    # the stage's input from tensors that arrived, and their header
    unpack: Callable[[Value, Any], Value] = lambda value, _: value
    deferral: Deferral | None = None  # keeps what makes the gradients of weights; None: they are made in backward


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a micro-batch leaves between its passes.

    Outputs are edges of the autograd graph, not tensors: once sent, their data is kept only if autograd needs it.
    """

    inputs: list[GradientSlot]
    outputs: list[GradientEdge]
    shapes: list[Tensor]


class PipelineRunner:
    """Runs a rank's share of a training step.

    What travels is what ``StageModel.run`` returns, each tensor in the layout of the layer that made it, to the rank
    with the same place in the group of devices that runs the next stage; the layers that read it convert it. What a
    stage hands on to a later one goes with what it made itself, and gradients of all its readers are added on their way
    back.

    Attributes:
        pipeline: how stages are spread, and the order of their passes.

    Args:
        chunks: the rank's stages, in the order of the model; their hooks are attached here, so every other hook must be
            in place.
        groups: from ``pipeline_groups``.
        pipeline: the attribute.
        index: number of this rank's group of devices, 0 the first.
        device: where activations live.
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
    ) -> Tensor:
        """All passes of every micro-batch.

        Args:
            microbatches: by stage of this rank: this rank's rows of each, in the layout of the stage's glue code; all
                of equal shapes.
            call: runs the model of a stage on a micro-batch and returns its loss, scaled such that the sum over
                micro-batches and batch ranks is the loss to be minimised. On other stages than the last it is left
                where the model returns.
            before_pass: called with every pass before it, and whether it is the stage's last of this kind.
            begun: called when what a pass needs of other stages is there; not in passes of weights.

        Returns:
            The sum of the scaled losses where the last stage is, zero elsewhere.
        """
        actions = self._begin(microbatches, call, begun)
        last = {(action.what, action.chunk): action for action in actions}
        run = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward, Pass.WEIGHT: self._weight}
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            if before_pass is not None:
                before_pass(action, last[action.what, action.chunk] == action)
            run[action.what](action, following)
        self._end()
        return self._loss

    def outputs(self, microbatches: Sequence[Sequence[Any]], call: Call) -> list[Any]:
        """Forward passes alone, without gradients.

        Args:
            microbatches: see ``step``.
            call: runs the model of a stage on a micro-batch; what it returns on the last stage is the output.

        Returns:
            By micro-batch the output of the last stage; nothing elsewhere.

        Raises:
            InputError: an output is made of what an earlier stage has.
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

        self._channel.begin(schedule, (torch.is_grad_enabled(), shapes), gradients)
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
            self._loss += produced.detach()
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
            with locals_only():  # what recomputation checks against what was kept: shards as they are held
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
