"""What another plan would save of a server's padding, from its /metrics; and as a process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmc.buckets.planner.replanning import offer
from llmc.errors import InputError
from llmc.testing.toy import toy_plan
from tests.server.pages import Invented


def scrape(requests: int) -> str:
    """Of a server of toy_plan's buckets: prompts of 9 tokens in buckets of 16."""
    built = Invented()
    built.serve()
    built.load(requests)
    return built.state.metrics.render(ready=True)[0].decode()


def test_a_better_plan_has_no_more_graphs_and_pads_less() -> None:
    plan = toy_plan()
    found = offer(plan, scrape(60))
    assert found is not None
    assert found.requests == 60
    assert found.graphs == {"prompt": len(plan.prompt), "decode": len(plan.decode)}
    assert max(found.best_graphs.values()) <= max(found.graphs.values())
    assert 0 < found.gain["prompt"] <= 1
    assert (found.now["prompt"] or 0) > (found.best["prompt"] or 0)
    assert found.gain["decode"] >= 0


def test_before_the_first_request_there_is_none() -> None:
    assert offer(toy_plan(), scrape(0)) is None
    assert offer(toy_plan(), "") is None


def test_as_a_process() -> None:
    def reported(plan: object, metrics: str) -> dict[str, object]:
        command, requested = (
            [sys.executable, "-m", "llmc.buckets.planner.replanning"],
            json.dumps({"plan": plan, "metrics": metrics}),
        )
        done = subprocess.run(command, input=requested, capture_output=True, text=True, check=True)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    found = offer(toy_plan(), scrape(20))
    assert found is not None
    assert reported(toy_plan().to_dict(), scrape(20)) == {"offer": found.to_dict()}
    assert "field 'schema'" in str(reported(toy_plan().to_dict() | {"schema": 999}, "")["error"])


def test_a_broken_scrape_is_named() -> None:
    broken = scrape(3).replace('le="+Inf"', 'le="7e9"')
    with pytest.raises(InputError, match="/metrics"):
        offer(toy_plan(), broken)
