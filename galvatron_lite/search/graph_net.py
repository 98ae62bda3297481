"""A single stage of a model as a ``graphs.Net``, where every tensor goes straight from its producer to its readers.

The search itself has tensors that skip layers travel along with the chain, laid out anew wherever layers change their
layout (``ModelGraph.crossing``), as a pipeline has to send them. Without a pipeline a tensor may wait in its producer's
layout until a reader asks for it: that is what these problems price. Each tensor then pays a latency of its own.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from galvatron_lite.errors import InputError
from galvatron_lite.search.figures import ticks
from galvatron_lite.search.graphs import IntArray, Net, Node
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.tables import Table


def net_of(problem: Problem) -> Net:
    """The layers of a problem of one stage, with what is settled for them, and the tensors between them.

    Raises:
        InputError: the problem has several stages.
    """
    if problem.shape.stages > 1:
        raise InputError("pipeline", problem.shape.stages, "Tensors go straight to readers inside one stage only.")
    layers, inside = problem.graph.layers, range(len(problem.graph.layers))
    tables = [problem.layer_table(0, place, inside) for place in inside]
    nodes = tuple(Node(table.theta(problem.form), table.figures.memory, table.groups) for table in tables)
    place = {layer.name: index for index, layer in enumerate(layers)}
    edges: dict[tuple[int, int], int] = {}
    for tensor in problem.graph.tensors:
        for reader in tensor.readers:
            pair = (place[tensor.producer], place[reader])
            edges[pair] = edges.get(pair, 0) + tensor.size
    if not edges:
        edges = {(a, b): problem.graph.kind_of(layers[a]).output_bytes for a, b in pairwise(inside)}
    moves = {(i, j): _moved(problem, size, tables[i], tables[j]) for (i, j), size in edges.items()}
    return Net(nodes, moves, problem.room(0, inside))


def _moved(problem: Problem, size: int, left: Table, right: Table) -> IntArray:
    """Picoseconds of a step's redistribution between the layouts of two layers, both passes of every micro-batch."""
    seconds = problem.tables[0].pricer.redistributions(
        size, problem.shape.microbatch, *([own.options.layouts[code] for code in own.present] for own in (left, right))
    )
    once = np.array([[ticks(float(value)) for value in row] for row in seconds], dtype=np.int64)
    moved: IntArray = 2 * problem.shape.microbatches * once.reshape(len(left.present), len(right.present))
    return moved
