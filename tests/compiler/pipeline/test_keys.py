"""Keys, both ways: each input that shapes a result changes the component that names it, and nothing else does."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler import stages
from llmc.compiler.pipeline import verification
from llmc.compiler.targets import fake, programs
from llmc.compiler.targets.base import Recorded, Target
from llmc.compiler.targets.hpu import target as hpu
from llmc.compiler.targets.onnxruntime import target as onnxruntime
from llmc.settings import KERNEL_VARIABLES, variables
from llmc.testing.toy import DECODE, toy_plan
from tests.compiler.keyed import DEVICES, Compiled, Keyed, Keys, changed, components, reshape
from tests.devices import use
from tests.tiers import default_cases
from tests.toy import Toy

TARGETS: dict[str, type[Target]] = {
    "fake": fake.FakeTarget,
    "onnxruntime": onnxruntime.OnnxRuntimeTarget,
    "hpu": hpu.HpuTarget,
}
READ = {"weights:checkpoint", "tokenizer:checkpoint", "reference:checkpoint"}
FIXED = {"trace:dialect", "trace:cached", "reference:reference"}
"""Components that tell one stage of a target from another: no input changes them."""
SHAPING = {"verify:option.specialise", "verify:option.static_dims"}
"""Components that change which keys there are, not only what is in them."""
UNUSUAL = {
    "verify:environment.ATEN_CPU_CAPABILITY", "executable:option.sample_top_k", "trace:sample_top_k",
    "verify:option.sample_top_k",
}  # fmt: skip
"""Components that are there only where something unusual is set or asked for."""
LIMITS = {f"verify:environment.{name}" for name in variables(KERNEL_VARIABLES)}
"""Components that the environment of this test run adds."""


# What changes a key

Change = Callable[["Case"], Keys]


class Case:
    """A compile, what may be patched for one look at its keys, and a folder to work in."""

    def __init__(self, keyed: Keyed, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.keyed, self.patch, self.folder = keyed, patch, folder
        self.target = TARGETS[keyed.options["device"]]

    def copy(self) -> Path:
        return shutil.copytree(self.keyed.model, self.folder / "copy")


def package(name: str) -> Change:
    """Another version of a package."""

    def change(case: Case) -> Keys:
        real = stages.version_of
        other = lambda requested, extra="compile": "99.9" if requested == name else real(requested, extra)  # noqa: E731
        for module in (stages, onnxruntime, programs):
            case.patch.setattr(module, "version_of", other)
        return case.keyed.ask()

    return change


def python(case: Case) -> Keys:
    case.patch.setattr(stages, "sys", SimpleNamespace(version_info=(3, 99, 0, "final", 0)))
    return case.keyed.ask()


def fake_version(case: Case) -> Keys:
    case.patch.setattr("llmc.runtime.executors.fake.executor.FAKE_VERSION", "9.9")
    return case.keyed.ask()


def features(case: Case) -> Keys:
    """A host with another instruction set."""
    for module, name in (
        (onnxruntime, "cpu_features"),
        (onnxruntime, "host_features"),
        (verification, "host_features"),
    ):
        case.patch.setattr(module, name, lambda: ("x86_64", "avx"))
    return case.keyed.ask()


def compiled_for(case: Case) -> Keys:
    """A toy device with instruction sets."""
    use(case.patch, target=type("WithIsa", (fake.FakeTarget,), {"isa": lambda self: ("v2",)}))
    return case.keyed.ask()


def portable_for(case: Case) -> Keys:
    case.patch.setattr(hpu.HpuTarget, "isa", lambda self: ("gaudi9",))
    return case.keyed.ask()


def limited(case: Case) -> Keys:
    case.patch.setenv("ATEN_CPU_CAPABILITY", "default")
    return case.keyed.ask()


def attribute(name: str, value: object) -> Change:
    """Another attribute of the target."""

    def change(case: Case) -> Keys:
        case.patch.setattr(case.target, name, value)
        return case.keyed.ask()

    return change


def renamed(name: str) -> Change:
    """Another name of the device."""

    def change(case: Case) -> Keys:
        case.patch.setattr(case.target, "description", replace(case.target.description, name=name))
        return case.keyed.ask()

    return change


def option(**options: Any) -> Change:
    """Another option, offered or not."""

    def change(case: Case) -> Keys:
        offered = replace(case.target.description, quantisations=("none", "int8"), dtypes=("f32", "bf16"))
        case.patch.setattr(case.target, "description", offered)
        return case.keyed.ask(**options)

    return change


def shape(**sizes: Any) -> Change:
    def change(case: Case) -> Keys:
        reshape(case.patch, case.target, **sizes)
        return case.keyed.ask()

    return change


def config(**members: Any) -> Change:
    """Another member in config.json."""

    def change(case: Case) -> Keys:
        path = case.copy() / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **members}))
        return case.keyed.ask(model=path.parent)

    return change


def file(name: str) -> Change:
    """One more byte, or another, in a file of the checkpoint."""

    def change(case: Case) -> Keys:
        path = case.copy() / name
        data = path.read_bytes()
        path.write_bytes(data + b"\n" if name.endswith("json") else data[:-1] + bytes([data[-1] ^ 1]))
        return case.keyed.ask(model=path.parent)

    return change


def output(kind: str, *names: str) -> Change:
    """A stage that made something else."""

    def change(case: Case) -> Keys:
        blob = case.keyed.store.put_bytes(b"something else")
        return case.keyed.ask(other={(kind, name): blob for name in names})

    return change


def longer(case: Case) -> Keys:
    """The same buckets for longer sequences."""
    limits = case.keyed.plan.limits
    most = limits.max_model_len * 3
    return case.keyed.ask(
        plan=Plan(Limits(most, limits.max_num_seqs, most, 8), case.keyed.plan.buckets, Provenance(""))
    )


def another_bucket(case: Case) -> Keys:
    """A decode bucket with room for one token less."""
    *decode, last = case.keyed.plan.decode
    buckets = (*case.keyed.plan.prompt, *decode, Bucket("decode", last.batch, 1, last.context - 1))
    return case.keyed.ask(plan=Plan(case.keyed.plan.limits, buckets, Provenance("")))


EVERYWHERE: dict[str, tuple[Change, set[str]]] = {
    "numpy": (package("numpy"), {"reference:toolchain.numpy", "verify:toolchain.numpy"}),
    "tokenizers": (package("tokenizers"), {"reference:toolchain.tokenizers"}),
    "a kernel limit": (limited, {"verify:environment.ATEN_CPU_CAPABILITY"}),
    "target": (renamed("other"), {"executable:target"}),
    "quantize": (option(quantize="int8"), {"executable:option.quantize", "verify:option.quantize"}),
    "dtype": (option(dtype="bf16"), {"executable:option.dtype", "verify:option.dtype"}),
    "top logits": (option(sample_top_k=5), {"executable:option.sample_top_k", "verify:option.sample_top_k"}),
    "phase": (shape(phase="other"), {"executable:shape.phase", "verify:executables", "verify:past.executables"}),
    "batch": (shape(batch=77), {"executable:shape.batch", "verify:executables"}),
    "query": (shape(query=77), {"executable:shape.query", "verify:executables"}),
    "context": (shape(context=77), {"executable:shape.context", "verify:executables"}),
    "weights file": (file("model.safetensors"), READ),
    "tokenizer file": (file("tokenizer.json"), READ),
    "executable": (output("executable", "executable"), {"verify:executables", "verify:past.executables"}),
    "reference logits": (output("reference", "probes"), {"verify:reference"}),
    "reference text": (output("reference", "text"), {"verify:reference"}),
    "tokenizer": (output("tokenizer", "tokenizer.json"), {"verify:file.tokenizer.json"}),
    "template": (output("tokenizer", "chat_template.jinja"), {"verify:file.chat_template.jinja"}),
    "chat format": (output("tokenizer", "chat_format.json"), {"verify:file.chat_format.json"}),
    "placements": (output("weights", "placements"), {"executable:input.placements"}),
    "longer": (longer, {"reference:farthest", "reference:longest", "verify:past.plan", "verify:plan"}),
    "bucket": (another_bucket, {"executable:shape.context", "verify:bucket", "verify:plan"}),
}
TRACED = {"trace:toolchain.numpy", "reference:toolchain.numpy", "verify:toolchain.numpy"}
BUILT = {"trace:toolchain.torch", "reference:toolchain.torch"}
TRANSFORMERS = {"trace:toolchain.transformers", "reference:toolchain.transformers"}
REAL: dict[str, tuple[Change, set[str]]] = {
    **EVERYWHERE,
    "numpy": (package("numpy"), TRACED),
    "sympy": (package("sympy"), {"trace:toolchain.sympy"}),
    "python": (python, {"trace:toolchain.python", "reference:toolchain.python"}),
    "config": (config(rms_norm_eps=2e-5), {"trace:config", *READ}),
    "heads": (config(num_key_value_heads=1), {"trace:config", "trace:cache", *READ}),
}
CHANGES: dict[str, dict[str, tuple[Change, set[str]]]] = {
    "fake": {
        **EVERYWHERE,
        "state": (attribute("state", "portable"), {"executable:state"}),
        "version": (fake_version, {"executable:toolchain.fake", "verify:toolchain.fake"}),
        "isa": (compiled_for, {"executable:isa"}),
        "host": (features, {"verify:isa"}),
        "config": (config(note=1), READ),
        "positions": (config(max_position_embeddings=128), {"trace:positions", "executable:input.positions", *READ}),
        "weights": (output("weights", "weights"), {"executable:input.weights", "verify:file.weights"}),
    },
    "cpu": {
        **REAL,
        "numpy": (package("numpy"), TRACED | {"lower:toolchain.numpy"}),
        "python": (python, REAL["python"][1] | {"lower:toolchain.python"}),
        "program": (output("trace", "program"), {"lower:program"}),
        "program's tables": (output("trace", "tables"), {"lower:tables"}),
        "state": (attribute("state", "portable"), {"executable:state"}),
        "torch": (package("torch"), BUILT),
        "transformers": (package("transformers"), TRANSFORMERS),
        "onnx": (
            package("onnx"), {f"{kind}:toolchain.onnx" for kind in ("lower", "pack", "executable", "verify")},
        ),
        "onnxruntime": (
            package("onnxruntime"), {f"{kind}:toolchain.onnxruntime" for kind in ("pack", "executable", "verify")},
        ),
        "isa": (features, {"pack:isa", "executable:isa", "verify:isa"}),
        "quantize": (option(quantize="int8"), {"lower:block", "executable:option.quantize", "verify:option.quantize"}),
        "longer": (longer, {"trace:max_positions", *EVERYWHERE["longer"][1]}),
        "graph": (output("lower", "model"), {"pack:lowered", "executable:input.lowered"}),
        "recipes": (output("lower", "recipes"), {"weights:recipes"}),
        "tables": (output("lower", "tables"), {"weights:tables"}),
        "folded": (output("lower", "folded"), {"pack:folded"}),
        "weights": (output("weights", "weights"), {"pack:weights"}),
        "placements": (output("weights", "placements"), {"pack:placements"}),
        "packed": (output("pack", "weights"), {"executable:input.weights", "verify:file.weights"}),
        "packed placements": (output("pack", "placements"), {"executable:input.placements"}),
    },
    "hpu": {
        **REAL,
        "heads": (
            config(num_key_value_heads=1), {"trace:config", "trace:cache", "executable:input.cache", *READ},
        ),
        "state": (attribute("state", "native"), {"executable:state"}),
        "torch": (package("torch"), {*BUILT, "executable:toolchain.torch", "verify:toolchain.torch"}),
        "transformers": (
            package("transformers"),
            {*TRANSFORMERS, "executable:toolchain.transformers", "verify:toolchain.transformers"},
        ),
        "isa": (portable_for, {"executable:isa"}),
        "host": (features, {"verify:isa"}),
        "dtype": (option(dtype="bf16"), {"trace:dtype", "executable:option.dtype", "verify:option.dtype"}),
        "top logits": (
            option(sample_top_k=5),
            {"trace:sample_top_k", "executable:option.sample_top_k", "verify:option.sample_top_k"},
        ),
        "program": (
            output("trace", "program"), {"executable:input.program_first", "executable:input.program_cached"},
        ),
        "tensors": (output("trace", "tensors"), {"weights:tensors"}),
        "tables": (output("trace", "tables"), {"weights:tables"}),
        "weights": (output("weights", "weights"), {"executable:input.weights", "verify:file.weights"}),
        "placements": (output("weights", "placements"), {"executable:input.placements", "verify:file.weights.json"}),
    },
}  # fmt: skip


@default_cases(51)
@pytest.mark.parametrize(
    ("device", "what"), [pytest.param(d, what, id=f"{d}-{what}") for d in DEVICES for what in CHANGES[d]]
)
def test_each_input_changes_the_components_that_name_it_and_no_other(
    device: str, what: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    keyed, base = compiled(device)
    change, expected = CHANGES[device][what]
    assert changed(base, change(Case(keyed, monkeypatch, tmp_path))) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_no_component_is_left_without_an_input_that_changes_it(device: str, compiled: Compiled) -> None:
    named = components(compiled(device)[1])
    tested = set().union(*(expected for _, expected in CHANGES[device].values()))
    code = {name for name in named if name.endswith(":code")}
    assert named - FIXED - SHAPING - LIMITS - code == tested - UNUSUAL
    assert code == {f"{name.partition(':')[0]}:code" for name in named}, "every kind of key names its code"


def test_what_decodes_a_gguf_file_is_named_by_what_is_built_of_it(tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(format="gguf", digest=lambda _: "sha256:0")
    read = stages.Stages(Store(tmp_path), checkpoint, toy_plan(), lambda _: None)
    assert read.reading() == {"checkpoint": "sha256:0", "toolchain.gguf": stages.version_of("gguf")}
    assert set(read.reading(tokenizer=True)) == {"checkpoint", "toolchain.tokenizers"}
    checkpoint.format = "huggingface"
    assert set(read.reading()) == set(read.reading(tokenizer=True)) == {"checkpoint"}


def test_every_build_of_a_compile_is_logged_once_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy.make(tmp_path)
    monkeypatch.setattr(stages, "settled", lambda seen: True)  # files just written are read again, and logged so
    toy.compile()
    with caplog.at_level(logging.INFO, "llmc.artifacts"):
        caplog.clear()
        toy.compile()
        assert [message for message in caplog.messages if message.startswith("miss")] == []
        before = {entry.key for entry in toy.store.entries()}
        toy.compile(toy_plan(decode=[*DECODE, (3, 24)]))
        misses = [message.split(":")[0] for message in caplog.messages if message.startswith("miss")]
    new = [entry.key for entry in toy.store.entries() if entry.key not in before]
    built = [key for key in new if not key.is_local]  # notes of what was made here follow from these
    assert sorted(misses) == sorted(f"miss {key.kind} {key.short}" for key in built)
    assert {key.kind for key in built} == {"executable", "verify", "bundle"}


def test_whatever_an_engine_is_opened_with_is_named_by_what_was_verified(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that only the executor reads changes what is verified, and words for people do not."""
    keyed, base = compiled("fake")
    for option, expected in (
        ("fixed_properties", {"verify:option.fixed_properties"}),
        ("specialise_memory", {"verify:option.specialise_memory"}),
        ("remaining", set()), ("choice", set()),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            reported = {"recorded": lambda self, options, name=option: Recorded("fake", options={name: "other"})}
            use(patch, target=type("Told", (fake.FakeTarget,), reported))
            assert changed(base, keyed.ask()) == expected
