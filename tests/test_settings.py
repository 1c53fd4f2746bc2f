"""The environment: which variables are read, which spelling wins, and what is refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.errors import InputError
from llmc.settings import PARAMETERS, BucketNumber, Settings


def read(**environ: str) -> Settings:
    return Settings.from_environment(environ)


def test_an_empty_environment_requests_nothing():
    assert read() == Settings()


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("LLMC_THREADS", "3")
    assert Settings.from_environment().threads == 3


def test_cache_dir_follows_the_variable_and_expands_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert read(LLMC_CACHE_DIR="~/store").cache_dir == Path("/home/someone/store")
    assert read(LLMC_CACHE_DIR="").cache_dir == read().cache_dir
    assert read().cache_dir.name == "llmc"


def test_threads_default_to_the_usable_cpus():
    assert read().threads == len(os.sched_getaffinity(0))


def test_the_key_of_the_server_has_two_spellings_and_no_blanks_around_it():
    assert read(LLMC_API_KEY="ours", VLLM_API_KEY="theirs").api_key == "ours"
    assert read(VLLM_API_KEY="theirs\n").api_key == "theirs"
    assert read(LLMC_API_KEY=" ", VLLM_API_KEY="").api_key is None
    assert "ours" not in repr(read(LLMC_API_KEY="ours"))


def test_the_servers_warm_up_is_skipped_where_it_is_requested():
    assert [read(VLLM_SKIP_WARMUP=v).skip_warmup for v in ("true", "1", "false", "")] == [True, True, False, False]


def test_what_gaudi_users_set():
    assert [read(PT_HPU_LAZY_MODE=v).hpu_lazy_mode for v in ("1", "0", "")] == [True, False, False]
    assert read(LLMC_ENFORCE_EAGER="true").enforce_eager and not read().enforce_eager
    log = "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION"
    assert [read(**{name: "1"}).log_step_compilations for name in (log, f"{log}_ALL", "X")] == ["some", "all", "none"]
    assert read(VLLM_HPU_LOG_STEP_CPU_FALLBACKS="1").log_step_fallbacks == "some"
    with pytest.raises(InputError, match="PT_HPU_LAZY_MODE='2' is not true or false"):
        read(PT_HPU_LAZY_MODE="2")


def test_what_chooses_other_kernels_is_kept_by_its_name():
    requested = {"LLMC_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert read(**requested, ONEDNN_MAX_CPU_ISA="").kernel_limits == requested


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_none_is_named(value):
    with pytest.raises(InputError, match=r"LLMC_THREADS='?" + value):
        read(LLMC_THREADS=value)


@pytest.mark.parametrize(("spelling", "name"), [("lin", "linear"), ("exp", "exponential"), ("pad", "padding-aware")])
def test_strategy_spellings(spelling, name):
    assert read(VLLM_BUCKETING_STRATEGY=spelling).strategy == name


def test_the_strategys_variable_is_kept():
    assert read().strategy_variable is None
    assert read(VLLM_BUCKETING_STRATEGY="pad").strategy_variable == "VLLM_BUCKETING_STRATEGY"
    assert read(VLLM_EXPONENTIAL_BUCKETING="1").strategy_variable == "VLLM_EXPONENTIAL_BUCKETING"


def test_a_phase_has_a_strategy_of_its_own():
    settings = read(VLLM_PROMPT_BUCKETING_STRATEGY="pad", VLLM_BUCKETING_STRATEGY="lin")
    assert settings.phase_strategies == {"prompt": "padding-aware"}
    assert settings.strategy == "linear"
    assert settings.warnings == ()
    assert read(VLLM_DECODE_BUCKETING_STRATEGY=" exp ").phase_strategies == {"decode": "exponential"}
    assert read(VLLM_DECODE_BUCKETING_STRATEGY="").phase_strategies == {}


@pytest.mark.parametrize(
    ("value", "name"),
    [("true", "exponential"), ("True", "exponential"), ("1", "exponential"), ("false", "linear"), ("0", "linear")],
)
def test_the_older_spelling_of_the_strategy(value, name):
    settings = read(VLLM_EXPONENTIAL_BUCKETING=value)
    assert settings.strategy == name
    assert settings.warnings == ()


@pytest.mark.parametrize("older", ["true", "false"])
def test_the_newer_spelling_of_the_strategy_wins_and_a_warning_says_so(older):
    settings = read(VLLM_EXPONENTIAL_BUCKETING=older, VLLM_BUCKETING_STRATEGY="pad")
    assert (settings.strategy, settings.strategy_variable) == ("padding-aware", "VLLM_BUCKETING_STRATEGY")
    (warning,) = settings.warnings
    assert warning.startswith("VLLM_EXPONENTIAL_BUCKETING is ignored: its newer name VLLM_BUCKETING_STRATEGY is set")


@pytest.mark.parametrize("newer", ["", "lin"])
def test_the_older_spelling_of_the_strategy_is_true_or_false_even_if_it_loses(newer):
    with pytest.raises(InputError, match="VLLM_EXPONENTIAL_BUCKETING='yes' is not true or false; set VLLM_BUCKETING"):
        read(VLLM_EXPONENTIAL_BUCKETING="yes", VLLM_BUCKETING_STRATEGY=newer)


@pytest.mark.parametrize("phase", ["PROMPT", "DECODE"])
@pytest.mark.parametrize("value", ["linear", "LIN", "traffic", "file"])
def test_an_unknown_strategy_of_a_phase_lists_the_known(phase, value):
    variable = f"VLLM_{phase}_BUCKETING_STRATEGY"
    with pytest.raises(InputError, match=f"{variable}='{value}' is not one of lin, exp, pad"):
        read(**{variable: value})


def test_an_unknown_strategy_spelling_lists_the_known():
    with pytest.raises(InputError, match="VLLM_BUCKETING_STRATEGY='cubic' is not one of lin, exp, pad"):
        read(VLLM_BUCKETING_STRATEGY="cubic")


@pytest.mark.parametrize(
    ("variable", "key", "blocks"),
    [
        ("VLLM_PROMPT_BS_BUCKET_MIN", ("prompt_batch", "min"), False),
        ("VLLM_PROMPT_QUERY_BUCKET_STEP", ("prompt_query", "step"), False),
        ("VLLM_PROMPT_SEQ_BUCKET_MAX", ("prompt_query", "max"), False),
        ("VLLM_PROMPT_CTX_BUCKET_MAX", ("prompt_context", "max"), True),
        ("VLLM_DECODE_BS_BUCKET_MAX", ("decode_batch", "max"), False),
        ("VLLM_DECODE_BLOCK_BUCKET_STEP", ("decode_context", "step"), True),
        ("VLLM_DECODE_CTX_BUCKET_STEP", ("decode_context", "step"), True),
        ("VLLM_DECODE_SEQ_BUCKET_MIN", ("decode_context", "min"), False),
        ("VLLM_PROMPT_BS_BUCKET_LIMIT", ("prompt_batch", "limit"), False),
        ("VLLM_PROMPT_SEQ_BUCKET_PAD_MAX", ("prompt_query", "pad_max"), False),
        ("VLLM_PROMPT_CTX_BUCKET_LIMIT", ("prompt_context", "limit"), False),
        ("VLLM_PROMPT_CTX_BUCKET_PAD_MAX", ("prompt_context", "pad_max"), True),
        ("VLLM_DECODE_BLOCK_BUCKET_PAD_MAX", ("decode_context", "pad_max"), True),
        ("VLLM_DECODE_BLOCK_BUCKET_PAD_PERCENT", ("decode_context", "pad_percent"), False),
        ("VLLM_DECODE_SEQ_BUCKET_PAD_MAX", ("decode_context", "pad_max"), False),
    ],
)
def test_bucket_variables(variable, key, blocks):
    settings = read(**{variable: " 7 "})
    assert settings.bucket_numbers == {key: BucketNumber(7, variable, blocks)}
    assert settings.warnings == ()


def test_numbers_in_blocks_become_tokens_and_others_stay():
    assert BucketNumber(3, "V", blocks=True).in_tokens(128) == 384
    assert BucketNumber(3, "V").in_tokens(128) == 3


def test_the_newer_spelling_wins_and_a_warning_says_so():
    settings = read(VLLM_PROMPT_SEQ_BUCKET_MAX="1024", VLLM_PROMPT_QUERY_BUCKET_MAX="2048")
    assert settings.bucket_numbers[("prompt_query", "max")].value == 2048
    (warning,) = settings.warnings
    assert warning.startswith(
        "VLLM_PROMPT_SEQ_BUCKET_MAX is ignored: its newer name VLLM_PROMPT_QUERY_BUCKET_MAX is set"
    )


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_parameter_has_a_variable_in_every_dimension(parameter):
    names = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_CTX", "DECODE_BS", "DECODE_CTX")
    settings = read(**{f"VLLM_{name}_BUCKET_{parameter.upper()}": "3" for name in names})
    assert {key for key, number in settings.bucket_numbers.items() if number.value == 3} == {
        (dimension, parameter)
        for dimension in ("prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_context")
    }
    assert settings.warnings == ()


def test_both_spellings_are_checked_even_if_one_loses():
    with pytest.raises(InputError, match="VLLM_PROMPT_SEQ_BUCKET_MAX='many' is not an integer"):
        read(VLLM_PROMPT_SEQ_BUCKET_MAX="many", VLLM_PROMPT_QUERY_BUCKET_MAX="2048")


def test_a_bucket_variable_that_means_nothing_here_is_reported():
    (warning,) = read(VLLM_DECODE_QUERY_BUCKET_MAX="4").warnings
    assert "VLLM_DECODE_QUERY_BUCKET_MAX is ignored" in warning


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("VLLM_PROMPT_BS_BUCKET_MAXX", "VLLM_PROMPT_BS_BUCKET_MAX"),
        ("VLLM_PROMPT_QUERRY_BUCKET_MIN", "VLLM_PROMPT_QUERY_BUCKET_MIN"),
        ("VLLM_DECODE_BLOCK_BUCKET_PAD_PERCENTAGE", "VLLM_DECODE_BLOCK_BUCKET_PAD_PERCENT"),
    ],
)
def test_a_misspelt_bucket_variable_is_reported_with_the_nearest_known(variable, nearest):
    settings = read(**{variable: "4"})
    assert settings.bucket_numbers == {}
    assert settings.warnings == (
        f"{variable} is ignored: llmc does not know it; the nearest known variable is {nearest}",
    )


def test_how_graphs_are_captured():
    shares = read(VLLM_GRAPH_RESERVED_MEM="0.4", VLLM_GRAPH_PROMPT_RATIO="0")
    assert (shares.graph_reserved_mem, shares.graph_prompt_ratio) == (0.4, 0.0)
    orders = read(VLLM_GRAPH_PROMPT_STRATEGY="max_bs", VLLM_GRAPH_DECODE_STRATEGY="min_tokens")
    assert (orders.graph_prompt_strategy, orders.graph_decode_strategy) == ("max_bs", "min_tokens")


@pytest.mark.parametrize("value", ["1.1", "-0.1", "nan", "much", "40%"])
@pytest.mark.parametrize("variable", ["VLLM_GRAPH_RESERVED_MEM", "VLLM_GRAPH_PROMPT_RATIO"])
def test_a_share_of_memory_out_of_range_is_refused_by_its_variable(variable, value):
    with pytest.raises(InputError, match=f"{variable}='{value}' is not a share within 0 … 1"):
        read(**{variable: value})


def test_settings_of_attention_are_left_to_others():
    assert read(VLLM_CONTIGUOUS_PA="true") == Settings()


@pytest.mark.parametrize(
    ("variable", "without_effect", "silent"),
    [
        ("VLLM_SKIP_WARMUP", ["true", "True", "1"], ["false", "0", ""]),
        ("VLLM_ENABLE_BUCKETING", ["false", "False", "0"], ["true", "1", ""]),
    ],
)
def test_what_changes_no_plan_leaves_a_warning_only_where_it_requests_a_change(variable, without_effect, silent):
    for value in without_effect:
        (warning,) = read(**{variable: value}).warnings
        assert warning.startswith(f"{variable} has no effect")
    for value in silent:
        assert read(**{variable: value}) == Settings()


def test_the_padding_gap_of_tpus():
    assert read(VLLM_TPU_BUCKET_PADDING_GAP="64").tpu_padding_gap == BucketNumber(64, "VLLM_TPU_BUCKET_PADDING_GAP")
    assert read(VLLM_TPU_BUCKET_PADDING_GAP="0").tpu_padding_gap is None
    with pytest.raises(InputError, match="VLLM_TPU_BUCKET_PADDING_GAP=-1 must not be negative"):
        read(VLLM_TPU_BUCKET_PADDING_GAP="-1")
    with pytest.raises(InputError, match="VLLM_TPU_BUCKET_PADDING_GAP='wide' is not an integer"):
        read(VLLM_TPU_BUCKET_PADDING_GAP="wide")


def test_the_bucket_file_is_kept_as_given():
    assert read(VLLM_BUCKETING_FROM_FILE="buckets.txt").bucket_file == "buckets.txt"


def test_importing_settings_imports_nothing_heavy():
    code = "import sys; before = {*sys.modules}; import llmc.settings; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "llmc.settings" in imported
    assert not imported & {"numpy", "platformdirs", "pathlib", "typer", "rich", "json", "logging", "asyncio", "difflib"}


def test_what_xla_and_libtpu_read_is_known():
    found = read(XLA_FLAGS="--a", LIBTPU_INIT_ARGS="--b", VLLM_XLA_CHECK_RECOMPILATION="1", LLMC_TORCH_XLA_PYTHON="p")
    assert (found.xla_flags, found.libtpu_arguments, found.torch_xla_python) == ("--a", "--b", "p")
    assert found.check_recompilation


def test_the_xla_cache_is_the_store_of_a_tpu_with_a_topology_too():
    found = read(VLLM_XLA_CACHE_PATH="/xla")
    assert found.cache_dir_for("tpu:v5e-2x2") == found.cache_dir_for("xla") == Path("/xla")
    assert found.cache_dir_for("cpu") != Path("/xla")


def test_artifacts_are_handed_the_settings() -> None:
    """But for where records lie that this user alone may write: of verified files, and of parsed sources."""
    folder = Path(__file__).parents[1] / "llmc" / "artifacts"
    readers = {file.name for file in folder.rglob("*.py") if "from_environment" in file.read_text(encoding="utf-8")}
    assert readers == {"ownership.py"}


def test_lpus_and_the_device_that_they_stand_for():
    requested = read(
        NUM_LPU_DEVICES="2", NUM_GPU_DEVICES="1", LLMC_HYPERDEX_PYTHON="hdex/python", LLMC_HYPERDEX_SECONDS="9"
    )
    assert (requested.num_lpu_devices, requested.num_gpu_devices) == (2, 1)
    assert (requested.hyperdex_python, requested.hyperdex_seconds) == ("hdex/python", 9.0)
    assert (requested.device, read().device, read(NUM_GPU_DEVICES="2").device) == ("lpu", "cpu", "cpu")
    for environ in ({"NUM_LPU_DEVICES": "0"}, {"NUM_GPU_DEVICES": "-1"}, {"LLMC_HYPERDEX_SECONDS": "0"}):
        (name,) = environ
        with pytest.raises(InputError, match=name):
            read(**environ)


def _reads(tree: ast.AST) -> list[int]:
    """Lines that take a variable's value from os.environ, where they neither set it nor hand all of it on."""
    handed_on = {
        id(found)
        for node in ast.walk(tree)
        for found in (
            [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
            if isinstance(node, ast.Dict)
            else [node.func.value]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"setdefault", "items", "update"}
            else [node.value]
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            else []
        )
    }  # fmt: skip
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"} and id(node) not in handed_on)
    ]


def test_no_other_module_reads_the_environment() -> None:
    folder = Path(__file__).parents[1] / "llmc"
    readers = {
        file.relative_to(folder).as_posix(): lines
        for file in folder.rglob("*.py")
        if "environ" in (text := file.read_text(encoding="utf-8")) or "getenv" in text
        if (lines := _reads(ast.parse(text)))
    }
    assert set(readers) == {"settings.py"}, readers


@pytest.mark.parametrize("line", ["os.environ.get('A')", "os.environ['A']", "'A' in os.environ", "os.getenv('A')"])
def test_what_reads_it_is_seen(line: str) -> None:
    assert _reads(ast.parse(line)) == [1]
    assert not _reads(ast.parse("os.environ['A'] = '1'; os.environ.setdefault('A', '1'); run(env={**os.environ})"))
