"""No combination of valid flags ends in an unexpected exception: each device, quantisation and dtype, and others."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.cli.main import main
from llmc.compiler.options import DTYPES, QUANTISATIONS, Option
from llmc.compiler.targets import declared, devices
from llmc.testing.toy import write_toy
from tests.cli.helpers import Ran
from tests.compiler.checkpoint.writers import write_gguf
from tests.tiers import default_cases, examples, full

DEVICES = sorted({*devices(), "openvino:GPU", "openvino:NPU", "tpu:v5e-2x2"} - {"tpu", "fake"})
LIMITS = ("--max-model-len", 64, "--max-num-seqs", 2)
SOME = examples(60, database=None, derandomize=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A llama with blocks of 4 and 8 bits, a toy and a bundle of it; also the folder that commands run in."""
    built = tmp_path_factory.mktemp("flags")
    write_gguf(built / "model.gguf", types={"embed_tokens": "Q8_0", "_proj": "Q4_1"})
    write_toy(built / "toy")
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (built / "config.json").write_text(json.dumps(config))
    (built / "requests.csv").write_text("time,prompt_tokens,output_tokens\n0,20,10\n1,8,20\n")
    (built / "prompts.jsonl").write_text('{"prompt": "a b"}\n')
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith(("VLLM_", "LLMC_"))]:
            patch.delenv(variable)
        patch.setenv("LLMC_CACHE_DIR", str(built / "cache"))
        patch.chdir(built)
        ran = llmc("compile", "toy", "--device", "fake", "--max-model-len", 32, "--max-num-seqs", 2, "-o", "bundle")
        assert ran.code == 0, ran
        yield built


def llmc(*arguments: object) -> Ran:
    """What a command line does, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(a) for a in arguments])
    return Ran(code, out.getvalue(), err.getvalue())


def require_expected(ran: Ran, arguments: object) -> None:
    """Done, or one of llmc's own refusals."""
    assert "unexpected" not in ran.err, (arguments, ran)
    assert ran.code in (0, 1, 2, 3), (arguments, ran)
    assert ran.code == 0 or ran.err.strip(), (arguments, ran)


@default_cases(6)
@pytest.mark.parametrize(("device", "quantize"), list(product(DEVICES, (None, *QUANTISATIONS))))
def test_a_dry_run_of_every_device_quantisation_and_dtype(folder: Path, device: str, quantize: str | None) -> None:
    """And a plan's estimate of the same: both answer alike, or both refuse in the same words."""
    for dtype in DTYPES:
        flags = ("--device", device, "--dtype", dtype, *(() if quantize is None else ("--quantize", quantize)), *LIMITS)
        ran, planned = llmc("compile", "model.gguf", "--dry-run", "--json", *flags), llmc("plan", "model.gguf", *flags)
        require_expected(ran, flags)
        require_expected(planned, flags)
        assert planned.code == ran.code, (flags, ran, planned)
        if ran.code:
            assert planned.err == ran.err
            continue
        found = ran.json
        assert found["estimated_bytes"] > 0 and found["estimated_seconds"] > 0
        for estimate in found["estimates"]:
            assert f"  {estimate['source']}\n" in planned.out, (flags, estimate, planned.out)


def _flags(*options: tuple[object, ...], most: int = 5) -> st.SearchStrategy[list[object]]:
    """Any of the options, `most` at most, each with any of its values; None is a switch without one."""
    each = [
        st.just(name) if not values else st.tuples(st.just(name), st.sampled_from(values)) for name, *values in options
    ]  # type: ignore[arg-type]
    chosen = st.lists(st.one_of(each), max_size=most, unique_by=lambda one: one if isinstance(one, str) else one[0])
    return chosen.map(lambda some: [word for one in some for word in ([one] if isinstance(one, str) else one)])


