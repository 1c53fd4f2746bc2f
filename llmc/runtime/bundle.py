"""An opened bundle: its plan, its files, its tokenizer, and executors over its executables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.artifacts.bundle.hybrid import Halves
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.log import logger
from llmc.buckets.plan import Plan
from llmc.errors import ArtifactError, InputError
from llmc.paths import is_dir
from llmc.runtime.cache_shape import CacheShape, Uniform
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Manifest
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.buckets.encoding import EncodePlan
    from llmc.runtime.text.tokenizer import Tokenizer


MAX_NUMBER = 1 << 50


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that requests choose by `name`: the name of the folder it came from, its largest rank, and which
    modules it changes."""

    name: str
    root: str
    rank: int
    modules: list[str]

    @property
    def is_sound(self) -> bool:
        """Whether it is of the types that it states."""
        texts = (self.name, self.root, *self.modules) if isinstance(self.modules, list) else (None,)
        return all(isinstance(text, str) for text in texts) and type(self.rank) is int


class Bundle:
    """A bundle on disk. Opening reads the manifest only; files are read, and verified, when first needed."""

    def __init__(self, files: BundleFiles, settings: Settings, prefill: Path | None = None) -> None:
        self.files = files
        self.settings = settings
        self.path = Path(files.folder)
        self.prefill = prefill
        """The bundle of the same hybrid that computes prompts for this one (artifacts/bundle/hybrid.py)."""

    @classmethod
    def open(cls, path: str | Path, settings: Settings | None = None) -> Bundle:
        """Open the bundle folder `path`; raises ArtifactError saying what is wrong and how to repair it.

        A path that is not a folder may be a reference (see artifacts/local/references.py); its bundle is put into the
        store first. With LLMC_REQUIRE_SIGNATURES, its manifest has to be signed by a trusted key before any file of it
        is read. With LLMC_OPEN_PORTABLE, a finished bundle is opened as the portable one that it was made of.
        Of a hybrid's folder the half that decodes is opened. `settings` (default: the environment's) hold for all that
        is done with the bundle.
        """
        settings = settings or Settings.from_environment()
        if not is_dir(path):
            from llmc.artifacts.local.references import resolve

            path = resolve(path, settings)
        halves = Halves.read(Path(path))
        if halves is not None:
            path = halves.decode
        files = BundleFiles.open(path, settings)
        if settings.require_signatures:
            require_signature(files, settings)
        prefill = None if halves is None else halves.prefill
        return cls(files.portable_half() if settings.open_portable else files, settings, prefill)

    def warn_if_exposed(self) -> None:
        """Log a warning if others may change the bundle. Called by what opens it to run data of it; for native code
        `BundleFiles.require_native` raises."""
        if (found := self.files.exposed) is not None:
            logger().warning("%s: others may change this bundle: %s; %s", self.path, found, found.remedy)

    def within(self, name: str) -> Bundle:
        """The bundle whose manifest is the file `name` of this one. Raises ArtifactError."""
        return Bundle(self.files.within(name), self.settings)

    @property
    def manifest(self) -> Manifest:
        """What the bundle is made of."""
        return self.files.manifest

    @property
    def task(self) -> str:
        """ "generate", or "embed" or "score" of a bundle without a cache (runtime/pooling)."""
        return str(self.manifest.options.get("task", "generate"))

    @cached_property
    def plan(self) -> Plan:
        """The buckets that were compiled; raises InputError for a bundle that generates nothing."""
        import json

        if self.task != "generate":
            raise InputError(
                f"{self.path}: a bundle to {self.task}, which generates nothing; use llmc {self.task}, llmc serve or "
                f"LLM.{self.task}"
            )

        try:
            return Plan.from_json(json.dumps(self.manifest.plan), source=f"{self.path}: plan")
        except InputError as e:
            raise ArtifactError(f"{e}; compile again: {self.recompile_hint}") from e

    @cached_property
    def encode_plan(self) -> EncodePlan:
        """The buckets of a bundle without a cache; raises InputError for one that generates."""
        import json

        from llmc.buckets.encoding import EncodePlan

        if self.task == "generate":
            raise InputError(
                f"{self.path}: a bundle to generate text, which neither embeds nor scores; compile a checkpoint for "
                "that with --task embed or --task score"
            )
        try:
            return EncodePlan.from_json(json.dumps(self.manifest.plan), source=f"{self.path}: plan")
        except InputError as e:
            raise ArtifactError(f"{e}; compile again: {self.recompile_hint}") from e

    @cached_property
    def _executables(self) -> dict[tuple[str, int | None, int | None, int | None], Executable]:
        return {(e.phase, e.batch, e.query, e.context): e for e in self.manifest.executables}

    def executable(self, phase: str, batch: int | None, query: int | None, context: int | None) -> Executable:
        """The executable of that shape (phase "any" and None sizes: every shape); raises ArtifactError without one."""
        found = self._executables.get((phase, batch, query, context))
        if found is None:
            raise ArtifactError(
                f"{self.path}: no executable for {phase} batch {batch}, query {query}, context {context}; "
                f"compile it into the bundle: {self.recompile_hint}"
            )
        return found

    @property
    def recompile_hint(self) -> str:
        """The command that makes this bundle again."""
        return self.recompile(self.manifest.device)

    def recompile(self, device: str, *options: str) -> str:
        """The command that makes this bundle for `device`, with further options."""
        name = self.manifest.provenance.get("model", "MODEL")
        return " ".join(["llmc compile", name, "--device", device, *options, "-o", str(self.path)])

    def _repr_html_(self) -> str:
        """What a notebook shows: what it was made of, how its numbers compared, and its graphs."""
        from llmc.buckets.plan import grids
        from llmc.buckets.render.page import Grid, Table, columns, fragment
        from llmc.buckets.render.text import size_text

        built = self.manifest
        states = Counter(executable.state for executable in built.executables)
        listed = {
            "model": built.model.get("name", "unknown"),
            "device": built.device,
            "executables": ", ".join(f"{number:,} {state}" for state, number in sorted(states.items())),
            "size": size_text(built.size),
            **{name: value for name, value in built.options.items() if isinstance(value, str | int) and value != ""},
            **{name: built.verification[name] for name in ("mean_kl", "top1", "leak") if name in built.verification},
            **built.toolchain,
        }
        rows = [(name, f"{value:.3g}" if isinstance(value, float) else str(value)) for name, value in listed.items()]
        parts: list[Table | Grid] = [Table("", columns(("", ""), 2), rows)]
        if self.task == "generate":
            parts += grids(self.plan.prompt, self.plan.decode)
        return fragment(f"Bundle {self.path}", (), parts)

    @property
    def has_tokenizer(self) -> bool:
        """Whether it brings the model's tokenizer."""
        return "tokenizer.json" in self.manifest.files

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ArtifactError when the bundle has none."""
        from llmc.runtime.text.tokenizer import Tokenizer

        if not self.has_tokenizer:
            raise ArtifactError(f"{self.path}: no tokenizer in the bundle; pass token ids instead of text")
        from llmc.runtime.text.vocabulary import VOCABULARY, Vocabulary

        if VOCABULARY not in self.manifest.files:
            return Tokenizer(self.files.read("tokenizer.json"), self.eos_token_ids)
        vocabulary = Vocabulary(self.files.read(VOCABULARY))
        return Tokenizer(lambda: self.files.read("tokenizer.json"), self.eos_token_ids, vocabulary)

    def size(self, name: str) -> int:
        """One of the model's sizes: layers, kv_heads, head_dim or vocab_size; raises ArtifactError if it is not a
        size.
        """
        return self._number("model", name, 1, None)

    @cached_property
    def cache_shape(self) -> CacheShape:
        """The tensors of its cache; raises ArtifactError if the manifest's are not those of a cache."""
        tensors = self.manifest.model.get("cache")
        if tensors is None:
            return CacheShape.plain(self.size("layers"), self.size("kv_heads"), self.size("head_dim"))
        try:
            return CacheShape.from_json(self.size("layers"), tensors)
        except ValueError as e:
            raise ArtifactError(f"{self.path}: in its manifest {e}; compile again: {self.recompile_hint}") from e

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of all sequences at full length; 0 without a cache."""
        if self.task != "generate":
            return 0
        limits, dtype = self.plan.limits, self.manifest.options.get("dtype")
        held: Any = dtype if dtype in ("f16", "bf16") else "f32"
        kept = str(self.manifest.options.get("kv_cache_dtype", ""))
        return limits.max_num_seqs * self.cache_shape.nbytes(limits.max_model_len, held, kept)

    def uniform_cache(self, executor: str) -> Uniform:
        """The same for an executor that holds keys and values of one size only; raises ArtifactError for others."""
        found = self.cache_shape.uniform
        if found is None:
            raise ArtifactError(
                f"{self.path}: its cache is not of keys and values of one size in every layer, which is all that "
                f"executor {executor} holds; compile again for another device: {self.recompile_hint}"
            )
        return found

    @cached_property
    def sample_top_k(self) -> int:
        """How many of the largest logits the graphs return beside all of them; 0: all of them only."""
        return self.option("sample_top_k", 0)

    def option(self, name: str, default: int | None = None) -> int:
        """An option that is a number; raises ArtifactError if it is not a number."""
        return self._number("options", name, 0, default)

    def _number(self, member: str, name: str, least: int, default: int | None) -> int:
        value = getattr(self.manifest, member).get(name, default)
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            self._wrong(f"{member}.{name}", value, f"an integer from {least} to {MAX_NUMBER}")
        return value

    def _wrong(self, member: str, value: object, wanted: str) -> NoReturn:
        raise ArtifactError(
            f"{self.path}: {member} in its manifest is {value!r:.80}, not {wanted}; compile again: "
            f"{self.recompile_hint}"
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence; raises ArtifactError for values that are not token ids."""
        ids = self.manifest.model.get("eos_token_ids", [])
        if not isinstance(ids, list) or not all(type(item) is int and 0 <= item <= MAX_NUMBER for item in ids):
            self._wrong("model.eos_token_ids", ids, "a list of token ids")
        return tuple(ids)

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests choose from; raises ArtifactError for what is none."""
        stated = self.manifest.model.get("adapters", [])
        try:
            found = tuple(Adapter(**a) for a in stated)
        except TypeError:
            found = ()
        if len(found) != len(stated) or not all(a.is_sound for a in found) or len({a.name for a in found}) < len(found):
            self._wrong("model.adapters", stated, "a list of adapters, each with a name of its own")
        return found

    def adapter(self, name: str | None) -> int:
        """An adapter's number for the engine, 0 for None, the base model. Raises InputError for an unknown name."""
        names = [adapter.name for adapter in self.adapters]
        if name is None:
            return 0
        if name not in names:
            known = f"it has {', '.join(names)}" if names else "it has none (llmc compile --lora-modules NAME=ADAPTER)"
            raise InputError(f"{self.path}: no adapter {name!r:.80}; {known}")
        return names.index(name) + 1

    @property
    def special_tokens(self) -> dict[str, Any]:
        """bos_token, eos_token … as text, for the chat template; raises ArtifactError for values that are not texts."""
        tokens = self.manifest.model.get("special_tokens", {})
        if not isinstance(tokens, dict) or not all(isinstance(text, str) for text in tokens.values()):
            self._wrong("model.special_tokens", tokens, "tokens by name")
        return dict(tokens)

    @property
    def chat_template(self) -> str | None:
        """The jinja2 source of the chat template, if there is one."""
        if "chat_template.jinja" not in self.manifest.files:
            return None
        return self.files.read("chat_template.jinja").decode()


def require_signature(files: BundleFiles, settings: Settings) -> None:
    """Raise UntrustedError unless a trusted key signed the bundle's manifest, and so every blob by its digest."""
    from llmc.artifacts.bundle.native import code_of_bundle
    from llmc.artifacts.signing.keyring import Keyring

    manifest = files.manifest
    keyring = Keyring.from_settings(settings)
    native = code_of_bundle(manifest) is not None
    keyring.require(manifest.to_bytes(), files.signature, native=native, origin=str(files.folder))
