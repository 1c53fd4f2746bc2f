from __future__ import annotations

from pathlib import Path

import pytest

from llmc.artifacts.third_party.base import merge
from llmc.artifacts.third_party.contents import Tree, scan_tree
from llmc.integrations.vllm_neuron.cache import VllmNeuronCache
from tests.artifacts.third_party.helpers import NEURON_KEY, make_neuron, write

CACHE = VllmNeuronCache()


def tree(root: Path) -> Tree:
    return scan_tree(root, CACHE.leaves_out)


def test_the_root_is_found_from_vllms(tmp_path: Path) -> None:
    make_neuron(tmp_path / "neuron" / "compile_cache")
    assert CACHE.root(tmp_path) == tmp_path / "neuron" / "compile_cache"
    assert CACHE.root(tmp_path / "neuron" / "compile_cache") == tmp_path / "neuron" / "compile_cache"


def test_target_arguments_and_compiler_are_facts(tmp_path: Path) -> None:
    make_neuron(tmp_path)
    assert merge(CACHE.facts(tree(tmp_path))) == {
        "arguments": "-O1 --lnc=2", "compiler": "2.27.5334.0+f702b353", "metadata": "0", "target": "trn2",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["", "neuronx-cc", "a b c --target", "a b c 'open", "a b c --target=trn1"])
def test_any_command_is_read(tmp_path: Path, command: str) -> None:
    make_neuron(tmp_path)
    write(tmp_path / NEURON_KEY / "command.txt", command)
    found = merge(CACHE.facts(tree(tmp_path)))
    assert found.get("target", "") in {"", "trn1"}


def test_a_graph_without_its_mark_is_half_written(tmp_path: Path) -> None:
    make_neuron(tmp_path)
    assert CACHE.incomplete(tree(tmp_path)) == {}
    (tmp_path / NEURON_KEY / ".compilation_complete").unlink()
    (why,) = CACHE.incomplete(tree(tmp_path)).values()
    assert why == "is not complete (no .compilation_complete): its compile runs, or failed"
    assert list(CACHE.entries(tree(tmp_path))) == []


@pytest.mark.parametrize("size", [0, 39, 41])
def test_a_neff_of_another_size_is_torn(tmp_path: Path, size: int) -> None:
    make_neuron(tmp_path)
    write(tmp_path / NEURON_KEY / f"graph_{NEURON_KEY}.neff", bytes(size))
    (why,) = CACHE.incomplete(tree(tmp_path)).values()
    assert why == f"is torn (its NEFF has {size} bytes, .compilation_complete says 40)"


def test_a_graph_without_a_neff_and_an_empty_folder_are_torn(tmp_path: Path) -> None:
    make_neuron(tmp_path)
    (tmp_path / NEURON_KEY / f"graph_{NEURON_KEY}.neff").unlink()
    (tmp_path / "empty").mkdir()
    assert sorted(CACHE.incomplete(tree(tmp_path))) == [NEURON_KEY, "empty"]


def test_where_the_plug_in_looks_and_for_what_chip(tmp_path: Path) -> None:
    assert CACHE.location({"VLLM_CACHE_ROOT": "/a"}) == "/a/neuron/compile_cache"
    assert CACHE.location({}) is None
    assert CACHE.here({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, tmp_path) == {"target": "trn3"}
    assert CACHE.here({}, tmp_path) == {}
