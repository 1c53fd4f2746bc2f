"""Help in groups, and a device's own flags only where it is named."""

from __future__ import annotations

import re

import pytest

from llmc.cli.options import device_in
from llmc.compiler.targets import declared, devices
from tests.cli.helpers import Llmc

COMMANDS = (["compile"], ["plan", "make"])
SCREENS = {"compile": 66, "plan": 62, "serve": 72, "generate": 52, "run": 40}
"""Lines of 80 columns that a help has at most."""


def sections(text: str) -> dict[str, str]:
    """Titles in the first column → what stands below them."""
    found = re.split(r"^(\S[^\n]*):\n", text, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("command", SCREENS)
def test_a_help_is_a_screen_or_so_and_all_of_it_is_longer(llmc: Llmc, command: str) -> None:
    brief = llmc(command, "--help").out
    assert len(brief.splitlines()) <= SCREENS[command]
    if command == "run":
        return
    all_of_it = llmc(command, "--help-all").out
    explained = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", all_of_it, re.M)
    assert len(explained) == len(set(explained)) and "More options" in brief and "More options" not in all_of_it
    of_devices = {one.option.flag for one in declared().values()}
    assert set(re.findall(r"--[a-z-]+[a-z]", brief.partition("Options:")[2])) - of_devices <= {*explained, "--executor"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_flags_that_few_need_are_named_and_explained_on_demand(llmc: Llmc, command: list[str]) -> None:
    found = sections(llmc(*command, "--help").out)
    more = f"More options; llmc {' '.join(command)} --help-all explains them"
    of_devices = f"Options of a device; llmc {' '.join(command)} --device D --help explains them"
    assert list(found)[-4:] == ["Arguments", "Options", more, of_devices]
    assert "--device" in found["Options"] and "--max-model-len" in found["Options"]
    assert "--block-size" in found[more] and "--block-size" not in found["Options"]
    assert found[of_devices].split()[0] == "cpu," and "fake" not in found[of_devices] and "--" not in found[of_devices]
    full = sections(llmc(*command, "--help-all").out)
    assert more not in full and "Tokens of one KV cache block" in full["Limits"]
    assert "--group-size" in full[of_devices] and "Inputs of a row" not in full[of_devices]


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
