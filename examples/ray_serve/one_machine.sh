#!/usr/bin/env bash
# Two replicas of the README's embedded model here, until Ctrl-C. Settings may follow; the last of a name wins:
#   examples/ray_serve/one_machine.sh
#   examples/ray_serve/one_machine.sh model=/models/mine num_replicas=4 num_gpus=1
# Clients of OpenAI's API find them at http://127.0.0.1:8000/v1, and browsers their status page at http://127.0.0.1:8000.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

BIN=${BIN:-.venv-ray/bin} # made by `make test-ray`
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=megatron_ext.ray_serve.proxy.middlewares # requests survive an ingress
exec "$BIN/serve" run megatron_ext.ray_serve:app model=embedded num_replicas=2 "$@"
