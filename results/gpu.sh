#!/usr/bin/env bash
# Everything that needs a GPU, from the project's root: bash results/gpu.sh [-o folder for the logs] [part ...]
# Parts: tests first step 256 graph half layer 64 long decode exact every, all of them by default, in this order; and 128, tune-titans, tune-omeganet.
# Each takes 3 to 10 minutes, much of it torch.compile's, and leaves one log, layer, step and decode their JSON as well. `first` has of every other part
# what matters most: with half an hour, take tests, first, step, each by itself where a command may take ten minutes. Where a variable OUT names a
# folder, the logs are there.
# Without --remat batches are what by count (gpu_bytes.py) fits into 139 GiB; on a smaller GPU all are half as large.
# gpu_table.py makes a table of the training runs, with MFU; it wants step, which measures a large product.
# DEVICE=cpu SIZE=tiny STEPS=2 LONG=512 bash results/gpu.sh -o /tmp/logs exact 64 long every     tries the script where there is no GPU
set -uo pipefail
out=${OUT:-results}
if [ "${1:-}" = -o ]; then out=$2; shift 2; fi
mkdir -p "$out" || exit
device=${DEVICE:-cuda} size=${SIZE:-340m} steps=${STEPS:-20} long=${LONG:-16384}
MiB=$(python3 -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 20)' 2>/dev/null)
share=$((${MiB:-0} < 100000 ? 2 : 1))                         # what batches are divided by
export PYTHONUNBUFFERED=1 PYTORCH_ALLOC_CONF=expandable_segments:True
room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)
work=$(mktemp -d -p $( ((${room:-0} >= 8)) && echo /dev/shm || echo /tmp))     # a checkpoint of 340m is 4 GiB, which no one reads
trap 'rm -rf "$work"' EXIT

train() {                                                     # stopped before any validation; one that hangs does not take the others' time
    timeout -k 15 ${limit:-240} python3 train.py --device "$device" --data pydoc --warmup 1 --out "$work/run" "$@" 2>&1
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
            train --model $model $how --dropout 0 --steps $((2 * steps + 1)) --eval-every $((2 * steps)) --stop-after $((2 * steps))
        done
    done
}

half() {                                                      # half <model> <flags>: the memory in bfloat16, too
    local batch=4 more=
    case $1 in titans) batch=8 ;; atlas) batch=2 more="--muon-every 256 --ns-dtype bfloat16" ;; esac
    speed "$size $1, half" --model $1 $(batch $batch) --chunk 256 --memory-dtype bfloat16 $more "${@:2}"
}

half_long() {                                                 # the same of a long text; batch 1 cannot be halved
    local more=
    if [ $1 = omeganet ] && [ $share = 2 ]; then more=--remat; fi
    speed "$size $1, half, $long" --model $1 $(batch $([ $1 = titans ] && echo 2 || echo 1)) --seq-len "$long" --chunk 256 --memory-dtype bfloat16 \
        $more "${@:2}"
}

bench() {                                                     # bench <name> <flags>
    timeout -k 15 570 python3 bench.py --device "$device" --minutes ${minutes:-7} --json "$out/bench-$1-$device.json" "${@:2}" 2>&1 |
        grep --line-buffered -v '^{'
}

tests() {                                                     # in eight processes, where pytest-xdist is there: kernels take long to compile
    local how=-q which
    if python3 -c 'import xdist' 2>/dev/null; then how="-n 8 --dist worksteal -q"; fi
    for which in gpu "not gpu"; do                            # interrupted, pytest says what has failed so far
        TORCHINDUCTOR_COMPILE_THREADS=2 timeout -s INT -k 10 280 python3 -m pytest $how -rs --tb=short -k "$which" test_all.py 2>&1
    done
}

models="--model transformer --model linear --model titans --model omeganet --model atlas"

run() {
    case $1 in
    tests) tests ;;
    first)
        for model in transformer linear; do speed "$size $model" --model $model $(batch 4) --chunk 256; done
        half titans
        speed "$size transformer $long" --model transformer $(batch 2) --seq-len "$long"
        half_long titans --cuda-graph
        for model in omeganet atlas; do half $model; done
        for model in titans omeganet; do half $model --cuda-graph; done ;;
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
        for model in titans omeganet atlas; do half $model --cuda-graph; done
        for model in titans omeganet; do half_long $model --cuda-graph; done
        speed "$size omeganet, graph" --model omeganet $(batch 2) --chunk 256 --cuda-graph
        speed "$size transformer, graph, $long" --model transformer $(batch 1) --seq-len "$long" --cuda-graph ;;
    half)
        for model in titans omeganet atlas; do half $model; done
        half omeganet --chunk 128
        for model in titans omeganet; do half_long $model; done ;;
    tune-*)                                                   # products by Triton, too, each as is fastest, with what follows: minutes to compile
        limit=570 TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1 \
            speed "$size ${1#tune-}, tuned" --model ${1#tune-} $(batch 4) --chunk 256 --memory-dtype bfloat16 --cuda-graph ;;
    layer) bench layer --part rule --part layer $models ;;
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

for part in "${@:-tests first step 256 graph half layer 64 long decode exact every}"; do
    for part in $part; do
        run "$part" | tee "$out/gpu-$part.log" | grep --line-buffered -E '^==|compiled in|^ *step|peak memory|^done|warning|[Ee]rror|passed|failed'
    done
done
