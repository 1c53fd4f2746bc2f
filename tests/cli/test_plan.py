"""`llmc plan` and `llmc plan show`, through the command line's own parser."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.planner.planner import make_plan
from llmc.cli.options import add_named
from llmc.cli.planning import PlanningFlags
from llmc.compiler.pipeline.planning import plan_for
from llmc.errors import CheckpointError, InputError, UnknownNameError
from llmc.settings import Settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith(("VLLM_", "LLMC_"))]:
        monkeypatch.delenv(variable)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
    return str(path)


@pytest.fixture
def llmc():
    app = typer.Typer(rich_markup_mode=None)
    add_named(app, "plan", "llmc.cli.plan:app")

    @app.callback()
    def main() -> None:
        pass

    def run(*arguments: str):
        return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=True)

    return run


def test_help_has_an_example_of_both_forms(llmc):
    result = llmc("--help")
    assert result.exit_code == 0
    assert "llmc plan ./SmolLM2-135M-Instruct" in result.stdout
    assert "llmc plan show plan.json" in result.stdout
    assert "--prompt-batch" in result.stdout


def test_a_plan_from_a_config_is_reported(llmc, config):
    result = llmc("--config", config)
    assert result.exit_code == 0
    assert "max_model_len 512 (model config)" in result.stdout
    assert "buckets: 16 prompt, 16 decode" in result.stdout


def test_a_plan_from_a_model_folder(llmc, config, tmp_path):
    assert llmc(str(tmp_path)).stdout == llmc("--config", config).stdout


def test_json_is_the_plan_and_nothing_else(llmc, config, monkeypatch):
    monkeypatch.setenv("VLLM_PROMPT_LOST_BUCKET_MAX", "1")
    result = llmc("--config", config, "--json")
    assert Plan.from_json(result.stdout).limits == Limits(512)
    assert "warning: VLLM_PROMPT_LOST_BUCKET_MAX is ignored" in result.stderr


def test_a_written_plan_can_be_shown(llmc, config, tmp_path):
    path = str(tmp_path / "plan.json")
    built = llmc("--config", config, "-o", path)
    assert f"wrote {path}" in built.stderr
    assert llmc("show", path).stdout == built.stdout
    assert llmc("show", path, "--json").stdout == Plan.load(path).to_json()


def test_the_guides_example_by_flags(llmc):
    result = llmc(
        "--max-model-len=2048", "--max-num-seqs=4", "--max-prompt-len=1024", "--prompt-batch=1,32,4",
        "--prompt-seq=128,128,1024", "--decode-batch=1,128,4", "--decode-seq=128,128,2048",
    )  # fmt: skip
    assert "buckets: 24 prompt, 48 decode" in result.stdout


def planned(source: str | None, **flags: Any) -> Plan:
    """The plan for a configuration by flags as typed."""
    return plan_for(source, **PlanningFlags(**flags).arguments())


def test_every_flag_reaches_the_plan():
    flags = PlanningFlags(
        strategy="linear",
        max_model_len=256,
        max_prompt_len=200,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        block_size=32,
        max_seq_len_to_capture=256,
        prompt_batch="1,2,4",
        prompt_seq="32,32,128",
        prompt_context="0,64,192",
        decode_batch="1,1,4",
        decode_seq="32,64,256",
    )
    plan = plan_for(None, **flags.arguments(), settings=Settings())
    assert plan.limits == Limits(256, 4, 512, 32, 200)
    assert {name: tuple(numbers.values()) for name, numbers in plan.provenance.parameters.items()} == {
        "prompt_batch": (1, 2, 4),
        "prompt_query": (32, 32, 128),
        "prompt_context": (0, 64, 192),
        "decode_batch": (1, 1, 4),
        "decode_context": (32, 64, 256),
    }
    assert set(plan.provenance.origins.values()) == {"flag"}
    assert len(flags.given()) == 12


def test_the_environment_is_read_when_no_settings_are_given(monkeypatch):
    monkeypatch.setenv("VLLM_DECODE_BS_BUCKET_STEP", "2")
    plan = planned(None, max_model_len=64)
    assert plan.provenance.parameters["decode_batch"]["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], InputError, "give MODEL, --config FILE or --max-model-len N"),
        (["a", "b"], InputError, "llmc plan takes one MODEL, not 2: a b"),
        (["a", "--config", "b"], InputError, "MODEL and --config were both given"),
        (["show"], InputError, "takes one PLAN file; for a model in a folder named show, write ./show"),
        (["show", "absent.json"], InputError, "cannot read the plan absent.json"),
        (["./absent"], CheckpointError, "absent"),
        (["--max-model-len", "64", "--strategy", "cubic"], UnknownNameError, "known: "),
        (
            ["--max-model-len", "64", "--prompt-batch", "1,2"],
            InputError,
            "--prompt-batch '1,2' is not MIN,STEP,MAX",
        ),
        (["--max-model-len", "64", "--prompt-seq", "a,1,2"], InputError, "--prompt-seq 'a,1,2' is not"),
        (
            ["--max-model-len", "64", "--decode-batch", "4,1,2"],
            InputError,
            "--decode-batch 4,1,2: min is above max",
        ),
        (["--max-model-len", "64", "--decode-seq", "4,0,8"], InputError, "--decode-seq 4,0,8: step"),
        (["--max-model-len", "1"], InputError, "max_model_len 1 must be at least 2"),
    ],
)
def test_what_cannot_be_used_is_named(llmc, arguments, error, message):
    result = llmc(*arguments)
    assert type(result.exception) is error
    assert message in str(result.exception)
    assert result.stdout == ""


def test_a_flag_that_is_no_number_is_a_usage_error(llmc):
    assert llmc("--max-model-len", "many").exit_code == 2


def test_a_planning_flag_is_none_of_show(llmc):
    result = llmc("show", "p", "--block-size", "8")
    assert result.exit_code == 2 and "--block-size" in result.output


def test_a_length_above_the_models_positions_is_refused(config):
    with pytest.raises(InputError, match="--max-model-len 513 is above the 512 positions of"):
        planned(config, max_model_len=513)
    assert planned(config, max_model_len=100).limits.max_model_len == 100


def test_rotary_scaling_stretches_the_positions(tmp_path):
    path = tmp_path / "config.json"
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    path.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512, "rope_parameters": rope}))
    assert planned(str(path), max_model_len=2048).limits.max_model_len == 2048
    with pytest.raises(InputError, match="above the 2048 positions"):
        planned(str(path), max_model_len=2049)


def test_a_config_without_positions_needs_the_flag(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="has no max_position_embeddings; give --max-model-len N"):
        planned(str(path))
    assert planned(str(path), max_model_len=64) == make_plan(
        Limits(64),
        settings=Settings.from_environment(),
        limit_origins={
            "max_model_len": "flag",
            "max_num_seqs": "default",
            "max_num_batched_tokens": "default",
            "block_size": "default",
        },
    )


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_step_of_0_is_one_value_as_gaudis_variables_may_say(llmc, config, monkeypatch, by):
    given = ("--prompt-context", "0,0,0") if by == "flag" else ()
    if by == "environment":
        for bound in ("MIN", "STEP", "MAX"):
            monkeypatch.setenv(f"VLLM_PROMPT_CTX_BUCKET_{bound}", "0")
    ran = llmc(config, "--max-model-len", "256", "--max-num-seqs", "2", *given, "--json")
    assert ran.exit_code == 0, ran.stderr
    prompts = [bucket for bucket in Plan.from_json(ran.stdout).buckets if bucket.phase == "prompt"]
    assert prompts and {bucket.context for bucket in prompts} == {0}


def test_limits_may_come_from_a_serving_images_variables(config, monkeypatch):
    monkeypatch.setenv("MAX_MODEL_LEN", "256")
    monkeypatch.setenv("MAX_NUM_SEQS", "2")
    plan = planned(config)
    assert (plan.limits.max_model_len, plan.limits.max_num_seqs) == (256, 2)
    assert plan.provenance.origins["max_num_seqs"] == "environment MAX_NUM_SEQS"
    assert planned(config, max_num_seqs=4).limits.max_num_seqs == 4
    monkeypatch.setenv("MAX_MODEL_LEN", "513")
    with pytest.raises(InputError, match="MAX_MODEL_LEN 513 is above the 512 positions of"):
        planned(config)
    monkeypatch.setenv("MAX_MODEL_LEN", "0")
    with pytest.raises(InputError, match="MAX_MODEL_LEN=0 must be at least 1"):
        planned(config)
