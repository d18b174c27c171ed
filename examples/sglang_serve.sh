#!/usr/bin/env bash
# Serve a model with SGLang, its prefill graphs running the compiled body.
#
#   examples/sglang_serve.sh Qwen/Qwen3-8B [more arguments of sglang.launch_server]
#
# Needs a GPU, SGLang, and this package: pip install fullgraph-compile[sglang]
set -euo pipefail

model="${1:?usage: $0 MODEL [arguments of sglang.launch_server]}"
shift

# Any failure to compile or capture ends the server at start-up; use 1 to go on with SGLang's own graphs.
export FULLGRAPH_COMPILE_SGLANG="${FULLGRAPH_COMPILE_SGLANG:-strict}"

# 16 requests in a graph, buckets up to 2048 tokens: above that a graph gains little.
exec python -m sglang.launch_server --model-path "$model" --attention-backend flashinfer --port "${PORT:-30000}" \
	--cuda-graph-config '{"prefill": {"max_bs": 2048, "full_prefill_max_req": 16}}' "$@"
