import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.calibration.parameters import fit
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


def test_efficiencies_lie_between_0_and_1() -> None:
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


def test_straight_lines_have_the_posterior_of_the_textbook() -> None:
    """Two unknowns, five measurements: the normal equations of ridge regression."""
    rows = np.array([[1.0, 0.0], [1.0, 0.5], [0.2, 1.0], [0.0, 2.0], [1.0, 1.0]])
    truth, noise, widths = np.array([0.3, -0.2]), 0.1, np.array([0.5, 0.4])
    logs = rows @ truth + np.array([0.02, -0.05, 0.01, 0.03, -0.02])
    found = fit(lambda x: rows @ x, np.exp(logs).tolist(), [0.0, 0.0], widths.tolist(), noise)
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + np.diag(widths**-2))
    assert found.values == pytest.approx(covariance @ rows.T @ logs / noise**2, abs=1e-6)
    assert found.deviations == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-6)


def test_what_measurements_do_not_tell_stays() -> None:
    found = fit(lambda x: np.array([x[0]]), [2.0], [0.0, 1.5], [1.0, 0.3], 1e-3)
    assert found.values == pytest.approx([np.log(2.0), 1.5], abs=1e-4)
    assert found.deviations[1] == pytest.approx(0.3)


def test_nonlinear_fits_end_at_the_least_objective() -> None:
    def predict(x: np.ndarray) -> np.ndarray:
        return np.log(1.0 + np.exp(2 * x[:1])) + 0.1 * x[:1] ** 3

    found = fit(predict, [3.0], [0.0], [2.0], 0.1, rounds=8)
    grid = np.linspace(-2, 2, 40001)
    cost = ((np.log(1 + np.exp(2 * grid)) + 0.1 * grid**3 - np.log(3.0)) / 0.1) ** 2 + (grid / 2) ** 2
    assert found.values[0] == pytest.approx(grid[cost.argmin()], abs=2e-3)


def test_a_fit_is_never_worse_than_its_prior() -> None:
    """A step that overshoots is halved, and not taken where no part of it helps."""
    found = fit(lambda x: np.abs(x[:1]), [1.0], [0.0], [1.0], 0.1)
    assert found.values == pytest.approx([0.0], abs=1.1)
    assert np.isfinite(found.values).all()
