"""What the pages point to is there."""

import inspect
import re
from pathlib import Path

import pytest

from galvatron_lite import errors
from galvatron_lite.api import plan

from .pages import PAGES, ROOT, anchors, blocks, code, links, named, text_of


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            text = (target / "README.md" if target.is_dir() else target).read_text(encoding="utf-8")
            assert anchor in anchors(text), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """``profiler/roofline.py`` is a module of the package, ``tests/...`` a file of the checkout."""
    paths = [
        span for span in code(page.read_text(encoding="utf-8")) if re.fullmatch(r"[\w*]+(/[\w*]+)+(\.\w+)?/?", span)
    ]
    for path in paths:
        found = [
            root for root in (ROOT, ROOT / "galvatron_lite") if list(root.glob(path)) or list(root.glob(f"{path}.py"))
        ]
        assert found, path


def test_every_page_is_in_the_index() -> None:
    listed = links((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(listed)
    assert "docs/README.md" in links((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_folder_is_in_the_design() -> None:
    listed = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The folders")[1].split("\n## ")[0]
    package = ROOT / "galvatron_lite"
    found = [path.parent for at in ("*", "runtime/*", "parallelism/*") for path in package.glob(f"{at}/__init__.py")]
    assert len(found) > 40
    assert [path.name for path in found if not re.search(rf"(?<![\w/]){path.name}/", listed)] == []


def test_diffs_of_the_guide_are_in_the_code() -> None:
    diffs = "".join(blocks(text_of("CONTRIBUTING.md"), "diff"))
    assert len(re.findall(r"^\+\+\+ ", diffs, re.MULTILINE)) > 5
    for part in diffs.split("+++ ")[1:]:
        name, *lines = part.splitlines()
        written = set(text_of(name).splitlines())
        assert [line for line in lines if line[1:] not in written] == [], name


ROWS = [line for line in text_of("docs/troubleshooting.md").splitlines() if re.match(r"\| `\w+(Error|Warning): ", line)]
QUOTED = [words for row in ROWS for words in re.findall(r"`(\w+(?:Error|Warning): [^`]+)`", row.split(" | ")[0])]


def source() -> str:
    """The sources, with what is several literals in a row as one, and without the names of variables."""
    whole = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "galvatron_lite").rglob("*.py"))
    return re.sub(r"\{[^{}\n]*\}", "{}", re.sub(r'"\s*\n\s*f?"', "", whole))


def begin(kind: str) -> str:
    """The first words of a kind of error on the page, up to what depends on the case."""
    return next(words for words in QUOTED if words.startswith(f"{kind}: ")).split(": ", 1)[1].split("…")[0].strip()


def test_every_kind_of_error_is_on_the_page() -> None:
    kinds = {name for name, made in vars(errors).items() if inspect.isclass(made) and name.endswith("Error")}
    assert {words.split(":")[0] for words in QUOTED} == kinds - {"GalvatronError"} | {"UserWarning"}


def test_quoted_errors_are_those_of_the_source() -> None:
    """Each part between what depends on the case is in the sources; the field of an InputError is an argument of it."""
    known = source()
    assert len(QUOTED) > 30
    for words in QUOTED:
        said = words.split(": ", 1)[1]
        said = re.sub(r"^([\w-]+): ('[\w ]+'|…) (cannot be used\. |is unknown\. )?|^([\w-]+) is missing\. ", "", said)
        parts = [part.strip() for part in re.split(r"…|(?<=:)$", said) if len(part.strip()) > 8]
        assert parts or said in FIELDS, words
        assert [part for part in parts if part not in known and part not in FIELDS] == [], words


FIELDS = {"plan.yaml:", "plan.yaml,", "--mem: …", "model: …"}
"""The file or field that is wrong, alone: what is said of it depends on the case."""


def test_what_ranks_that_call_different_collectives_get_is_quoted_as_gloo_says_it() -> None:
    assert text_of("docs/troubleshooting.md").count("Is there a distributed collective mismatch in your code?") == 2


def test_provoked_errors_begin_as_the_page_says() -> None:
    asked = {"model": "llama2-7b", "cluster": "a100-80gb", "gpus": 8, "batch": 64}
    with pytest.raises(errors.UnitError) as unit:
        plan(**asked, mem="lots")
    with pytest.raises(errors.InfeasibleError) as none:
        plan(**asked, mem="10GB", forbid="offload")
    raised = [unit.value, none.value, errors.VerificationError([]), errors.SwitchError("carry", 1, "")]
    for error in raised:
        assert str(error).startswith(begin(type(error).__name__)), str(error)
