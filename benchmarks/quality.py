"""KL divergence to float32 and equal argmax tokens over teacher-forced text, for llmc's int8 and the peer's.

    python benchmarks/quality.py --bundle BUNDLE --genai FOLDER --peer-python PY

The text is the verification's own prompts plus the passages below; the reference is the transformers model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from harness import Worker

from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.verification.probes import LONG_TEXT, PROMPTS
from llmc.compiler.verification.transformers_reference import TransformersReference
from llmc.runtime.tokenizer import Tokenizer

PASSAGES = (
    "In 1648 envoys met in two towns at once, so that delegations of different faiths need not share a table.",
    "def merge(a, b):\n    out = []\n    while a and b:\n        out.append(a.pop(0) if a[0] < b[0] else b.pop(0))\n"
    "    return out + a + b\n",
    "<|im_start|>user\nHow do I keep basil alive indoors?<|im_end|>\n<|im_start|>assistant\nGive it six hours of "
    "light, water it when the top of the soil is dry, and pinch off the flowers.<|im_end|>\n",
)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--bundle", "--genai", "--peer-python"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args()
    args.peer_python = str(Path(args.peer_python).absolute())  # workers start in another folder
    checkpoint = open_checkpoint("smollm2-demo")
    encode = Tokenizer(checkpoint.tokenizer_json()).encode
    texts = [encode(t) for t in (*PROMPTS, LONG_TEXT, *PASSAGES)]
    reference = TransformersReference(checkpoint)
    wanted = log_softmax(np.concatenate([reference.logits(t, range(len(t))) for t in texts]))
    workers = [
        Worker("llmc int8", [sys.executable, "worker_llmc.py", str(Path(args.bundle).absolute()), "2"]),
        Worker("onnxruntime-genai", [args.peer_python, "worker_genai.py", str(Path(args.genai).absolute()), "2"]),
    ]
    for worker in workers:
        rows = []
        for text in texts:
            file = Path(worker.ask("logits", tokens=text)["file"])
            rows.append(np.load(file))
            file.unlink()
        got = log_softmax(np.concatenate(rows))
        kl = (np.exp(wanted) * (wanted - got)).sum(-1)
        equal = (wanted.argmax(-1) == got.argmax(-1)).mean()
        p99 = np.percentile(kl, 99)
        print(f"{worker.name:20s} {len(kl)} tokens: mean KL {kl.mean():.5f}, p99 {p99:.4f}, equal {equal:.1%}")
        worker.close()


if __name__ == "__main__":
    main()
