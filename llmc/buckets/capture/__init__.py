"""Warm-up and graph capture under a memory budget, for any device: nothing here imports one.

options.py    what users choose                device.py     what a real device has to do
order.py      which bucket comes first         memory.py     the profile run, and the memory that it leaves, divided
predict.py    the bytes of the next graph      graphs.py     the loop over a CaptureDevice, and its outcome
log.py        both in log lines and JSON       dry_run.py    the same with estimated sizes, before there is a device
auxiliary.py  graphs that serving needs besides the buckets

The rules are those of the Gaudi guide (vLLM on HPU, August 2024), and of HabanaAI's vLLM fork where the guide is silent
(vllm/v1/worker/hpu_model_runner.py, warmup_graphs and warmup_model, read in 2025).
"""
