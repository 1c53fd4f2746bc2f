"""An opened bundle: its plan, files, tokenizer and manifest fields."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmc.artifacts.bundle.disaggregated import Halves
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.log import logger
from llmc.buckets.plan import Plan
from llmc.errors import ArtifactError, InputError
from llmc.paths import is_dir
from llmc.runtime.cache_shape import CacheShape, Uniform
from llmc.runtime.text.chat_format import CHAT_FORMAT, ChatFormat
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable, Manifest
    from llmc.buckets.encoding import EncodePlan
    from llmc.runtime.text.tokenizer import Tokenizer


MAX_NUMBER = 1 << 50


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that requests select by `name`, its folder's name; its largest rank; the modules it changes."""

    name: str
    root: str
    rank: int
    modules: list[str]

    @property
    def is_sound(self) -> bool:
        """Whether the fields have the declared types."""
        texts = (self.name, self.root, *self.modules) if isinstance(self.modules, list) else (None,)
        return all(isinstance(text, str) for text in texts) and type(self.rank) is int


class Bundle:
    """A bundle on disk. Opening reads only the manifest; files are read and verified on first use."""

    def __init__(self, files: BundleFiles, settings: Settings, prefill: Path | None = None) -> None:
        self.files = files
        self.settings = settings
        self.path = Path(files.folder)
        self.prefill = prefill
        """The prefill bundle, if this is the decode half of a pair (artifacts/bundle/disaggregated.py)."""

    @classmethod
    def open(cls, path: str | Path, settings: Settings | None = None) -> Bundle:
        """Open the bundle folder `path`; raises ArtifactError with the problem and its remedy.

        If `path` is not a folder, it may be a reference (artifacts/local/references.py), whose bundle is downloaded
        into the store first. With LLMC_REQUIRE_SIGNATURES, a trusted key must have signed the manifest; this is checked
        before any other file is read. With LLMC_OPEN_PORTABLE, a bundle compiled on its target opens as its portable
        half. A disaggregated pair opens its decode half. `settings` (default: the environment) apply to everything done
        with the bundle.
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
        """Log a warning if other users can change the bundle. `BundleFiles.require_native` raises for native code."""
        if (found := self.files.exposed) is not None:
            logger().warning("%s: others may change this bundle: %s; %s", self.path, found, found.remedy)

    def within(self, name: str) -> Bundle:
        """Open the bundle whose manifest is the file `name` of this one. Raises ArtifactError."""
        return Bundle(self.files.within(name), self.settings)

    @property
    def manifest(self) -> Manifest:
        """The parsed manifest."""
        return self.files.manifest

    @property
    def task(self) -> str:
        """ "generate", or "embed" or "score" for a bundle without a cache (runtime/pooling)."""
        return str(self.manifest.options.get("task", "generate"))

    @cached_property
    def plan(self) -> Plan:
        """The compiled buckets; raises InputError for a bundle that does not generate."""
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
        """The buckets of an embedding or scoring bundle; raises InputError for a bundle that generates."""
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
        """The executable of that shape (phase "any", sizes None: every shape); raises ArtifactError if missing."""
        found = self._executables.get((phase, batch, query, context))
        if found is None:
            raise ArtifactError(
                f"{self.path}: no executable for {phase} batch {batch}, query {query}, context {context}; "
                f"compile it into the bundle: {self.recompile_hint}"
            )
        return found

    @property
    def recompile_hint(self) -> str:
        """The command that compiles this bundle again."""
        return self.recompile(self.manifest.device)

    def recompile(self, device: str, *options: str) -> str:
        """The command that compiles this bundle for `device`, with further options."""
        name = self.manifest.provenance.get("model", "MODEL")
        return " ".join(["llmc compile", name, "--device", device, *options, "-o", str(self.path)])

    def _repr_html_(self) -> str:
        """HTML summary for notebooks: source, verification results and graphs."""
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
        """Whether the bundle contains the model's tokenizer."""
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
        """A size from the manifest: layers, kv_heads, head_dim or vocab_size. Raises ArtifactError if it is invalid."""
        return self._number("model", name, 1, None)

    @cached_property
    def cache_shape(self) -> CacheShape:
        """The shape of the cache; raises ArtifactError if the manifest's is invalid."""
        tensors = self.manifest.model.get("cache")
        if tensors is None:
            return CacheShape.plain(self.size("layers"), self.size("kv_heads"), self.size("head_dim"))
        try:
            return CacheShape.from_json(self.size("layers"), tensors)
        except ValueError as e:
            raise ArtifactError(f"{self.path}: in its manifest {e}; compile again: {self.recompile_hint}") from e

    @property
    def cache_bytes(self) -> int:
        """Cache bytes for all sequences at full length; 0 without a cache."""
        if self.task != "generate":
            return 0
        limits, dtype = self.plan.limits, self.manifest.options.get("dtype")
        held: Any = dtype if dtype in ("f16", "bf16") else "f32"
        kept = str(self.manifest.options.get("kv_cache_dtype", ""))
        return limits.max_num_seqs * self.cache_shape.nbytes(limits.max_model_len, held, kept)

    def uniform_cache(self, executor: str) -> Uniform:
        """The cache as one key and value size, for executors that support only that; raises ArtifactError otherwise."""
        found = self.cache_shape.uniform
        if found is None:
            raise ArtifactError(
                f"{self.path}: its cache is not of keys and values of one size in every layer, which is all that "
                f"executor {executor} holds; compile again for another device: {self.recompile_hint}"
            )
        return found

    @cached_property
    def sample_top_k(self) -> int:
        """How many of the largest logits the graphs return in addition to all logits; 0: none."""
        return self.option("sample_top_k", 0)

    def option(self, name: str, default: int | None = None) -> int:
        """An integer option of the manifest; raises ArtifactError if it is not an integer."""
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
        """Token ids that end a sequence; raises ArtifactError if invalid."""
        ids = self.manifest.model.get("eos_token_ids", [])
        if not isinstance(ids, list) or not all(type(item) is int and 0 <= item <= MAX_NUMBER for item in ids):
            self._wrong("model.eos_token_ids", ids, "a list of token ids")
        return tuple(ids)

    @property
    def sampling(self) -> Any:
        """Sampling parameters that the checkpoint recommends, by name, unchecked: see `recommended`."""
        return self.manifest.model.get("sampling", {})

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests can select; raises ArtifactError if the manifest's list is invalid."""
        stated = self.manifest.model.get("adapters", [])
        try:
            found = tuple(Adapter(**a) for a in stated)
        except TypeError:
            found = ()
        if len(found) != len(stated) or not all(a.is_sound for a in found) or len({a.name for a in found}) < len(found):
            self._wrong("model.adapters", stated, "a list of adapters, each with a name of its own")
        return found

    def adapter(self, name: str | None) -> int:
        """The engine's number of an adapter; 0 for None, the base model. Raises InputError for an unknown name."""
        names = [adapter.name for adapter in self.adapters]
        if name is None:
            return 0
        if name not in names:
            known = f"it has {', '.join(names)}" if names else "it has none (llmc compile --lora-modules NAME=ADAPTER)"
            raise InputError(f"{self.path}: no adapter {name!r:.80}; {known}")
        return names.index(name) + 1

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Special tokens by name (bos_token, eos_token …) for the chat template; raises ArtifactError if invalid."""
        tokens = self.manifest.model.get("special_tokens", {})
        if not isinstance(tokens, dict) or not all(isinstance(text, str) for text in tokens.values()):
            self._wrong("model.special_tokens", tokens, "tokens by name")
        return dict(tokens)

    @property
    def chat_template(self) -> str | None:
        """The jinja2 source of the chat template, or None."""
        if "chat_template.jinja" not in self.manifest.files:
            return None
        return self.files.read("chat_template.jinja").decode()

    @property
    def chat_format(self) -> ChatFormat | None:
        """What the chat template takes and its model writes, as found at compile time, or None.

        Raises ArtifactError for an invalid file.
        """
        if CHAT_FORMAT not in self.manifest.files:
            return None
        try:
            return ChatFormat.read(self.files.read(CHAT_FORMAT))
        except InputError as error:
            raise ArtifactError(f"{self.path}: {CHAT_FORMAT}: {error}") from None


def require_signature(files: BundleFiles, settings: Settings) -> None:
    """Raise UntrustedError unless a trusted key signed the manifest. The manifest lists every blob's digest."""
    from llmc.artifacts.bundle.trust import code_of_bundle
    from llmc.artifacts.signing.keyring import Keyring

    manifest = files.manifest
    keyring = Keyring.from_settings(settings)
    native = code_of_bundle(manifest) is not None
    keyring.require(manifest.to_bytes(), files.signature, native=native, origin=str(files.folder))
