"""Flags of Megatron-LM that are accepted and have no effect here: each group gives the reason."""

from __future__ import annotations

from arguments.megatron.flag_record import Effect, MegatronFlag, MegatronGroup, group

BATCHING = "--inference-dynamic-batching"

_EAGER = "affects speed only; `--cuda-graph-impl` decides whether steps are graphs here"
_WEIGHTS = "every tensor that inference needs is read, and must be there"
_ONE_ENGINE = (
    "the first rank always chooses the replica of a request here, in its own process; megatron-ext coordinate routes "
    "between several servers"
)

TRAINING = group(
    "training",
    Effect.ACCEPTED,
    "sets how a model is trained or how its data is read",
    bare="--no-create-attention-mask-in-dataloader --log-num-zeros-in-grad",
    one="--micro-batch-size --seq-length --init-method-std --attention-dropout --hidden-dropout --num-workers "
    "--moe-aux-loss-coeff --moe-z-loss-coeff --make-vocab-size-divisible-by",
)
LOGGING = group(
    "logging",
    Effect.ACCEPTED,
    "sets what a training run logs",
    bare="--log-memory-to-tensorboard --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --verbose",
    one="--log-interval --timing-log-level",
)
CHECKPOINTS = group(
    "checkpoints",
    Effect.ACCEPTED,
    _WEIGHTS,
    bare="--auto-detect-ckpt-format --inference-ckpt-non-strict --no-load-optim --exit-on-missing-checkpoint "
    "--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure "
    "--dist-ckpt-optim-fully-reshardable",
    one="--dist-ckpt-strictness --save-interval",
)
IMPLEMENTATION = group(
    "which kernels compute",
    Effect.ACCEPTED,
    "chooses between equivalent implementations; the fastest available one is used",
    bare="--use-mcore-models --deterministic-mode --use-flash-attn --use-flashinfer-fused-rope --no-rope-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --te-rng-tracker --inference-rng-tracker "
    "--inference-fuse-tp-communication --moe-grouped-gemm --moe-shared-expert-overlap",
    one=f"--attention-backend --moe-token-dispatcher-type --inference-moe-token-dispatcher-type "
    f"--inference-grouped-gemm-backend {BATCHING}-sampling-backend",
)
ANYWAY = group(
    "what always holds",
    Effect.ACCEPTED,
    "always holds here: batching is dynamic, and the model's settings decide its layers and positions",
    bare=f"{BATCHING} --is-hybrid-model --no-position-embedding",
)
GRAPHS = group(
    "CUDA graphs",
    Effect.ACCEPTED,
    _EAGER,
    bare="--enable-cuda-graph --decode-only-cuda-graphs --inference-cuda-graph-all-prefills "
    "--moe-pad-experts-for-cuda-graph-inference --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs",
    one=f"--inference-cuda-graph-scope --inference-cuda-graph-max-tokens {BATCHING}-cuda-graph-max-tokens "
    f"{BATCHING}-cuda-graph-mixed-prefill-count {BATCHING}-cuda-graph-sizing-distribution",
    many="--cuda-graph-scope --cuda-graph-modules",
)
SCHEDULING = group(
    "scheduling",
    Effect.ACCEPTED,
    "has no counterpart: the engine itself decides when a step is launched before the tokens of "
    "the previous one are known, and pools keep their size",
    bare=f"--async-mode --inference-use-synchronous-zmq-collectives {BATCHING}-track-paused-request-events "
    "--inference-disable-ep-consensus --no-inference-disable-ep-consensus",
    one=f"{BATCHING}-async-sched-mode {BATCHING}-mamba-memory-ratio --max-tokens-to-oom --inference-max-requests "
    "--rl-kv-cache-management-mode --suspend-timeout --exit-duration-in-mins",
)
COORDINATOR = group(
    "coordinator and replicas",
    Effect.ACCEPTED,
    _ONE_ENGINE,
    bare="--use-coordinator",
    one="--inference-coordinator-port --coordinator-host --coordinator-port --frontend-replicas",
)
POOLS = group(
    "older sizes of pools",
    Effect.ACCEPTED,
    "Megatron has removed it, too; a request waits, and is preempted if need be, when the pools are full",
    one=f"{BATCHING}-buffer-guaranteed-fraction {BATCHING}-buffer-overflow-factor",
)
NUMBERS = group(
    "numbers of a run",
    Effect.ACCEPTED,
    "nothing is sent to Weights & Biases; a server's /metrics has the numbers, and its log",
    bare="--inference-wandb-logging --no-inference-wandb-logging --inference-text-gen-server-logging",
)
MEMORY = MegatronGroup(
    "memory",
    Effect.ACCEPTED,
    (
        MegatronFlag(
            "--sequence-parallel", Effect.ACCEPTED, "saves memory only: activations are not split along tokens", 0
        ),
        MegatronFlag(
            f"{BATCHING}-unified-memory-level",
            Effect.ACCEPTED,
            "pools are in device memory",
            warned=(("1", "unified memory is not used, so the buffer must fit the device"),),
        ),
    ),
)
_SINKHORN = "sinkhorn is another routing algorithm, which is missing here; leave it out"
ROUTER = MegatronGroup(
    "router",
    Effect.ACCEPTED,
    (
        MegatronFlag("--moe-router-dtype", Effect.ACCEPTED, "the router always computes in fp32"),
        MegatronFlag(
            "--moe-router-load-balancing-type",
            Effect.ACCEPTED,
            "balances experts in training",
            None,
            refused=(("sinkhorn", _SINKHORN),),
        ),
    ),
)

ACCEPTED = (
    ANYWAY,
    IMPLEMENTATION,
    GRAPHS,
    MEMORY,
    SCHEDULING,
    COORDINATOR,
    POOLS,
    ROUTER,
    CHECKPOINTS,
    TRAINING,
    LOGGING,
    NUMBERS,
)
