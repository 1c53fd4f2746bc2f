"""Requests from vLLM's log."""

from __future__ import annotations

import pytest

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace
from llmc.errors import InputError
from tests.buckets.traffic.files import written
from tests.buckets.traffic.formats.logs import generated, received


def of(folder, text: str, **more) -> list[TrafficRequest]:
    return list(Trace(written(folder, "log", text), **more))


class TestVllm:
    def test_a_request_arrives_when_received_and_counts_when_answered(self, tmp_path):
        text = "\n".join(
            [
                "INFO 11-23 12:57:00 [api_server.py:1] Started server process",
                received("chatcmpl-a", 374, 0),
                received("chatcmpl-b", 20, 2),
                generated("chatcmpl-b", 5, 3),
                generated("chatcmpl-a", 44, 9),
            ]
        )
        assert of(tmp_path, text) == [TrafficRequest(0, 374, 44), TrafficRequest(2, 20, 5)]

    def test_newer_versions_give_the_ids_a_line_of_their_own(self, tmp_path):
        text = "\n".join(
            [
                "(APIServer pid=7) DEBUG 12-31 23:59:59 [request_logger.py:9] Request cmpl-a-0 details: prompt: "
                "'so, prompt_token_ids: [1, 2, 3, 4] he said', prompt_token_ids: [5, 6], prompt_embeds shape: None.",
                "(APIServer pid=7) INFO 12-31 23:59:59 [request_logger.py:9] Received request cmpl-a-0: params: "
                "SamplingParams(n=1), lora_request: None.",
                "(APIServer pid=7) INFO 01-01 00:00:01 [request_logger.py:9] Received request cmpl-b-0: params: "
                "SamplingParams(n=1), lora_request: None.",
                "(APIServer pid=7) DEBUG 01-01 00:00:01 [request_logger.py:9] Request cmpl-b-0 details: prompt: None, "
                "prompt_token_ids: [5], prompt_embeds shape: None.",
                generated("cmpl-a", 2, 4),
                generated("cmpl-b", 3, 4),
            ]
        )
        assert of(tmp_path, text) == [TrafficRequest(0, 2, 2), TrafficRequest(2, 1, 3)]

    def test_a_stream_is_counted_by_its_deltas(self, tmp_path):
        delta, complete = " (streaming delta)", " (streaming complete)"
        text = "\n".join(
            [
                received("chatcmpl-a", 9, 0),
                *(generated("chatcmpl-a", n, 1, delta) for n in (1, 2, 1)),
                generated("chatcmpl-a", None, 2, complete),
            ]
        )
        assert of(tmp_path, text) == [TrafficRequest(0, 9, 4)]

    def test_from_0_32_on_the_ids_of_an_answer_are_in_a_line_before_it(self, tmp_path):
        """The lines of vllm/entrypoints/serve/utils/request_logger.py at 0.33.0; the text may say what it likes."""
        at = "(APIServer pid=7) {} 11-23 12:57:0{} [request_logger.py:9] "
        said = "', output_token_ids: [1, 2, 3, 4, 5, 6]"
        text = "\n".join(
            [
                at.format("DEBUG", 1)
                + "Request a-0 details: prompt: 'x', prompt_token_ids: [5, 6], prompt_embeds shape: None.",
                at.format("INFO", 1) + "Received request a-0: params: SamplingParams(n=1), lora_request: None.",
                at.format("DEBUG", 1)
                + "Request b details: prompt: 'x', prompt_token_ids: [7], prompt_embeds shape: None.",
                at.format("INFO", 1) + "Received request b: params: SamplingParams(n=1), lora_request: None.",
                at.format("DEBUG", 2) + "Generated response b (streaming delta) details: output_token_ids: [8, 9]",
                at.format("INFO", 2) + "Generated response b (streaming delta): output: 'a', finish_reason: None",
                at.format("DEBUG", 3) + "Generated response a details: output_token_ids: [1, 2, 3]",
                at.format("INFO", 3) + f"Generated response a: output: {said!r}, finish_reason: stop",
                at.format("DEBUG", 4) + "Generated response b (streaming delta) details: output_token_ids: [8]",
                at.format("INFO", 4) + "Generated response b (streaming delta): output: 'b', finish_reason: None",
                at.format("DEBUG", 4) + "Generated response b (streaming complete) details: output_token_ids: None",
                at.format("INFO", 4) + "Generated response b (streaming complete): output: 'ab', finish_reason: stop",
            ]
        )
        assert of(tmp_path, text) == [TrafficRequest(0, 2, 3), TrafficRequest(0, 1, 3)]

    def test_answers_to_one_prompt_share_it(self, tmp_path):
        text = "\n".join([received("c", 9, 0), generated("c", 4, 1), generated("c", 5, 1)])
        assert of(tmp_path, text) == [TrafficRequest(0, 9, 4), TrafficRequest(0, 9, 5, 8)]

    def test_a_log_without_lengths_says_how_to_get_them(self, tmp_path):
        text = (
            "INFO 11-23 12:58:00 [logger.py:1] Received request c: params: SamplingParams(n=1), lora_request: None.\n"
        )
        with pytest.raises(InputError, match=r"the log has no lengths: 2 requests received.*--enable-log-outputs"):
            of(tmp_path, text + text.replace(" c:", " d:"))

    def test_lengths_cut_by_max_log_len_are_refused(self, tmp_path):
        cut = [
            line
            for name in ("a", "b")
            for line in (received(name, 10, 0, "0123456789"), generated(name, 3, 1, text="yes, it is"))
        ]
        with pytest.raises(InputError, match="the lengths are cut: 2 texts of 10 characters"):
            of(tmp_path, "\n".join(cut))

    def test_what_was_left_out_is_said(self, tmp_path):
        text = "\n".join([received("a", 9, 0), generated("a", 4, 1), received("b", 9, 1), generated("x", 4, 1)])
        trace = Trace(written(tmp_path, "log", text))
        assert list(trace) == [TrafficRequest(0, 9, 4)]
        assert trace.notes() == [
            "1 answers without lengths were left out",
            "1 requests without an answer were left out",
        ]

    def test_requests_that_are_never_answered_are_forgotten(self, tmp_path, monkeypatch):
        monkeypatch.setattr("llmc.integrations.vllm.logs.WAITING", 2)
        text = "\n".join([*(received(f"r{i}", 9, i) for i in range(5)), generated("r0", 4, 6), generated("r4", 4, 6)])
        trace = Trace(written(tmp_path, "log", text))
        assert list(trace) == [TrafficRequest(0, 9, 4)]
        assert trace.notes()[1] == "4 requests without an answer were left out"
