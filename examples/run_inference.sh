#!/usr/bin/env bash
# The embedded model on the shipped prompts, with results as JSON. Any flag of tools/run_inference.py can follow:
#   examples/run_inference.sh --prompts "What does a generator do?" --num-tokens-to-generate 40
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python} # made by `make setup`
mkdir -p out
exec "$PYTHON" tools/run_inference.py --output-path out/results.json --output-request-events "$@"
