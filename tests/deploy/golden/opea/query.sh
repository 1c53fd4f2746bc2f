#!/bin/sh
# Written by `llmc deploy opea`. Sends the requests of OPEA's guide to a server:
#
#   sh query.sh [http://HOST:PORT]
set -eu
url=${1:-http://127.0.0.1:8008}

curl --fail --silent --show-error "$url/v1/health_check" -H 'Content-Type: application/json'
echo
# The loops send the messages as a string and as a list, each with and without streaming.
for stream in true false; do
    for messages in '"What is Deep Learning?"' '[{"role": "user", "content": "What is Deep Learning?"}]'; do
        curl --fail --silent --show-error "$url/v1/chat/completions" -H 'Content-Type: application/json' \
            ${LLMC_API_KEY:+-H "Authorization: Bearer $LLMC_API_KEY"} \
            -d '{"model": ''"toy"'', "messages": '"$messages"', "max_tokens": 17, "stream": '"$stream"'}'
        echo
    done
done
