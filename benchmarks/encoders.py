"""Sentences a second of an embedding model: llmc, sentence-transformers and OpenVINO's text embedding pipeline.

All have the same random weights in the shape of bge-small (12 layers, 384 wide, 33 million parameters), the same
tokenizer, and the sentences of this repository's own documents (Apache-2.0), in the order in which they stand. Engines
are processes that stay open, and take turns, one pass over all sentences each, for some rounds; the median counts. The
cosine is to sentence-transformers' vectors, in f32 where that runs.

  python benchmarks/encoders.py [--rounds N] [--sentences N] [--only bf16|f32] [--json]

The baselines' environment is .venv-baselines (`make baselines-env`). "sorted": the caller sorted the sentences by
length before. An interrupt (Ctrl-C) ends the rounds, and shows those that every engine has finished.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / ".venv-baselines" / "bin" / "python"
ENGINES = {
    "llmc bf16": ("llmc", "bf16"),
    "llmc f32": ("llmc", "f32"),
    "llmc int8": ("llmc", "int8"),
    "sentence-transformers f32": ("sentence-transformers", "float32-32"),
    "sentence-transformers bf16": ("sentence-transformers", "bfloat16-32"),
    "sentence-transformers bf16, 64": ("sentence-transformers", "bfloat16-64"),
    "openvino-genai bf16": ("openvino-genai", "bf16-32"),
    "openvino-genai bf16 sorted": ("openvino-genai", "bf16-32-sorted"),
    "openvino-genai bf16 sorted, 64": ("openvino-genai", "bf16-64-sorted"),
    "openvino-genai f32": ("openvino-genai", "f32-32"),
    "openvino-genai f32 sorted": ("openvino-genai", "f32-32-sorted"),
}
"""Precision, texts of a batch (32 unless the name says another number), and whether the caller sorted them."""
BATCH = 32
VOCABULARY = 30522


def sentences(most: int) -> list[str]:
    """Of the documents, without tables and code."""
    found: list[str] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "    "))]
        found += [s.strip() for s in re.split(r"(?<=[.!?:;])\s+|\n\n", "\n".join(lines)) if len(s.strip()) > 1]
    return [" ".join(s.split()) for s in found[:most]]


def write_model(folder: Path, texts: list[str]) -> None:
    """The checkpoint: random weights, WordPiece tokens of these texts, mean pooling and normalisation."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    BertTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=512).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": index, "type": f"sentence_transformers.models.{kind}"}
        for i, (index, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for index in ("1_Pooling", "2_Normalize"):
        (folder / index).mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize" / "config.json").write_text("{}")


class Engine:
    """A process that embeds all texts once a line that it is sent, and answers with its seconds."""

    def __init__(self, name: str, folder: Path, texts: Path, threads: int) -> None:
        kind, how = ENGINES[name]
        python = sys.executable if kind == "llmc" else str(BASELINES)
        where = folder / f"llmc-{how}" if kind == "llmc" else folder / "model"
        command = [python, str(Path(__file__).with_name("encoders_child.py")), kind, how, str(where), str(texts)]
        self.vectors = folder / f"{name}.npy"
        self._process = subprocess.Popen(
            [*command, str(threads), str(self.vectors)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"), text=True, cwd=ROOT,
            start_new_session=True,  # an interrupt ends the rounds, and the engines then
        )  # fmt: skip
        self._answer()

    def run(self) -> dict[str, Any]:
        """One pass: {"seconds", and of llmc "tokens" and "padded_tokens"}."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended; its log lies beside {self.vectors}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


Rounds = dict[str, list[dict[str, Any]]]
"""What each pass of an engine said, by the engine's name."""


def in_turns(engines: Mapping[str, Engine], rounds: int) -> tuple[Rounds, bool]:
    """So many passes of each engine, in turns, and whether all were run: after an interrupt, the rounds that every
    engine has finished. Raises KeyboardInterrupt where there is none."""
    found: Rounds = {name: [] for name in engines}
    try:
        for at in range(rounds):
            print(f"round {at + 1} of {rounds}", file=sys.stderr)
            for name, engine in engines.items():
                found[name].append(engine.run())
    except KeyboardInterrupt:
        whole = min(map(len, found.values()))
        if not whole:
            raise
        print(f"interrupted: {whole} of {rounds} rounds", file=sys.stderr)
        return {name: passes[:whole] for name, passes in found.items()}, False
    return found, True


def summary(rounds: Rounds, sentences: int, cosines: Mapping[str, float], forms: Sequence[str]) -> dict[str, Any]:
    """Rates, padding and ratios of the rounds that were run."""
    rates = {n: sentences / statistics.median(r["seconds"] for r in found) for n, found in rounds.items()}
    best = {n: sentences / min(r["seconds"] for r in found) for n, found in rounds.items()}
    counted = next(iter(rounds.values()))[0]
    lengths = counted["lengths"]
    in_order = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    result: dict[str, Any] = {
        "sentences": sentences, "tokens": sum(lengths), "longest": max(lengths),
        "rounds": min(map(len, rounds.values())), "sentences_per_s": rates, "best_round": best,
        "least_cosine": cosines, "llmc_padding": 1 - sum(lengths) / counted["padded_tokens"],
        "padding_to_the_longest_of_32": 1 - sum(lengths) / sum(max(b) * len(b) for b in in_order),
        "padding_to_the_longest": 1 - sum(lengths) / (max(lengths) * len(lengths)),
    }  # fmt: skip
    for form in forms:
        baselines = [name for name in rates if form in name and not name.startswith("llmc")]
        baseline = max(baselines, key=lambda name: rates[name])
        pairs = zip(rounds[f"llmc {form}"], rounds[baseline], strict=True)
        result[f"ratio_{form}"] = statistics.median(theirs["seconds"] / mine["seconds"] for mine, theirs in pairs)
        result[f"ratio_{form}_of_best_rounds"] = best[f"llmc {form}"] / max(best[name] for name in baselines)
    return result


def main() -> None:
    """Measure, and print a table or JSON."""
    import numpy as np

    import llmc
    from llmc.settings import Settings

    given = argparse.ArgumentParser()
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--sentences", type=int, default=1500)
    given.add_argument("--only", choices=("bf16", "f32"))
    given.add_argument("--json", action="store_true")
    requested = given.parse_args()
    threads = Settings.from_environment().threads
    with tempfile.TemporaryDirectory() as index:
        folder = Path(index)
        texts = sentences(requested.sentences)
        (folder / "texts.json").write_text(json.dumps(texts))
        (folder / "model").mkdir()
        write_model(folder / "model", texts)
        asks = {"f32": {"dtype": "f32"}, "bf16": {"dtype": "bf16"}, "int8": {"quantize": "int8"}}
        for how, options in asks.items() if requested.only is None else [(requested.only, asks[requested.only])]:
            llmc.compile(folder / "model", folder / f"llmc-{how}", device="cpu", cache_dir=folder / "store", **options)
        subprocess.run(
            [str(BASELINES), str(Path(__file__).with_name("encoders_child.py")), "prepare", "", index], check=True
        )
        names = [name for name in ENGINES if requested.only is None or requested.only in name]
        engines = {name: Engine(name, folder, folder / "texts.json", threads) for name in names}
        try:
            rounds, whole = in_turns(engines, requested.rounds)
        finally:
            for engine in engines.values():
                engine.close()
        exact = np.load(next(e for n, e in engines.items() if n.startswith("sentence-transformers")).vectors)
        cosines = {n: float((np.load(e.vectors) * exact).sum(-1).min()) for n, e in engines.items()}
    forms = ("bf16", "f32") if requested.only is None else (requested.only,)
    result = {"threads": threads, **summary(rounds, len(texts), cosines, forms)}
    show(result, forms, requested.json)
    if not whole:
        raise SystemExit(130)


def show(result: Mapping[str, Any], forms: Sequence[str], as_json: bool) -> None:
    """Print the outcome."""
    if as_json:
        print(json.dumps(result))
        return
    print(
        f"{result['sentences']} sentences, {result['tokens']} tokens (longest {result['longest']}), "
        f"{result['threads']} threads, {result['rounds']} rounds"
    )
    best, cosines = result["best_round"], result["least_cosine"]
    for name, rate in sorted(result["sentences_per_s"].items(), key=lambda item: -item[1]):
        print(f"{name:30} {rate:8.1f} sentences/s, best round {best[name]:8.1f}   least cosine {cosines[name]:.5f}")
    for what in ("llmc_padding", "padding_to_the_longest_of_32", "padding_to_the_longest"):
        print(f"{what.replace('_', ' '):28} {result[what]:8.1%}")
    for form in forms:
        ratio, of_best = (result[f"ratio_{form}{end}"] for end in ("", "_of_best_rounds"))
        print(f"{form}: {ratio:.2f} × the best baseline in the median of rounds, {of_best:.2f} × in best rounds")


if __name__ == "__main__":
    main()
