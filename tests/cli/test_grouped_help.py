"""Help in groups, and a device's own flags only where it is named."""

from __future__ import annotations

import re

import pytest

from llmc.cli.grouped_help import device_in
from llmc.compiler.targets.declared import declared, devices
from tests.cli.helpers import Llmc

COMMANDS = (["compile"], ["plan", "make"])


def sections(text: str) -> dict[str, str]:
    """Titles in the first column → what stands below them."""
    found = re.split(r"^(\S[^\n]*):\n", text, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_a_device_its_own_flags_are_named_alone(llmc: Llmc, command: list[str]) -> None:
    found = sections(llmc(*command, "--help").out)
    assert list(found)[-4:-1] == ["Arguments", "Options", "Planning"] and "--device" in found["Options"]
    assert "--max-model-len" in found["Planning"] and "--max-model-len" not in found["Options"]
    named = found[f"Options of a device; llmc {' '.join(command)} --device D --help explains them"]
    assert "openvino" in named and "--group-size" in named and "Inputs of a row" not in named


@pytest.mark.parametrize(
    "device", [name for name in devices() if any(name in one.devices for one in declared().values())]
)
def test_with_a_device_its_flags_are_explained_and_no_others(llmc: Llmc, device: str) -> None:
    for given in (["--device", device], [f"--device={device}:detail"]):
        found = sections(llmc("compile", *given, "--help").out)
        assert not any(title.startswith("Options of a device") for title in found)
        flags = set(re.findall(r"^  (--[a-z-]+)", found[f"Options of {device}"], re.M))
        assert flags == {one.option.flag for one in declared().values() if device in one.devices}


def test_a_device_that_there_is_not_has_the_list(llmc: Llmc) -> None:
    for device in ("abacus", ""):
        assert "Options of a device" in llmc("compile", "--device", device, "--help").out
    assert device_in(["compile", "--device"]) == "" and device_in(["compile", "model"]) is None
