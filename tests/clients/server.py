"""A live server over a toy bundle whose engine answers by a script, in the notation of the bundle's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc.buckets.limits import Limits
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.constraints import ConstraintFactory
from llmc.testing.toy import toy_plan
from tests.runtime.text.notations import written
from tests.server.live import Live
from tests.server.stub_engine import ScriptedEngine, ScriptedStream
from tests.toy import Toy, reference

POSITIONS = 16_384
"""Tokens of a prompt and its answer; a byte is a token."""
SHORT = 64
"""Positions of the toy whose model answers."""
GREETING = "Grüße aus Köln! ☀️ Hello."
CITIES = ("Köln", "Ulm")
DAYS = 2
QUESTION = "What is the weather in Köln?"
TWO_QUESTIONS = "What is the weather in Köln and in Ulm?"
FORECAST = {"city": "Köln", "degrees": 21}
RESULT = re.compile(r"\d+ degrees in \w+")
"""What the clients' tool returns."""
_SHOWN = re.compile(r"((?:\S+ )*)<\|")
"""The names of tools at the beginning of a prompt, as the templates of notations.py show them."""


@dataclass
class ScriptedModel(ScriptedEngine):
    """Calls get_weather for each city of the question, then answers with the results.

    The answer is text, JSON, or a call of a tool that takes the output.
    """

    template: str = ""
    factory: Any = None
    prompts: list[str] = field(default_factory=list)
    """Prompts since the last case began, without special tokens."""
    faults: list[str] = field(default_factory=list)
    """Answers that the request's own constraint does not take."""

    async def open(self, request: Request) -> ScriptedStream:
        prompt = self.tokenizer.decode(request.prompt_token_ids)
        self.requests.append(request)
        self.prompts.append(prompt)
        text = self.answer(prompt, request.params)
        if not self._takes(request.params.structured_outputs, text):
            self.faults.append(f"{request.params.structured_outputs} does not take {text}")
        return ScriptedStream(replace(self, pieces=tuple(text)), request)

    def answer(self, prompt: str, params: Any) -> str:
        """What the model writes after a prompt."""
        names, results = self.shown(prompt), sorted(RESULT.findall(prompt))
        constraint = params.structured_outputs
        if "get_weather" in names and not results:
            return self.weather([city for city in CITIES if city in prompt])
        # a grammar may take calls of the tool beside the format of the answer
        in_format = constraint is not None and (constraint.kind != "grammar" or names == ["get_weather"])
        if in_format:
            return json.dumps(FORECAST, ensure_ascii=False)
        final = f"It is {' and '.join(results)}. ☀️" if results else GREETING
        if "final_answer" in names:
            return written(self.template, [("final_answer", {"answer": final})]).text
        if outputs := [name for name in names if name != "get_weather"]:
            return written(self.template, [(outputs[0], FORECAST)]).text
        return final

    @staticmethod
    def shown(prompt: str) -> list[str]:
        """The names of the tools in a prompt."""
        match = _SHOWN.match(prompt)
        assert match is not None, prompt[:200]
        return match[1].split()

    def weather(self, cities: Sequence[str]) -> str:
        """A call for each city as the template writes it."""
        return written(self.template, [("get_weather", {"city": city, "days": DAYS}) for city in cities]).text

    def _takes(self, constraint: Any, text: str) -> bool:
        """Whether a model under this constraint may write this text."""
        if constraint is None:
            return True
        compiled, ends = self.factory.compile(constraint), self.tokenizer.eos_token_ids
        for token in [*self.tokenizer.encode(text), *ends]:
            if not compiled.mask()[token]:
                return False
            compiled.accept(token)
        return True


class PlainServer:
    """llmc's own server in a thread over a toy, whose model answers."""

    model = "toy"

    def __init__(self, folder: Path) -> None:
        toy = Toy.make(folder, positions=SHORT)
        toy.compile(toy_plan([(1, SHORT, 0)], [(1, SHORT)], Limits(SHORT, 1)))
        self.tokenizer, self.reference = str(toy.model), reference(toy.model)
        self._live = Live(toy.bundle, served_model_name=self.model).__enter__().ready()
        served = self._live.server.state.served
        assert served is not None
        self.encode, self.decode = served.tokenizer.encode, served.tokenizer.decode
        self.url, self.faults = f"http://127.0.0.1:{self._live.port}/v1", ()

    def begin(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._live.__exit__(None, None, None)


class ScriptedServer:
    """llmc's own server in a thread, with its HTTP and the bundle's own chat template.

    Only the engine's answers are a script.
    """

    model = "toy"

    def __init__(self, bundle: Path, template: str) -> None:
        self._live = Live(bundle, served_model_name=self.model).__enter__().ready()
        served = self._live.server.state.served
        assert served is not None
        source = served.bundle.files.read("tokenizer.json").decode()
        factory = ConstraintFactory(source, served.bundle.manifest.model["vocab_size"], served.tokenizer.eos_token_ids)
        self._script = ScriptedModel(served.tokenizer, template=template, factory=factory)
        served.generating.open = self._script.open  # type: ignore[method-assign, assignment]
        self.url = f"http://127.0.0.1:{self._live.port}/v1"
        self.prompts, self.faults, self.requests = self._script.prompts, self._script.faults, self._script.requests

    def calls(self, cities: Sequence[str]) -> str:
        """Calls of the tool as a model of this family writes them."""
        return self._script.weather(cities)

    def begin(self) -> None:
        """Forget what earlier cases sent."""
        for kept in (self.prompts, self.faults, self.requests):
            kept.clear()

    def close(self) -> None:
        self._live.__exit__(None, None, None)


def serve(template: str, folder: Path) -> ScriptedServer:
    """Compile a toy with this chat template, and serve it."""
    toy = Toy.make(folder, positions=POSITIONS)
    config = toy.model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    toy.compile(toy_plan([(1, POSITIONS, 0)], [(1, POSITIONS)], Limits(POSITIONS, 1)))
    return ScriptedServer(toy.bundle, template)
