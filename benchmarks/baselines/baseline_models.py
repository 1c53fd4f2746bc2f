"""A checkpoint's weights in the forms that baselines read, made by the baselines' own tools and kept in a folder.

Forms, by name
    huggingface      the folder itself, or one written from the checkpoint in float32
    gguf-f16         float16, written from the checkpoint
    gguf-q8_0, -q4_1, -q4_0, -q4_k_m   blocks of 8 and 4 bits, by llama.cpp's quantiser (q4_k_m: some of 5 and more); a
                     GGUF file of that type itself
    gguf-as-is       the GGUF file itself, whatever its types are
    genai-int8, -int4   onnxruntime-genai's model builder: blocks of 32, accuracy level 4, the head quantised too
    openvino-int8, openvino-int8-sym   openvino-genai's IR of gguf-f16, 8 bits with a scale a channel
    openvino-q8_0    openvino-genai's IR of gguf-q8_0, as it reads it
    optimum-int8     OpenVINO's documented way, optimum-intel with NNCF: a cross-check of openvino-int8

Each is a file or folder FOLDER/FORM…, made beside and renamed when it is whole, so that what is there is good.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from llmc.compiler.checkpoint.base import Checkpoint
from llmc.errors import CheckpointError, CompileError
from llmc.quiet import of_tools

SCRIPTS = Path(__file__).parent / "forms"
FILE_TYPES = {"Q8_0": 7, "Q4_1": 3, "Q4_0": 2, "Q4_K_M": 15}
"""general.file_type of a GGUF file that is of such blocks throughout (llama.cpp's llama_ftype)."""
LOG_TAIL = 400

Report = Callable[[str], None]
"""Called with the name of a form before it is made."""


class BaselineModels:
    """Forms of one checkpoint in `folder`; `python` is the baselines' Python, whose tools make most of them."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, python: str, report: Report) -> None:
        self.checkpoint, self.folder, self.python = checkpoint, folder, python
        self._report = report
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, form: str) -> Path:
        """The path of a form, made now if it is not there.

        Raises CheckpointError for a checkpoint that has no such form, CompileError where a tool fails, with the end of
        what it said.
        """
        kind, _, precision = form.partition("-")
        if kind == "huggingface":
            return self._hugging_face()
        if kind == "gguf":
            return self._gguf(precision.upper())
        if kind == "genai":
            return self._genai(form, precision)
        if kind == "optimum":
            return self._optimum(form, precision)
        if kind == "openvino":
            return self._openvino(form, precision)
        raise CompileError(f"unknown form of a model {form!r}")

    def all(self, names: Iterable[str]) -> dict[str, Path]:
        """Several forms."""
        return {name: self.get(name) for name in dict.fromkeys(names)}

    def _hugging_face(self) -> Path:
        from llmc.compiler.checkpoint.folder_writer import is_plain_folder, write_folder

        if is_plain_folder(self.checkpoint):
            return self.checkpoint.path
        return self._built("huggingface", lambda out: write_folder(self.checkpoint, out))

    def _gguf(self, kind: str) -> Path:
        source = self.checkpoint.path
        if kind == "AS-IS":
            if self.checkpoint.format != "gguf":
                raise CheckpointError(
                    f"{source}: no GGUF file; compare with llama-cpp:q8_0 or q4_1, which are made of any checkpoint"
                )
            return source
        if self.checkpoint.format == "gguf" and self._file_type() == FILE_TYPES.get(kind):
            return source
        if kind == "F16":
            from benchmarks.baselines.gguf_file import write_gguf

            return self._built("gguf-f16.gguf", lambda out: write_gguf(self.checkpoint, out))
        if self.checkpoint.format != "gguf":
            source = self._gguf("F16")
        script = str(SCRIPTS / "quantise_gguf.py")
        return self._built(
            f"gguf-{kind.lower()}.gguf", lambda out: self._tool([script, str(source), str(out), kind], out.name)
        )

    def _file_type(self) -> int | None:
        from llmc.compiler.checkpoint.gguf_file import read_header

        found = read_header(self.checkpoint.path).metadata.get("general.file_type")
        return int(found) if isinstance(found, int) else None

    def _genai(self, form: str, precision: str) -> Path:
        source = self._hugging_face()

        def build(out: Path) -> None:
            cache = out.with_name("builder-cache")
            command = [
                "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out), "-p", precision, "-e",
                "cpu", "-c", str(cache), "--extra_options", "accuracy_level=4", "block_size=32",
            ]  # fmt: skip
            try:
                self._tool(command, form)
            finally:
                shutil.rmtree(cache, ignore_errors=True)

        return self._built(form, build)

    def _openvino(self, form: str, precision: str) -> Path:
        source = self._gguf("F16" if precision.startswith("int8") else precision.upper())
        weights = precision if precision.startswith("int8") else "as-is"
        script = str(SCRIPTS / "openvino_ir.py")
        return self._built(form, lambda out: self._tool([script, str(source), str(out), weights], form))

    def _optimum(self, form: str, precision: str) -> Path:
        source = self._hugging_face()
        command = [
            str(Path(self.python).with_name("optimum-cli")), "export", "openvino", "--model", str(source), "--task",
            "text-generation-with-past", "--weight-format", precision,
        ]  # fmt: skip
        return self._built(form, lambda out: self._tool([*command, str(out)], form))

    def _built(self, name: str, make: Callable[[Path], None]) -> Path:
        target = self.folder / name
        if target.exists():
            return target
        self._report(name)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".making-") as beside:
            built = Path(beside) / name
            make(built)
            built.rename(target)
        return target

    def _tool(self, arguments: list[str], what: str) -> None:
        done = subprocess.run(
            [self.python, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env=of_tools(),
        )  # fmt: skip
        if done.returncode != 0:
            said = " ".join(done.stdout[-LOG_TAIL:].split())
            name = self.checkpoint.name or self.checkpoint.path
            raise CompileError(f"{what} of {name} could not be made (exit code {done.returncode}): …{said}")


def weights_read(checkpoint: Checkpoint) -> int:
    """Values of the matrices that a decode step reads: all but an embedding that is not the head as well."""
    names = checkpoint.tensor_names()
    untied = "lm_head.weight" in names and not checkpoint.config.get("tie_word_embeddings")
    total = 0
    for name in names:
        shape = checkpoint.shape(name)
        skipped = name.endswith("embed_tokens.weight") if untied else name == "lm_head.weight"
        if len(shape) == 2 and not skipped:
            total += shape[0] * shape[1]
    return total
