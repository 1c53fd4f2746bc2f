"""The engine: requests to tokens, step by step.

`AsyncEngine` (async_engine.py) runs an `LLMEngine` (engine.py) in a thread; that runs requests over an `EngineCore`
(core.py). A `BatchedCore` (batched_core.py) asks the scheduler (scheduling/) for a step, has the executor run it,
chooses tokens (sampling/) and checks drafts (speculation.py). A `SequentialCore` (sequential_core.py) leaves that to
its device. text_assembly.py makes texts of tokens, handover.py takes prompts that another executor computed.
"""
