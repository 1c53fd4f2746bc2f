#!/bin/sh
# Written by `llmc deploy opea`. The parameters and their order are those of OPEA's launch_vllm_service.sh. Give "" to use
# the bundle's value:
#
#   sh launch_vllm_service.sh [port [model_name [hw_mode [parallel_number [block_size [max_num_seqs [max_seq_len_to_capture]]]]]]]
set -eu

port=${1:-8008}
case $port in *[!0-9]* | "") echo "port '$port' is not a number; give a TCP port, such as 8008" >&2; exit 2 ;; esac

compiled() { # NAME GIVEN COMPILED
    if [ -n "$2" ] && [ "$2" != "$3" ]; then
        echo "$1 $2: the bundle was compiled for $3; give \"\" for $1, or compile a bundle for $2 (llmc compile --help)" >&2
        exit 2
    fi
}
compiled model_name "${2:-}" toy
compiled hw_mode "${3:-}" cpu
compiled parallel_number "${4:-}" 1
compiled block_size "${5:-}" 8
compiled max_num_seqs "${6:-}" 1
compiled max_seq_len_to_capture "${7:-}" 16

exec docker run --detach --rm --name llmc-toy --publish "$port:8000" \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --user 10001:10001 \
    --memory 1281m --cpus 4 --stop-timeout 40 \
    --env LLMC_API_KEY \
    --mount 'type=bind,readonly,target=/bundle,"source=/srv/bundle"' \
    llmc-toy:latest serve /bundle --host 0.0.0.0 --port 8000 --shutdown-timeout 30
