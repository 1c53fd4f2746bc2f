"""The engine turns requests into tokens, step by step.

`AsyncEngine` (async_engine.py) runs an `LLMEngine` (engine.py) in a thread; that runs requests over an `EngineCore`
(core.py). A `BatchedCore` (batched_core.py) gets each step from the scheduler (scheduling/), runs it on the executor,
samples tokens (sampling/) and verifies drafts (speculation.py). A `SequentialCore` (sequential_core.py) leaves this to
its device. text_assembly.py turns tokens into text; kv_transfer.py takes prompts that another executor computed.
"""
