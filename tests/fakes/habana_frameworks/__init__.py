"""A Gaudi accelerator that is not there: the part of Intel's `habana_frameworks` that llmc uses, over CPU tensors.

Put tests/fakes on sys.path (PYTHONPATH of a child process) and `import habana_frameworks.torch`; what it is to be, and
how it is to fail, is in `habana_frameworks.torch._accelerator`.

Faithful to public sources:
  HabanaAI/gaudi-pytorch-bridge, python_packages/habana_frameworks/torch: __init__.py (versions that have to agree, no
      stock torch in lazy mode), utils/internal.py (is_lazy, read once), hpu/__init__.py, hpu/memory.py (mem_get_info),
      hpu/graphs.py (HPUGraph, graph, wrap_in_hpu_graph; commit 39403e4), hpu/metrics/metrics.py (stats, contexts),
      dynamo/compile_backend/backends.py (`hpu_backend` is registered with torch._dynamo)
  vllm-project/vllm-gaudi, vllm_gaudi/v1/worker/hpu_model_runner.py: PT_COMPILE_ONLY_MODE through
      bridge_config.env_setting, which raises KeyError in releases that lack it
  HabanaAI/vllm-fork#250 (VLLM_USE_FAKE_HPU), the fake that Habana itself ran its tests on: CPU in the place of hpu

A tensor on the accelerator is a CPU tensor whose device says hpu:0 (_tensor.py), so mixing host and accelerator fails.
Each operator goes through one function, which counts memory, compilations and captured work.

Unlike on an accelerator, work is done at once in lazy mode too, and only counted at mark_step. A recompilation is what
changes an operator, a shape, a dtype or a number among its arguments, where Synapse may take some numbers as data; and
`tensor[...]` cannot be used on it, since stock torch has no device guard for hpu (narrow, index_select … can).
"""
