#!/usr/bin/env bash
# From a folder of .jsonl to a sample: bash results/medium.sh CORPUS [170m | 340m]. Hours are estimates from counted
# launches and bytes (H100, bfloat16, 12 layers x 142 ms and the head for 8 x 4,096 tokens); nobody has run this yet.
#
# size   GPUs  tokens a step          steps   tokens  hours   GiB a GPU
# 170m   1     8 x 4,096 x 16         30,000  15.7 b  about 235     42
# 340m   8     4 x 4,096 x 4 x 8      30,000  15.7 b  about 115     43
#
# Expect the loss to fall below 4 nats a token within 1,000 steps of warmup; a gradient norm that stays above 10 asks
# for a lower --lr. Ctrl-C finishes the step and saves; `--resume --out OUT`, on as many GPUs as you like, goes on.
# --grad-accum stays a multiple of the number of GPUs.
set -euo pipefail
corpus=$1 size=${2:-170m}
gpus=$([ "$size" = 170m ] && echo 1 || echo 8)
[ -d tokens ] || python3 data.py --data "$corpus" --tokenizer gpt2 --out tokens   # rows joined, an END between them
run="train.py --size $size --data tokens --tokenizer gpt2 --out out-$size"
if [ "$gpus" = 1 ]; then python3 $run; else torchrun --nproc-per-node "$gpus" $run; fi
python3 eval.py --ckpt "out-$size" --length 16384 --plot                           # loss by position
python3 sample.py --ckpt "out-$size" --prompt "The memory of" --tokens 200 --seed 1
