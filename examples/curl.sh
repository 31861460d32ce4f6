#!/usr/bin/env bash
# Calls the HTTP interface of a decode server with curl. Start a pair first: pdserve up
set -euo pipefail
url=${1:-http://127.0.0.1:8200}
curl=(curl --silent --show-error --fail-with-body)
if [[ -n ${PDSERVE_API_KEY:-} ]]; then curl+=(--header "Authorization: Bearer $PDSERVE_API_KEY"); fi

echo "== is the server healthy?"
"${curl[@]}" "$url/health"

echo; echo "== one completion"
"${curl[@]}" "$url/generate" -d '{
  "text": "The capital of France is",
  "sampling_params": {"max_new_tokens": 16, "temperature": 0}
}'

echo; echo "== a batch, sampled; the seed makes every run the same"
"${curl[@]}" "$url/generate" -d '{
  "text": ["Once upon a time", "In the beginning"],
  "sampling_params": {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}
}'

echo; echo "== a stream of server-sent events; the text is cumulative"
"${curl[@]}" --no-buffer "$url/generate" -d '{
  "text": "Three colours of the rainbow are",
  "sampling_params": {"max_new_tokens": 8, "temperature": 0},
  "stream": true
}'

echo "== chat, as OpenAI clients send it"
"${curl[@]}" "$url/v1/chat/completions" -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "max_tokens": 24, "temperature": 0
}'
echo
