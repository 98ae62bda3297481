"""Traces are data that anyone may have made: refused where they are none, or too long."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.diagnose import traces
from galvatron_lite.diagnose.expected import WaitPlace
from galvatron_lite.diagnose.traces import IntervalUnion, kind_of, rank_of, read_trace, times_of
from galvatron_lite.errors import FileFormatError

SEQUENCE, EXTERNAL = "Sequence number", "External id"


def _event(name: str, start: float, took: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    """An event; times in milliseconds."""
    times = {"ts": 1e3 * start, "dur": 1e3 * took}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": more}


def _range(name: str, start: float, took: float) -> dict[str, Any]:
    return _event(name, start, took, "user_annotation")


def _write(folder: Path, found: list[dict[str, Any]], **about: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **about, "traceEvents": found, "traceName": "x"}))
    return path


def _a_step() -> list[dict[str, Any]]:
    """100 ms on the host: two layers of 20 ms, backward of 10 and 30 ms, 12 ms of sums, 5 ms of update, 3 ms else."""
    return [
        _range("galvatron.step 10", 0, 100),
        _range("galvatron.part forward", 0, 40),
        _range("galvatron.layer a", 0, 20), _event("aten::mm", 1, 19, **{SEQUENCE: 7}),
        _range("galvatron.layer b", 20, 20), _event("aten::mm", 21, 9, **{SEQUENCE: 8}),
        _event("c10d::allreduce_", 31, 5),
        _range("galvatron.part backward", 40, 40),
        _event("autograd::engine::evaluate_function: B", 40, 9, **{SEQUENCE: 8}),
        _event("autograd::engine::evaluate_function: A", 50, 25, **{SEQUENCE: 7}),
        _range("galvatron.part gradients", 80, 12), _range("gloo:all_reduce", 75, 16),
        _range("galvatron.part optimizer", 92, 5), _range("galvatron.part other", 97, 3),
    ]  # fmt: skip


def test_a_step_on_the_host_is_divided(tmp_path: Path) -> None:
    found = times_of(read_trace(_write(tmp_path, _a_step(), galvatron={"rank": 3})))
    assert found.rank == 3
    assert found.forward == pytest.approx({"a": 0.020, "b": 0.015})
    # the sum of gradients begins 5 ms before backward ends
    assert found.backward == pytest.approx({"": 0.0, "b": 0.010, "a": 0.025})
    wanted = {(WaitPlace.LAYERS, "all_reduce"): 0.010, (WaitPlace.GRADIENTS, "all_reduce"): 0.012}
    assert found.communication == pytest.approx(wanted)
    assert (found.optimizer, found.other) == pytest.approx((0.005, 0.003))


def test_a_step_on_a_gpu_is_divided_by_its_kernels(tmp_path: Path) -> None:
    nccl = {EXTERNAL: 4, "Process Group Description": "gradients", "Group size": 8}
    step = [
        *(one for one in _a_step() if one["cat"] != "cpu_op" and not one["name"].startswith("gloo")),
        _event("aten::mm", 1, 1, **{SEQUENCE: 7, EXTERNAL: 1}),
        _event("autograd::engine::evaluate_function: A", 50, 25, **{SEQUENCE: 7}),
        _event("aten::mm", 51, 1, **{EXTERNAL: 2}),
        _event("aten::add", 93, 1, **{EXTERNAL: 3}),
        _event("c10d::allreduce_", 55, 1, **{EXTERNAL: 4}),
        _event("gemm", 5, 30, "kernel", **{EXTERNAL: 1}),
        _event("gemm", 35, 40, "kernel", **{EXTERNAL: 2}),
        _event("adam", 95, 4, "kernel", **{EXTERNAL: 3}),
        _event("ncclDevKernel_AllReduce_Sum", 70, 15, "kernel", **nccl),
    ]
    found = times_of(read_trace(_write(tmp_path, step)))
    assert found.forward == pytest.approx({"a": 0.030})
    assert found.backward == pytest.approx({"a": 0.040})
    assert found.communication == pytest.approx({(WaitPlace.LAYERS, "all_reduce"): 0.010})  # 5 ms lie under backward
    assert found.optimizer == pytest.approx(0.004)
    assert found.other == pytest.approx(0.016)  # no kernel runs
    assert found.groups == {"all_reduce": "gradients (8 ranks)"}


def test_a_trace_of_another_program_still_shows_its_messages(tmp_path: Path) -> None:
    step = [_event("aten::mm", 0, 10), _range("gloo:all_gather", 12, 6), _event("aten::mm", 18, 2)]
    found = times_of(read_trace(_write(tmp_path, step, distributedInfo={"rank": 1})))
    assert (found.rank, found.has_layers, found.has_parts) == (1, False, False)
    assert found.seconds == pytest.approx(0.020)
    assert found.communication == pytest.approx({(WaitPlace.LAYERS, "all_gather"): 0.006})


def test_packed_files_and_plain_lists_of_events_are_read_too(tmp_path: Path) -> None:
    whole = read_trace(_write(tmp_path, _a_step()))
    packed, alone = tmp_path / "trace.json.gz", tmp_path / "list.json"
    packed.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    alone.write_text(json.dumps(_a_step()))
    assert read_trace(packed).events == read_trace(alone).events == whole.events


def test_long_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, _a_step(), note="x" * 300)
    monkeypatch.setattr(traces, "MOST_BYTES", 1000)
    with pytest.raises(FileFormatError, match="fewer steps"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "wanted"),
        ("no trace", "wanted"),
        ('{"traceEvents": [1]}', "object"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "now", "dur": 1}]}', "no time"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}', "wanted"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}', "no time"),
        ('{"traceEvents": [', "wanted"),
        ('{"traceEvents": ' + "[" * 100_000, "wanted"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=said):
        read_trace(path)


def test_a_file_that_is_not_there_or_not_packed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    for name in ("none.json", "trace.json.gz"):
        with pytest.raises(FileFormatError, match="cannot be read"):
            read_trace(tmp_path / name)


_WHOLE = json.dumps({"galvatron": {"rank": 1}, "traceEvents": _a_step()}).encode()


@settings(max_examples=80, deadline=None)
@given(place=st.integers(0, len(_WHOLE) - 1), junk=st.binary(max_size=8), cut=st.booleans())
def test_damaged_traces_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, junk: bytes, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_bytes(_WHOLE[:place] + junk + (b"" if cut else _WHOLE[place + len(junk) :]))
    with contextlib.suppress(FileFormatError):
        found = read_trace(path)
        rank_of(found)
        times_of(found)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = ("galvatron.step 1", "galvatron.part backward", "galvatron.layer a", "aten::mm", "gloo:all_reduce")
_ODD = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["cpu_op", "user_annotation", "kernel", "other"]) | _JSON,
        "name": st.sampled_from(_NAMES) | _JSON,
        "ts": st.floats(0, 100) | _JSON,
        "dur": st.floats(0, 100) | _JSON,
        "args": _JSON | st.fixed_dictionaries({SEQUENCE: _JSON, EXTERNAL: _JSON}),
    }
)


@settings(max_examples=40, deadline=None)
@given(found=st.lists(_ODD, max_size=6), about=_JSON)
def test_odd_events_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, found: Any, about: Any) -> None:
    path = _write(tmp_path_factory.mktemp("trace"), found, galvatron=about, distributedInfo=about)
    with contextlib.suppress(FileFormatError):
        assert times_of(read_trace(path)).seconds >= 0.0


def test_kinds_of_collectives_are_known_by_what_backends_call_them() -> None:
    names = {
        "gloo:all_reduce": "all_reduce", "c10d::_allgather_base_": "all_gather", "aten::mm": "",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "reduce_scatter", "ncclDevKernel_SendRecv": "send_recv",
        "c10d::alltoall_base_": "all_to_all",
    }  # fmt: skip
    assert {name: kind_of(name) for name in names} == names


_STRETCHES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda one: (one[0], one[0] + one[1])))


def _cells(stretches: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in stretches for cell in range(start, end)}


@settings(max_examples=80, deadline=None)
@given(first=_STRETCHES, second=_STRETCHES, start=st.integers(0, 25), took=st.integers(0, 25))
def test_stretches_of_time_are_as_counted(
    first: list[tuple[int, int]], second: list[tuple[int, int]], start: int, took: int
) -> None:
    one, inside = IntervalUnion(first), set(range(start, start + took))
    assert one.covered(start, start + took) == len(_cells(first) & inside)
    left = one.difference(IntervalUnion(second))
    assert left.covered(start, start + took) == len((_cells(first) - _cells(second)) & inside)
