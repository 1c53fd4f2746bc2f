"""What neuronx-cc is handed in place of what XLA's CPU runs."""

from __future__ import annotations

import re

from llmc.compiler.targets.neuron.on_target import modules
from llmc.compiler.targets.xla.hlo_ids import renumbered
from llmc.runtime.executors.neuron.files import NeuronFile, write_portable
from llmc.runtime.executors.xla.envelope import StepHeader, Tensor

TEXT = """HloModule m, input_output_alias={ {2}: (1, {}, may-alias) }

ENTRY main {
  x = f32[3,40]{1,0} parameter(0)
  y = f32[2]{0} parameter(1)
  top = (f32[3,4]{1,0}, s32[3,4]{1,0}) topk(x), k=4, largest=true
  values = f32[3,4]{1,0} get-tuple-element(top), index=0
  ids = s32[3,4]{1,0} get-tuple-element(top), index=1
  rank = u32[] replica-id()
  number = f32[] convert(rank)
  both = f32[2]{0} broadcast(number), dimensions={}
  moved = f32[2]{0} add(y, both)
  ROOT out = (f32[3,4]{1,0}, s32[3,4]{1,0}, f32[2]{0}) tuple(values, ids, moved)
}
"""


def file(devices: int, text: str = TEXT) -> NeuronFile:
    from jaxlib import _hlo

    def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        return Tensor(name, shape, dtype, (None,) * len(shape))

    y = tensor("y", (2,))
    outputs = (tensor("values", (3, 4)), tensor("ids", (3, 4), "int32"), y)
    header = StepHeader("neuron", "trn2", devices, "0", "step", (tensor("x", (3, 40)), y), outputs, ((2, 1),))
    module = renumbered(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    return NeuronFile.parse(write_portable(header, module), "m")


def shown(module: bytes) -> str:
    from jaxlib import _hlo

    return str(_hlo.HloModule.from_serialized_hlo_module_proto(module).to_string())


def test_each_rank_that_knows_its_number_has_a_module_of_its_own() -> None:
    first, second = map(shown, modules(file(2)))
    assert re.search(r"u32\[\] constant\(0\)", first)
    assert re.search(r"u32\[\] constant\(1\)", second)
    assert "replica-id" not in first + second


def test_ranks_that_do_not_share_one() -> None:
    alike = TEXT.replace("u32[] replica-id()", "u32[] constant(7)")
    (module,) = modules(file(2, alike))
    assert "u32[] constant(7)" in shown(module)


def test_the_largest_values_names_and_what_lies_in_place_are_neurons() -> None:
    text = shown(modules(file(1))[0])
    assert re.search(r'custom-call\(%\S+\), custom_call_target="AwsNeuronTopK".*backend_config="?4"?', text)
    assert "topk(" not in text
    assert re.findall(r'neff_input_names="(\w+)"', text) == ["input0", "input1"]
    assert 'neff_output_names="output0,output1,output2"' in text
    assert "{2}: (1, {}, must-alias)" in text
