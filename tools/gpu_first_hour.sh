#!/usr/bin/env bash
# Check a new GPU: speed and correctness of a Mamba-2 model, every kernel, prefills that keep many states, and engines.
# Needs neither make nor a network; docs/cuda.md describes the machine, and how to make the folder of wheels.
#
#   tools/gpu_first_hour.sh [--wheels DIR] [--out DIR] [--workers N] [--quick] [STAGE ...]
#
# Stages: mamba2 kernels kept_states engines; default: all, in this order. Each takes less than 8 minutes, writes its log
# to --out (default: out/gpu), and adds a line of JSON to stages.jsonl there: stage, rc, seconds, counts, log. A stage
# that fails does not keep the next one from running; the exit code is the largest one. --quick does little of each
# stage, which shows without a GPU that everything starts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

readonly ALL=(mamba2 kernels kept_states engines)
readonly STAGE_SECONDS=400 COMPILE_SECONDS=120 END_SECONDS=60
wheels="" out=out/gpu workers=12 quick="" stages=()

fail() {
  echo "gpu_first_hour.sh: error: $1" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case $1 in
    --wheels | --out | --workers)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in --wheels) wheels=$2 ;; --out) out=$2 ;; --workers) workers=$2 ;; esac
      shift
      ;;
    --quick) quick=--quick ;;
    mamba2 | kernels | kept_states | engines) stages+=("$1") ;;
    *) fail "$1 is no stage; choose from ${ALL[*]}" ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${ALL[@]}")
[ -z "$wheels" ] || compgen -G "$wheels/*.whl" >/dev/null || fail "--wheels $wheels has no wheels"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
export PYTHONPATH="$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export MEGATRON_EXT_CPP=off NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo TRITON_CACHE_DIR="$scratch/triton"
# Plugins of the machine's own pytest may not suit the one of the wheels.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PYTEST_ADDOPTS="-p pytest_asyncio.plugin -p pytest_timeout -p _hypothesis_pytestplugin -p no:cacheprovider"
if [ -n "$wheels" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl || exit 2
fi
{
  nvidia-smi
  python3 -c 'import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)'
} >"$out/device.txt" 2>&1

# Run a command for the rest of the stage's time; an interrupt lets pytest print its counts.
limited() { timeout --signal=INT --kill-after=$END_SECONDS $((STAGE_SECONDS - SECONDS)) "$@"; }

benchmark() {
  limited python3 -m benchmarks "gpu.$1" ${quick:+"$quick"} --minutes "$2" --json "$out/$1.json"
}

tests() {
  local marks="long or not long or kernels"
  [ -z "$quick" ] || marks="not long"
  limited python3 -m pytest -q -p tests.workers --workers "$workers" -m "$marks" "$@"
}

run() {
  case $1 in
    mamba2) benchmark mamba2 5 ;;
    kernels) # compiled on every core before the tests, which compile what is left
      timeout $COMPILE_SECONDS python3 tools/compile_kernels.py "${quick:---device}"
      local compiled=$?
      tests tests/unit_tests/ops || return
      [ $compiled -eq 124 ] || return $compiled
      ;;
    kept_states) benchmark kept_states 3 ;;
    engines) tests tests/unit_tests/{engine,mcore,memory,mixers,runner} ;;
  esac
}

# Print what a log counts, as fields of JSON: tests by outcome, or the rows of a benchmark and what failed of them.
counts() {
  local summary
  summary=$(grep -E '[0-9]+ [a-z]+.* in [0-9.]+s' "$1" | tail -n 1)
  if [ -n "$summary" ]; then
    sed -E 's/ in [0-9.]+s.*//' <<<"$summary" | grep -oE '[0-9]+ [a-z]+' | sed -E 's/(.*) (.*)/"\2": \1/' | paste -sd ,
  else
    echo "\"rows\": $(grep -c '^| [^ -]' "$1"), \"failed\": $(grep -cE '^check failed|.+ failed: ' "$1")"
  fi
}

worst=0
for name in "${stages[@]}"; do
  SECONDS=0
  run "$name" >"$out/$name.log" 2>&1
  rc=$?
  [ $rc -le $worst ] || worst=$rc
  tail -n 15 "$out/$name.log"
  printf '{"stage": "%s", "rc": %d, "seconds": %d, "counts": {%s}, "log": "%s"}\n' \
    "$name" $rc $SECONDS "$(counts "$out/$name.log")" "$name.log" | tee -a "$out/stages.jsonl"
done
exit $worst