PLANNING = (
    ("--strategy", "linear", "exponential", "padding-aware", "powers-of-two", "powers-of-two-tpu", "traffic", "file"),
    ("--max-model-len", 2, 32, 128, 129), ("--max-prompt-len", 1, 16, 64), ("--max-num-seqs", 1, 3, 600),
    ("--max-num-batched-tokens", 1, 64, 100000), ("--block-size", 1, 16, 128), ("--max-seq-len-to-capture", 1, 32),
    ("--prompt-batch", "1,1,2", "0,0,0", "1,0,1", "2,1,1"), ("--prompt-seq", "16,16,32", "1,1,64,4", "8,8,32,4,25"),
    ("--prompt-context", "0,16,32", "0,1,2"), ("--decode-batch", "1,2,2", "9,9,9"), ("--decode-seq", "16,16,64"),
    ("--context-unit", "tokens", "blocks", "pages"), ("--traffic", "requests.csv"), ("--arrival-rate", 4, "inf", 0),
    ("--clip",), ("--max-graphs", 1, 4), ("--max-padding", "10%", 0), ("--max-compile-time", "1m", "1h", 0),
    ("--max-graph-memory", "1MiB", "8GiB"),
)  # fmt: skip


def _own(option: Option[Any]) -> tuple[tuple[object, ...], ...]:
    """What a target's own option may be given: all its choices, or some numbers."""
    if option.kind is bool:
        return (option.flag,), (f"--no-{option.flag[2:]}",)
    numbers = ("1G", 0, 1) if option.is_size else (0.1, 9) if option.kind is float else (0, 1, 2, 7, 32, 64, 128)
    return ((option.flag, *(option.choices or numbers)),)


OWN = tuple(flag for one in declared().values() for flag in _own(one.option))
DTYPE_FLAGS = (("--dtype", *DTYPES), ("--quantize", *QUANTISATIONS), *OWN)
COMPILING = (
    *DTYPE_FLAGS, ("--specialise",), ("--no-specialise",), ("--sample-top-k", 0, 1, 12, 256), ("--jobs", 1, 4),
    ("--verify", "sample", "all", "none"), ("--require-native",), ("--json",),
)  # fmt: skip
SAMPLING = (
    ("--max-tokens", 1, 3), ("--temperature", 0, 0.7), ("--top-p", 0.5), ("--top-k", 1, 3), ("--seed", 1),
    ("--stop", "a"), ("--stream",), ("--show-buckets",), ("--json",), ("--chat",), ("--speculate", 2),
    ("--prompts", "prompts.jsonl", "absent"), ("--prompt", "a", "", "a b c d" * 90), ("--threads", 1),
    ("--repetition-penalty", 1.5), ("--nonsense",),
)  # fmt: skip
BENCHING = (
    ("--seconds", 0), ("--threads", 1), ("--texts", "nowhere"), ("--query", "a"), ("--truncate",), ("--rounds", 1),
    ("--json",),
)  # fmt: skip
MODELS = st.sampled_from(["model.gguf", "toy", "config.json", "absent", "cache"])


@full
@SOME
@given(MODELS, st.sampled_from([*DEVICES, "fake", "tpu", "gpu"]), _flags(*PLANNING, *DTYPE_FLAGS))
def test_plan_takes_or_refuses_any_flags(folder: Path, model: str, device: str, flags: list[object]) -> None:
    require_expected(llmc("plan", model, "--device", device, *flags), (model, device, flags))


@full
@SOME
@given(MODELS, st.sampled_from([*DEVICES, "fake", "tpu", "gpu"]), _flags(*COMPILING), _flags(*PLANNING, most=2))
def test_a_dry_run_takes_or_refuses_any_flags(
    folder: Path, model: str, device: str, flags: list[object], planning: list[object]
) -> None:
    limits = LIMITS if "--max-model-len" not in planning and "--max-num-seqs" not in planning else ()
    requested = (model, "--device", device, *flags, *planning, *limits)
    require_expected(llmc("compile", *requested, "--dry-run"), requested)


@SOME
@given(st.sampled_from(["bundle", "toy", "absent"]), _flags(*SAMPLING))
def test_generate_takes_or_refuses_any_flags(folder: Path, bundle: str, flags: list[object]) -> None:
    ran = llmc("generate", bundle, *(flags if "--prompts" in flags else ["--prompt", "a b", *flags]))
    assert "unexpected" not in ran.err, (bundle, flags, ran)


@SOME
@given(st.sampled_from(["bundle", "toy", "absent"]), _flags(*BENCHING))
def test_bench_takes_or_refuses_any_flags(folder: Path, bundle: str, flags: list[object]) -> None:
    ran = llmc("bench", bundle, "--seconds", 0, *flags)
    assert "unexpected" not in ran.err, (bundle, flags, ran)
