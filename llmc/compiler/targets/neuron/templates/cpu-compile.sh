#!/bin/sh
# Compiles vLLM Neuron's graphs for {{ chip }} on a host without NeuronCores, and packs vLLM's compile cache into llmc's store:
#
#     sh cpu-compile.sh MODEL                      prints the key of the packed cache
#     llmc cache unpack KEY                        run on the Neuron host, then serve with `arguments` and `environment`
#
# Install vLLM with its Neuron plug-in, neuronx-cc and llmc in one Python environment. After an interrupt, run the script
# again. It keeps the graphs that are complete.
set -eu
model=${1:?usage: sh cpu-compile.sh MODEL}
export VLLM_NEURON_CPU_COMPILE=1
export NEURON_PLATFORM_TARGET_OVERRIDE="${NEURON_PLATFORM_TARGET_OVERRIDE:-{{ chip }}}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$PWD/vllm-cache}"
"${PYTHON:-python3}" - "$model" <<'PYTHON'
import json
import sys

if __name__ == "__main__":
    from vllm import LLM

    LLM(model=sys.argv[1], **json.loads({{ arguments }}))
PYTHON
exec llmc cache pack vllm-neuron "$VLLM_CACHE_ROOT"
