#!/usr/bin/env bash
# Everything that needs a GPU, from the project's root: bash results/gpu.sh [-o folder for the logs] [part ...]
# Parts: tests 256 graph half layer 64 step long decode exact every, all of them by default, in this order; and 128, tune. Each takes 3 to 10 minutes,
# much of it torch.compile's, and leaves one log, layer, step and decode their JSON as well. Without --remat batches are what by count (gpu_bytes.py) fits
# into 139 GiB; on a smaller GPU all are half as large.
# gpu_table.py makes a table of the training runs, with MFU.
# DEVICE=cpu SIZE=tiny STEPS=2 LONG=512 bash results/gpu.sh -o /tmp/logs exact 64 long every     tries the script where there is no GPU
set -uo pipefail
out=results
if [ "${1:-}" = -o ]; then out=$2; shift 2; fi
mkdir -p "$out" || exit
device=${DEVICE:-cuda} size=${SIZE:-340m} steps=${STEPS:-20} long=${LONG:-16384}
MiB=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
share=1                                                       # what batches are divided by
if [[ $MiB =~ ^[0-9]+$ ]] && ((MiB < 100000)); then share=2; fi
export PYTHONUNBUFFERED=1 PYTORCH_ALLOC_CONF=expandable_segments:True
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)        # a checkpoint of 340m is 4 GiB, which no one reads
trap 'rm -rf "$work"' EXIT

train() {                                                     # stopped before any validation; one that hangs does not take the others' time
    timeout ${limit:-240} python3 train.py --device "$device" --data pydoc --warmup 1 --out "$work/run" "$@" 2>&1
    rm -rf "$work/run"
}

batch() { echo "--batch-size $(($1 < share ? 1 : $1 / share))"; }

speed() {                                                     # speed <name> <flags>: tokens/s of the last steps
    echo "== $*"
    train --size "$size" --tokenizer byte --grad-accum 1 --minutes 0 --steps $((steps + 1)) --eval-every $((steps + 1)) \
        --stop-after "$steps" --log-every $((steps > 5 ? 5 : 1)) "${@:2}"
}

exact() {                                                     # bfloat16, TF32 and compiled (the default there), each by itself, against float32 and eager
    for model in omeganet atlas; do
        for how in "" "--memory-dtype bfloat16" "--matmul highest" "--dtype float32" "--dtype float32 --no-compile"; do
            echo "== $model $how"
            train --model $model $how --steps $((2 * steps + 1)) --eval-every $((2 * steps)) --stop-after $((2 * steps))
        done
    done
}

half() {                                                      # the memory in bfloat16, too
    speed "$size titans, half" --model titans $(batch 8) --chunk 256 --memory-dtype bfloat16 "$@"
    speed "$size omeganet, half" --model omeganet $(batch 4) --chunk 256 --memory-dtype bfloat16 "$@"
    speed "$size omeganet, half, 128" --model omeganet $(batch 4) --chunk 128 --memory-dtype bfloat16 "$@"
    speed "$size atlas, half" --model atlas $(batch 2) --chunk 256 --muon-every 256 --memory-dtype bfloat16 --ns-dtype bfloat16 "$@"
    speed "$size titans, half, $long" --model titans $(batch 2) --seq-len "$long" --chunk 256 --memory-dtype bfloat16 "$@"
    speed "$size omeganet, half, $long" --model omeganet $(batch 1) --seq-len "$long" --chunk 256 --memory-dtype bfloat16 "$@"
}

bench() {                                                     # bench <name> <flags>
    python3 bench.py --device "$device" --minutes 4 --json "$out/bench-$1-$device.json" "${@:2}" 2>&1 | grep -v '^{'
}

models="--model transformer --model linear --model titans --model omeganet --model atlas"

run() {
    case $1 in
    tests) python3 -m pytest -q test_all.py 2>&1 ;;
    256)                                                      # tokens that share a gradient point, and one Newton-Schulz
        for model in transformer linear titans; do speed "$size $model" --model $model $(batch 4) --chunk 256; done
        speed "$size omeganet" --model omeganet $(batch 2) --chunk 256
        for model in omeganet atlas; do speed "$size $model" --model $model $(batch 8) --chunk 256 --muon-every 256 --remat; done
        speed "$size atlas, Newton-Schulz in bfloat16" --model atlas $(batch 8) --chunk 256 --muon-every 256 --remat --ns-dtype bfloat16 ;;
    long)
        speed "$size transformer $long" --model transformer $(batch 2) --seq-len "$long"
        for model in linear titans omeganet atlas; do
            speed "$size $model $long" --model $model $(batch 4) --seq-len "$long" --chunk 256 --muon-every 256 --remat
        done ;;
    64 | 128)
        for model in linear titans omeganet atlas; do
            speed "$size $model $1" --model $model $(batch 4) --chunk "$1" --muon-every "$1" --remat
        done ;;
    graph)                                                    # one launch a pass
        speed "$size transformer, graph" --model transformer $(batch 4) --cuda-graph
        half --cuda-graph
        speed "$size omeganet, graph" --model omeganet $(batch 2) --chunk 256 --cuda-graph
        speed "$size transformer, graph, $long" --model transformer $(batch 1) --seq-len "$long" --cuda-graph ;;
    half) half ;;
    tune)                                                     # products by Triton, too, each as is fastest, with what follows: minutes to compile
        for model in titans omeganet; do
            limit=580 TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1 \
                speed "$size $model, tuned" --model $model $(batch 4) --chunk 256 --memory-dtype bfloat16 --cuda-graph
        done ;;
    layer) bench layer --part layer --part rule $models ;;
    step) bench step --part step $models ;;
    decode) bench decode --part decode --part peers --model transformer --model omeganet --model atlas ;;
    exact) exact ;;
    every)                                                    # Newton-Schulz for every 16th token, and for every one, as the paper
        speed "$size atlas every 16" --model atlas $(batch 1) --chunk 64 --muon-every 16 --remat --steps 6 --stop-after 5 --log-every 1
        speed "$size atlas every 1" --model atlas $(batch 1) --chunk 64 --muon-every 1 --remat --seq-len 256 --steps 4 --stop-after 3 --log-every 1
        speed "$size atlas every 1, no momentum" --model atlas $(batch 1) --chunk 64 --muon-every 1 --no-momentum --matmul highest --remat \
            --steps 6 --stop-after 5 --log-every 1 ;;
    *) echo "error: no part $1" ;;
    esac
}

for part in "${@:-tests 256 graph half layer 64 step long decode exact every}"; do
    for part in $part; do
        run "$part" | tee "$out/gpu-$part.log" | grep -E '^==|compiled in|^ *step|peak memory|^done|warning|[Ee]rror|passed|failed'
    done
done
