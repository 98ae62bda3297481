import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.schema import (
    Calibration,
    ConstantsOrigin,
    DeviceConstants,
    LinkConstants,
    StackConstants,
)
from galvatron_lite.calibration.store import (
    KINDS,
    constants_for_device,
    constants_for_link,
    constants_for_stack,
    entry_for,
    load_calibration,
    write_calibration,
)
from galvatron_lite.cluster.catalog import device_named, known_devices
from galvatron_lite.errors import FileFormatError, InputError


def _device(share: float) -> DeviceConstants:
    return DeviceConstants({"bf16": share}, share, share, share)


SMALL = Calibration(
    devices={"default": _device(0.1), "A100": _device(0.2), "A100-PCIE": _device(0.3), "measured": _device(1.0)},
    links={"default": LinkConstants(0.5, 1e-5), "infiniband": LinkConstants(0.9, 8e-6)},
    stacks={"default": StackConstants(), "nemo": StackConstants(step_host=0.5, hidden={"data": 0.3})},
    like={"devices/A800": "A100"},
    origins={"devices/A100": ConstantsOrigin("a paper", "2026-01-02", 7, 0.04)},
    provenance=("by hand",),
)


def _edit(folder: Path, kind: str, **entries: object) -> None:
    path = folder / f"{kind}.json"
    data = json.loads(path.read_text())
    data["entries"] |= entries
    path.write_text(json.dumps(data))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_calibration(SMALL, tmp_path)
    assert load_calibration(tmp_path) == SMALL


def test_the_shipped_files_name_an_origin_for_every_entry() -> None:
    shipped = load_calibration()
    assert set(shipped.origins) == {f"{kind}/{name}" for kind in KINDS for name in getattr(shipped, kind)}
    assert all(origin.source for origin in shipped.origins.values())


def test_shares_of_a_data_sheet_are_shares() -> None:
    shipped = load_calibration()
    for constants in shipped.devices.values():
        shares = [*constants.matmul.values(), *constants.convolution.values(), constants.attention, constants.memory]
        assert all(0 < share <= 1 for share in shares)
    assert all(0 < link.efficiency <= 1 and 0 <= link.latency < 1e-3 for link in shipped.links.values())


@pytest.mark.parametrize("name", known_devices())
def test_every_device_of_the_catalogue_has_an_entry_of_its_type(name: str) -> None:
    assert entry_for(load_calibration(), "devices", name) not in {"default", "measured", "CPU"}


def test_the_longest_beginning_counts_whatever_the_case() -> None:
    assert entry_for(SMALL, "devices", "A100-SXM4-80GB") == "A100"
    assert entry_for(SMALL, "devices", "a100-pcie-40gb") == "A100-PCIE"
    assert entry_for(SMALL, "devices", "A800-SXM4-80GB") == "A100"
    assert constants_for_link(SMALL, "infiniband-hdr") is SMALL.links["infiniband"]
    assert constants_for_stack(SMALL, "NeMo-25") is SMALL.stacks["nemo"]


@given(st.text())
def test_a_name_without_an_entry_has_the_default(name: str) -> None:
    if not name.upper().startswith(("NEMO", "DEFAULT")):
        assert constants_for_stack(SMALL, name) is SMALL.stacks["default"]


def test_measured_devices_lose_nothing_beside_what_was_measured() -> None:
    probed = replace(device_named("T4"), name="unheard-of", source="measured")
    assert constants_for_device(SMALL, probed.name, probed.source) is SMALL.devices["measured"]
    assert constants_for_device(SMALL, probed.name, "a sheet") is SMALL.devices["default"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="devices, links, stacks"):
        entry_for(SMALL, "nodes", "A100")


@pytest.mark.parametrize(
    "entry",
    [{}, {"like": "nobody"}, {"like": "A800"}, {"constants": {"efficiency": 1.0}}, {"constants": {"memory": 1}}],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path: Path, entry: dict[str, object]) -> None:
    write_calibration(SMALL, tmp_path)
    _edit(tmp_path, "devices", wrong=entry)
    with pytest.raises(FileFormatError, match="wrong"):
        load_calibration(tmp_path)


def test_a_file_without_default_is_refused(tmp_path: Path) -> None:
    write_calibration(replace(SMALL, links={"infiniband": LinkConstants(0.9, 8e-6)}), tmp_path)
    with pytest.raises(FileFormatError, match="default"):
        load_calibration(tmp_path)
