#!/usr/bin/env bash
# Everything that needs a GPU, one command, from the project's root: bash results/gpu.sh [folder for the logs]
set -uo pipefail
out=${1:-results}
export PYTHONUNBUFFERED=1
python3 -m pytest -q test_all.py 2>&1 | tee "$out/gpu-tests.log" | tail -3
python3 bench.py --device cuda --json "$out/bench-cuda.json" 2>&1 | tee "$out/gpu-bench.log" | grep -v '^{'
for model in transformer omeganet atlas; do                   # bfloat16 + compile (the default there) against float32 eager
    python3 train.py --model $model --device cuda --data pydoc --steps 100 --out "$out/gpu-$model-bf16" 2>&1 | tee "$out/gpu-$model-bf16.log" | tail -1
    python3 train.py --model $model --device cuda --data pydoc --steps 100 --dtype float32 --no-compile --out "$out/gpu-$model-fp32" 2>&1 \
        | tee "$out/gpu-$model-fp32.log" | tail -1
done
for chunk in 64 128 256; do                                   # the 340m shape, tokens/s in the progress lines
    for model in omeganet atlas titans linear transformer; do
        python3 train.py --model $model --size 340m --device cuda --data pydoc --tokenizer byte --batch-size 4 --grad-accum 1 --steps 20 \
            --eval-every 20 --eval-windows 1 --log-every 5 --chunk $chunk --muon-every $chunk --out "$out/gpu-340m" 2>&1 \
            | tee "$out/gpu-340m-$model-$chunk.log" | grep "^step" | tail -1
    done
done
rm -rf "$out"/gpu-*-bf16 "$out"/gpu-*-fp32 "$out"/gpu-340m
