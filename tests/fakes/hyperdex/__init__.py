"""A HyperDex-Toolchain 1.5.1 without LPUs, for contract tests: same names, arguments, files, words and failures.

What is public of the real one, and what this is faithful to:
    calls and defaults      Hyper-Accel/docs, docs/huggingface_api.md at b0ba3ab
    arguments of compile    Hyper-Accel/docs, docs/model_compile.md at fab45db
    files, powers of two    Hyper-Accel/vllm, vllm/worker/lpu_model_runner.py at a10068c (HyperDexSDK)
    generate_yield          the same file (execute_model): lists of tokens, one for each sequence
    words of failures       Hyper-Accel/docs, docs/troubleshooting.md at 1924e4e

The artifact is what runs: weights are read back from its parameter files, and a numpy Llama (model.py) computes them.
FAKE_HYPERDEX makes it fail: "kill:CALL", "hang:CALL", "error:CALL", "exit:CALL" or "babble:CALL", where CALL is import,
compile, from_pretrained, generate, or the number of a token; "nothing:compile" leaves no file, "wrong:tokens" gives
others. FAKE_LPUS and FAKE_GPUS say how many there are (4 and 2).
"""

import os
import signal
import sys
import time

LPUS = int(os.environ.get("FAKE_LPUS", "4"))
GPUS = int(os.environ.get("FAKE_GPUS", "2"))


def requested(fault: str) -> bool:
    """Whether the test asks for this fault."""
    return os.environ.get("FAKE_HYPERDEX") == fault


def at(call: str) -> None:
    """Fail here, if the test asks for it."""
    how, _, where = os.environ.get("FAKE_HYPERDEX", "").partition(":")
    if where != call:
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    if how == "babble":
        os.write(3, b"not JSON\n")
    if how == "exit":
        sys.exit(7)
    if how == "error":
        print("[ ERROR ] : Timeout occurred while waiting for the LPU to generate tokens.", file=sys.stderr)
        raise RuntimeError("Failed to make network connection table")


at("import")
