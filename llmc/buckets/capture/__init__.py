"""Warm-up and graph capture under a memory budget, for any device: nothing here imports one.

options.py    what users choose                memory.py     what a device has left for the KV cache and for graphs
profile.py    the run that this is measured by sizes.py      bytes, as stated and as printed
order.py      which bucket comes first         predict.py    the bytes of the next graph, from those measured
capture.py    the loop over a CaptureDevice    outcome.py    what was captured, what was not, and why
report.py     both in log lines and JSON       estimated.py  the device of a dry run
device.py     what a real device has to do     beside.py     what has to be warmed beside the buckets

The rules are those of the Gaudi guide (vLLM on HPU, August 2024), and of HabanaAI's vLLM fork where the guide is silent
(vllm/v1/worker/hpu_model_runner.py, warmup_graphs and warmup_model, read in 2025).
"""
