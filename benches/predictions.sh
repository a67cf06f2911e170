#!/usr/bin/env bash
# How near predictions for this machine come: measures it, makes runs of 33 plans on one and two ranks, five of them with something on disk, and holds the steps and the memory of
# each beside what is predicted, first by what was measured of single tasks, then by what four of the runs have taught: of one rank and of two, in
# f32 and in bf16; those of the large model also by what one of it in memory has taught, since caches hold nothing of it from step to step.
#
#     benches/predictions.sh [DIRECTORY]        some ten minutes; nothing else should run meanwhile
set -euo pipefail
cd "$(dirname "$0")/.."
lockstep=${LOCKSTEP:-target/release/lockstep}
lockstep=$(realpath "$lockstep")
cd "${1:-$(mktemp -d)}"
export LOCKSTEP_MACHINE=$PWD/machine.toml
for _ in $(seq 3000); do echo 'All ranks wait until the last gradient has been reduced, and none of them goes on before.'; done > text.txt
cat > run.toml <<'END'
[data]
train = ["text.txt"]
[train]
steps = 14
eval_every = 0
seq_len = 256
global_batch = 8
[checkpoint]
every = 0
END
"$lockstep" bench machine > machine.txt
cp machine.toml measured.toml

runs=()
# NAME, then settings
run() {
    local name=$1 settings=()
    shift
    for setting in "$@"; do settings+=(--set "$setting"); done
    "$lockstep" train run.toml --resume never --set metrics.dir="$name" --set checkpoint.dir="$name-checkpoints" "${settings[@]}" > "$name.out" 2>&1 ||
        { cat "$name.out"; exit 1; }
    rm -rf "$name-checkpoints"
    runs+=("$name")
}
gpt=(model.preset=baby-gpt model.n_positions=256)
llama=(model.preset=llama-15m model.vocab_size=256 data.tokenizer=bytes)
experts=(model.preset=mixtral-20m model.vocab_size=256 data.tokenizer=bytes)
for precision in f32 bf16; do
    p=train.precision=$precision
    for model in gpt llama; do
        declare -n keys=$model
        one=parallel.tensor_parallel=1
        run $model-$precision-alone $p "${keys[@]}" $one
        run $model-$precision-replicas $p "${keys[@]}" parallel.data_parallel_replicate=2
        run $model-$precision-zero3 $p "${keys[@]}" parallel.data_parallel_shard=2 parallel.zero_stage=3
        run $model-$precision-tensor $p "${keys[@]}" parallel.tensor_parallel=2
    done
    run llama-$precision-recompute $p "${llama[@]}" parallel.recompute=full
    run llama-$precision-context $p "${llama[@]}" parallel.context_parallel=2
    run llama-$precision-pipeline $p "${llama[@]}" parallel.pipeline_parallel=2 train.micro_batch=1
    run llama-$precision-zb $p "${llama[@]}" parallel.pipeline_parallel=2 train.micro_batch=1 parallel.pipeline_schedule=zb_h1
done
run gpt-bf16-zero1 train.precision=bf16 "${gpt[@]}" parallel.data_parallel_shard=2 parallel.zero_stage=1 train.micro_batch=2
run experts-bf16-alone train.precision=bf16 "${experts[@]}" parallel.tensor_parallel=1
run experts-bf16-expert train.precision=bf16 "${experts[@]}" parallel.data_parallel_shard=2 parallel.expert_parallel=2
# What is read and written is as much as the model; here it takes longest beside the work.
large=(model.preset=gpt2-124m data.tokenizer=bytes train.steps=8)
optimizer=parallel.offload.optimizer=disk
gradients=parallel.offload.gradients=disk
run large-memory "${large[@]}" parallel.tensor_parallel=1
run large-disk-optimizer "${large[@]}" parallel.tensor_parallel=1 $optimizer
run large-disk-gradients "${large[@]}" parallel.tensor_parallel=1 $optimizer $gradients train.micro_batch=4
run large-disk-parameters "${large[@]}" parallel.tensor_parallel=1 $optimizer parallel.offload.parameters=disk
run large-disk-activations "${large[@]}" parallel.tensor_parallel=1 parallel.offload.activations=disk
run large-disk-zero3 "${large[@]}" parallel.data_parallel_shard=2 parallel.zero_stage=3 $optimizer parallel.offload.parameters=disk

all=()
for name in "${runs[@]}"; do all+=(--calibrate "$name"); done
echo "by what was measured of single tasks:"
"$lockstep" plan "${all[@]}" --cluster measured.toml --output /dev/null
teachers=(llama-f32-alone llama-bf16-alone gpt-f32-replicas gpt-bf16-replicas)
taught=()
for name in "${teachers[@]}"; do taught+=(--calibrate "$name"); done
"$lockstep" plan "${taught[@]}" --cluster measured.toml --output learned.toml > learned.txt
echo
echo "the same after ${teachers[*]} have taught (column predicted):"
"$lockstep" plan "${all[@]}" --cluster learned.toml --output /dev/null

of_large=()
for name in "${runs[@]}"; do [[ $name != large-* ]] || of_large+=(--calibrate "$name"); done
"$lockstep" plan --calibrate large-memory --cluster measured.toml --output learned-large.toml > learned-large.txt
echo
echo "those of the large model after large-memory has taught (column predicted):"
"$lockstep" plan "${of_large[@]}" --cluster learned-large.toml --output /dev/null
