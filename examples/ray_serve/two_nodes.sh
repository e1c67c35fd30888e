#!/usr/bin/env bash
# Two machines with a replica of the README's embedded model each, until Ctrl-C on the first. Start it on both, with the
# same HEAD (the first one's name or address); the second may come first. Settings may follow on the first machine:
#   HEAD=first NODE=0 examples/ray_serve/two_nodes.sh
#   HEAD=first NODE=1 examples/ray_serve/two_nodes.sh
# Files that the settings name have to be readable on both. Any client with Ray's token and access to its ports runs its
# own code: keep these ports in a network of their own, and copy ~/.ray/auth_token to both (`ray get-auth-token
# --generate` makes it).
# Not run by any test, since that takes two machines: `bash -n` and its settings are checked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

BIN=${BIN:-.venv-ray/bin} # made by `make test-ray` on each machine
HEAD=${HEAD:?the name of the first machine}
NODE=${NODE:?which machine this is: 0 or 1}
PORT=${PORT:-6379}
export RAY_AUTH_MODE=token
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=megatron_ext.ray_serve.proxy.middlewares # requests survive an ingress
export RAY_ADDRESS="$HEAD:$PORT"

if [ "$NODE" != 0 ]; then
    until (: > "/dev/tcp/$HEAD/$PORT") 2> /dev/null; do sleep 1; done
    exec "$BIN/ray" start --address "$RAY_ADDRESS" --block
fi
env -u RAY_ADDRESS "$BIN/ray" start --head --port "$PORT" --block &
HEAD_PID=$!
trap 'kill "$HEAD_PID" 2> /dev/null || true' EXIT
until (: > "/dev/tcp/$HEAD/$PORT") 2> /dev/null; do sleep 1; done
"$BIN/serve" start --http-host 0.0.0.0
"$BIN/serve" run megatron_ext.ray_serve:app model=embedded num_replicas=2 "$@"
