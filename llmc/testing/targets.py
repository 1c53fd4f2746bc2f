"""The target contract as tests: options, keys, the whole pipeline, and the executor contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions, Option, OptionValue
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.pipeline.resolve import recorded_options
from llmc.compiler.targets import declared, devices, open_target
from llmc.errors import InputError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.testing.executors import PLAN, TOP, ExecutorContract, Open, opener
from llmc.testing.toy import write_toy


class Compiled(NamedTuple):
    """A bundle, the checkpoint it was compiled from, and the store with its parts."""

    bundle: Path
    model: Path
    store: Store
    result: CompileResult


class TargetContract(ExecutorContract):
    """The tests that every target must pass. A subclass sets `device`.

    `rounds_of_life` is the number of random actions per executor test. `model` writes the checkpoint to compile, by
    default the fake target's toy model with reference "toy". `varied` has another value for each of the target's own
    options without choices.
    """

    device: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    """Compile options besides the defaults."""

    varied: ClassVar[dict[str, OptionValue]] = {}
    rounds_of_life: ClassVar[int] = 50

    @classmethod
    def model(cls, folder: Path) -> Path:
        """Write a small checkpoint to a new folder; override it for a target that compiles other models."""
        return write_toy(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def compiled(cls, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
        """The bundle, compiled and verified once for all tests."""
        folder = tmp_path_factory.mktemp("target")
        model, store = cls.model(folder / "model"), Store(folder / "store")
        return Compiled(folder / "bundle", model, store, cls._compile(model, folder / "bundle", store))

    @classmethod
    def _compile(cls, model: Path, bundle: Path, store: Store, **more: Any) -> CompileResult:
        requested = CompileOptions.of(cls.device, **{"verify": "all", "sample_top_k": TOP, **cls.options, **more})
        return compile_bundle(str(model), bundle, PLAN, requested, store, lambda _: None)

    @pytest.fixture
    def opened(self, compiled: Compiled, request: pytest.FixtureRequest) -> Open:
        """For the executor's tests."""
        return opener(compiled.bundle, request)

    @pytest.fixture
    def rounds(self) -> int:
        """For the executor's tests."""
        return self.rounds_of_life

    def test_it_is_a_device_whose_options_are_flags(self) -> None:
        target = open_target(self.device)
        name = self.device.partition(":")[0]
        assert name in devices()
        for option in target.description.options:
            assert name in declared()[option.name].devices
            assert option.help and option.flag.startswith("--")

    def test_options_of_others_and_what_it_does_not_offer_are_refused(self) -> None:
        target = open_target(self.device)
        foreign = [
            one.option for name, one in declared().items() if name not in {o.name for o in target.description.options}
        ]
        for option in foreign:
            with pytest.raises(InputError, match=f"{option.flag} is for "):
                target.configure(CompileOptions.of(self.device, **{option.name: self._another(option)}))
        with pytest.raises(InputError, match="unknown option 'nonsense'"):
            target.configure(CompileOptions.of(self.device, nonsense=1))

    def test_what_is_compiled_is_verified_and_says_so(self, compiled: Compiled) -> None:
        verification = compiled.result.verification
        assert verification["mode"] == "all"
        assert verification["buckets"] == len(PLAN.buckets)
        assert verification["leak"] <= 1e-4

    def test_the_same_again_comes_from_the_store(self, compiled: Compiled, tmp_path: Path) -> None:
        again = self._compile(compiled.model, tmp_path / "again", compiled.store)
        assert (again.built, again.reused) == (0, compiled.result.built + compiled.result.reused)
        assert read_manifest(tmp_path / "again").digest == read_manifest(compiled.bundle).digest

    def test_two_stores_hold_the_same_bytes(self, compiled: Compiled, tmp_path: Path) -> None:
        self._compile(compiled.model, tmp_path / "other", Store(tmp_path / "store"), verify="none")
        ours, other = read_manifest(compiled.bundle), read_manifest(tmp_path / "other")
        assert [e.blob for e in other.executables] == [e.blob for e in ours.executables]
        assert other.files == ours.files

    def test_keys_name_the_options_that_shape_executables_and_no_others(
        self, compiled: Compiled, tmp_path: Path
    ) -> None:
        before = [e.key for e in read_manifest(compiled.bundle).executables]
        for option in open_target(self.device).description.options:
            path, changed = tmp_path / option.name, {option.name: self._another(option)}
            self._compile(compiled.model, path, compiled.store, verify="none", **changed)
            manifest = read_manifest(path)
            assert manifest.options[option.name] == changed[option.name]
            assert (before == [e.key for e in manifest.executables]) == (not option.shapes_executable), option.name

    def test_options_come_back_from_the_manifest(self, compiled: Compiled) -> None:
        target, manifest = open_target(self.device), read_manifest(compiled.bundle)
        requested = CompileOptions.of(self.device, **{"sample_top_k": TOP, **self.options})
        found = recorded_options(manifest, target)
        assert dataclasses.replace(found, verify=requested.verify) == target.configure(requested)

    def test_the_bundle_answers_without_compiling(self, compiled: Compiled) -> None:
        engine = BundleLLM(compiled.bundle, threads=1)
        try:
            (answer,) = engine.generate(["abc"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 4
            assert engine.compilations == 0
        finally:
            engine.close()

    def _another(self, option: Option[Any]) -> OptionValue:
        if option.name in self.varied:
            return self.varied[option.name]
        if option.choices:
            return next(choice for choice in option.choices if choice != option.default)
        if option.kind is bool:
            return not option.default
        if option.kind is str:
            return f"another-{option.default or option.name}"
        return option.kind((option.least or 0) + 1 + (option.default or 0))
