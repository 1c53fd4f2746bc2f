"""Process start to first token with llmc: prints the token's text and exits."""

import sys

from llmc.api import LLM
from llmc.runtime.engine.sampling.params import SamplingParams

llm = LLM(sys.argv[1], threads=2)
prompt = {"messages": [{"role": "user", "content": sys.argv[2]}]}
for _, update, _ in llm.stream([prompt], SamplingParams(max_tokens=8, temperature=0)):
    if update.text:
        print(update.text, flush=True)
        break
sys.stdin.readline()
