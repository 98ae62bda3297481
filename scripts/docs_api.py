"""Writes the reference of the public names from the docstrings, without importing the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import griffe

from galvatron_lite.files import write_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
PACKAGE = "galvatron_lite"


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str  # its heading
    said: str  # what is in it
    names: tuple[str, ...]  # what it documents, below ``galvatron_lite``: a public name, or a dotted path
    # of each class that is documented, the methods and properties that users call; empty: its attributes
    members: tuple[str, ...] = ()


TRAIN = ("train_step", "forward", "outputs", "optimizer", "param_groups", "publish", "no_sync", "clip_grad_norm")
STATE = ("full_state_dict", "load_full_state_dict", "save", "finish_saving", "load", "load_latest")
CHANGE = ("phase", "switch", "drain", "flush")

SECTIONS = (
    Section("Planning", "None of these needs torch or a GPU, but `profile` where it measures.", (
        "profile", "plan", "evaluate", "read_plan", "best_batch", "fewest_devices", "cheapest", "pareto_front",
        "api.plan_phases", "explain", "compare", "verify_plan",
    )),
    Section("Training", "On every rank of the launched world.", (
        "auto_parallelize", "Adapt", "as_one_process", "same_randomness", "frameworks.hugging_face.Trainer",
    )),
    Section("What `auto_parallelize` returns", "Which of them depends on the plan.", (
        "runtime.engine.ParallelModel", "runtime.cyclic.model.CyclicModel", "runtime.branches.engine.BranchedModel",
        "runtime.deepspeed.engine.DeepSpeedModel", "runtime.parameters.use.InferenceModel",
    ), TRAIN + STATE + CHANGE),
    Section("Checkpoints outside a run", "", (
        "runtime.checkpoint.unsplit.load_into", "runtime.checkpoint.huggingface.load_safetensors",
        "runtime.cyclic.checkpoint.flushed_state",
    )),
    Section("What is passed on", "Values that can be written to a file, read back and looked at.", (
        "Plan", "Profile", "Cluster", "ModelGraph", "plans.schema.Stage", "plans.schema.LayerRun",
        "parallelism.strategy.Strategy", "plans.schema.Prediction", "plans.schema.MemoryBreakdown",
        "plans.schema.TimeBreakdown",
    )),
    Section("Errors", "Every error that is raised on purpose is a `GalvatronError`.", (
        "errors.GalvatronError", "errors.InputError", "errors.FileFormatError", "errors.TraceError",
        "errors.InfeasibleError", "errors.LaunchError", "errors.PeerError", "errors.ExhaustedError",
        "errors.SwitchError", "errors.NonFiniteLossError", "errors.VerificationError",
    )),
)  # fmt: skip

HEAD = """# Reference

Written by `scripts/docs_api` from the docstrings. Sizes are in bytes and times in seconds, where nothing else is said.

"""


def page() -> str:
    """The whole page."""
    package = griffe.load(PACKAGE, search_paths=[str(ROOT)], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    parts, shown = [HEAD], dict[str, str]()
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n" + (f"{section.said}\n\n" if section.said else ""))
        parts += [entry(package, name, section.members, shown) for name in section.names]
    return "".join(parts).rstrip() + "\n"


def entry(package: griffe.Module, name: str, members: Sequence[str], known: dict[str, str]) -> str:
    """What is said of one function or class."""
    path = name if "." in name else homes()[name].removeprefix(f"{PACKAGE}.") + f".{name}"
    found = package[path]
    shown = f"{PACKAGE}.{name}"
    if found.is_function:
        return f"### `{shown}`\n\n" + signature(found, name.rpartition(".")[2]) + docstring(found)
    has = [found.all_members[member] for member in members if member in found.all_members]
    told = [(one, known.setdefault(one.canonical_path, found.name)) for one in has]
    parts = [f"### `{shown}`\n\n", docstring(found)]
    for other in dict.fromkeys(first for _, first in told if first != found.name):
        links = [f"[`{one.name}`](#{first.lower()}{one.name})" for one, first in told if first == other]
        parts.append(f"As for `{other}`: {', '.join(links)}.\n\n")
    return "".join((*parts, *(method(one) for one, first in told if first == found.name)))


def method(found: griffe.Object | griffe.Alias) -> str:
    """What is said of a member of a class."""
    head = f"#### `{found.parent.name if found.parent is not None else ''}.{found.name}`\n\n"
    return head + (signature(found, found.name) if found.is_function else "") + docstring(found)


def homes() -> dict[str, str]:
    """The module of every public name, as the package says it."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            known: dict[str, str] = ast.literal_eval(node.value)
            return known
    raise LookupError("_HOMES")


def signature(found: griffe.Object | griffe.Alias, name: str) -> str:
    """How a function is called, with types and defaults, an argument a line where it is long."""
    parts = list(_parameters(found))
    returns = f" -> {found.returns}" if found.returns is not None else ""  # type: ignore[union-attr]
    short = f"{name}({', '.join(parts)}){returns}"
    text = short if len(short) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"
    return f"```text\n{text}\n```\n\n"


def _parameters(found: griffe.Object | griffe.Alias) -> Iterator[str]:
    marks = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    starred = False
    for one in found.parameters:  # type: ignore[union-attr]
        if one.name == "self":
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not starred:
            yield "*"
        starred = starred or one.kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        typed = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and one.kind not in marks else ""
        yield f"{marks.get(one.kind, '')}{one.name}{typed}{default}"


def docstring(found: griffe.Object | griffe.Alias) -> str:
    """Its docstring as markdown."""
    if found.docstring is None:
        return ""
    return "".join(section(one) for one in found.docstring.parsed)


def section(one: griffe.DocstringSection) -> str:
    """A part of a docstring: text, or a list of what is taken, had, returned or raised."""
    kinds = griffe.DocstringSectionKind
    if one.kind is kinds.text:
        return plain(one.value) + "\n\n"
    titles = {
        kinds.parameters: "Arguments", kinds.attributes: "Attributes", kinds.returns: "Returns",
        kinds.raises: "Raises", kinds.yields: "Yields",
    }  # fmt: skip
    if one.kind not in titles:
        raise ValueError(f"a docstring has a section {one.kind.value}, which the page does not show")
    lines = "".join(_line(one.kind, item) for item in one.value)
    return f"{titles[one.kind]}:\n\n{lines}\n"


def _line(kind: griffe.DocstringSectionKind, item: griffe.DocstringElement) -> str:
    said = items(plain(item.description))
    if kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
        return f"- {said}\n"
    name = item.annotation if kind is griffe.DocstringSectionKind.raises else getattr(item, "name", "")
    return f"- `{name}`: {said}\n"


def items(text: str) -> str:
    """A description on one line, with the list that may be in it a step further in."""
    first, *rest = re.split(r"\n+ *- ", text)
    return "\n  - ".join(" ".join(one.split()) for one in (first, *rest))


def plain(text: str) -> str:
    """Docstrings' double backquotes as markdown's single ones; what is no markup stays as it is."""
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL).replace("<", "&lt;").strip()


if __name__ == "__main__":
    write_text(PAGE, page())
