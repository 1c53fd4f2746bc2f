"""Warm-up and graph capture under a memory budget. This package is device-independent and imports no device code.

options.py    user options
device.py     interface of a real device
order.py      capture order
memory.py     profile run and memory division
predict.py    predicted graph sizes
graphs.py     capture loop over a CaptureDevice, and its outcome
log.py        log lines and JSON
dry_run.py    capture with estimated sizes, without a device
auxiliary.py  auxiliary graphs that serving needs in addition to the buckets

The rules follow the Gaudi guide (vLLM on HPU, August 2024). Where the guide is silent they follow HabanaAI's vLLM fork
(vllm/v1/worker/hpu_model_runner.py, warmup_graphs and warmup_model, read in 2025).
"""
