"""The environment: which variables are read, which spelling wins, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.errors import InputError
from llmc.settings import BucketNumber, Settings


def read(**environ: str) -> Settings:
    return Settings.from_environment(environ)


def test_an_empty_environment_asks_for_nothing():
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


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_none_is_named(value):
    with pytest.raises(InputError, match=r"LLMC_THREADS='?" + value):
        read(LLMC_THREADS=value)


@pytest.mark.parametrize(("spelling", "name"), [("lin", "linear"), ("exp", "exponential"), ("pad", "padding-aware")])
def test_strategy_spellings(spelling, name):
    assert read(VLLM_BUCKETING_STRATEGY=spelling).strategy == name


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
    assert warning.startswith("VLLM_PROMPT_SEQ_BUCKET_MAX is ignored: VLLM_PROMPT_QUERY_BUCKET_MAX is set")


def test_both_spellings_are_checked_even_if_one_loses():
    with pytest.raises(InputError, match="VLLM_PROMPT_SEQ_BUCKET_MAX='many' is not an integer"):
        read(VLLM_PROMPT_SEQ_BUCKET_MAX="many", VLLM_PROMPT_QUERY_BUCKET_MAX="2048")


def test_a_bucket_variable_that_means_nothing_here_is_reported():
    (warning,) = read(VLLM_DECODE_QUERY_BUCKET_MAX="4").warnings
    assert "VLLM_DECODE_QUERY_BUCKET_MAX is ignored" in warning


def test_the_bucket_file_is_kept_as_given():
    assert read(VLLM_BUCKETING_FROM_FILE="buckets.txt").bucket_file == "buckets.txt"


def test_importing_settings_imports_nothing_heavy():
    code = "import sys; before = {*sys.modules}; import llmc.settings; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "llmc.settings" in imported
    assert not imported & {"numpy", "platformdirs", "pathlib", "typer", "rich", "json", "logging", "asyncio"}
