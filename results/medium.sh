#!/usr/bin/env bash
# From a folder of .jsonl to a sample. On one GPU of 80 GB, and on eight:
#
#   FLAGS=--graph bash results/medium.sh CORPUS 170m
#   bash results/medium.sh CORPUS 340m
#
# size   GPUs  tokens a step          steps   tokens  hours   with --graph  GiB a GPU
# 170m   1     8 x 4,096 x 16         30,000  15.7 b  about 170   about 115     34
# 340m   8     4 x 4,096 x 4 x 8      30,000  15.7 b  about 85    (refused)     36
#
# Hours are estimates from counted launches (H100, bfloat16: for 8 x 4,096 tokens a layer of 170m
# takes 106 ms to launch and 67 ms to compute); nobody has run this yet. Expect the loss to fall
# below 4 nats a token within 1,000 steps of warmup. A gradient norm that stays above 10 asks for a
# lower --lr. Ctrl-C finishes the step and saves; `--resume --out OUT` goes on, on as many GPUs as
# you like, as long as --grad-accum is a multiple of their number.
#
# First try it on a CPU, offline: SMOKE=1 bash results/medium.sh. This takes two steps of the real
# 170m, with a byte vocabulary, on short texts of its own code, in ten minutes and 8 GB of memory.
set -euo pipefail
corpus=${1:-smoke.txt}
size=${2:-170m}
tokenizer=gpt2
flags=${FLAGS:-}
positions="--length 16384 --plot"     # of eval.py
tokens=200                            # of the sample
gpus=1
if [ "$size" = 340m ]; then gpus=8; fi
if [ "${SMOKE:-}" ]; then
    head -c 15000 chunks.py omega.py layer.py train.py > smoke.txt
    tokenizer=byte
    flags="--device cpu --steps 2 --batch-size 1 --grad-accum 2 --seq-len 640"
    positions="--length 1024 --stream 0"
    tokens=5
    size=smoke
fi

out=out-$size
shards=tokens-$size
if [ ! -d "$shards" ]; then           # rows are joined, with an END between them
    python3 data.py --data "$corpus" --tokenizer "$tokenizer" --out "$shards"
fi
settings="--size ${size/smoke/170m} --data $shards --tokenizer $tokenizer --out $out $flags"
if [ "$gpus" = 1 ]; then
    python3 train.py $settings
else
    torchrun --nproc-per-node "$gpus" train.py $settings
fi
python3 eval.py --ckpt "$out" $positions                              # loss by position
python3 sample.py --ckpt "$out" --prompt "The memory of" --tokens "$tokens" --seed 1
