"""lm-eval, over /v1/completions. `parameter` is the tokenizer's folder; the question has the requests as JSON."""

from __future__ import annotations

import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from worker import Said, Server, run


def model(server: Server) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{server.url}/completions", model=server.model, tokenizer=server.parameter,
        tokenizer_backend="huggingface", max_retries=1, num_concurrent=1,
    )  # fmt: skip


def requests(server: Server, kind: Any) -> list[Any]:
    given = json.loads(server.question)
    return [Instance(request_type=kind, doc={}, arguments=tuple(one), idx=i) for i, one in enumerate(given)]


def loglikelihood(server: Server) -> Said:
    return Said(value=model(server).loglikelihood(requests(server, "loglikelihood"), disable_tqdm=True))


def generate_until(server: Server) -> Said:
    return Said(value=model(server).generate_until(requests(server, "generate_until"), disable_tqdm=True))


run({"loglikelihood": loglikelihood, "generate_until": generate_until})
