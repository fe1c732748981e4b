#!/usr/bin/env bash
# From a folder of .jsonl to a sample: bash results/medium.sh CORPUS [170m | 340m]
#
# size   GPUs  tokens a step          steps   tokens  hours   GiB a GPU
# 170m   1     8 x 4,096 x 16         30,000  15.7 b  about 190     34
# 340m   8     4 x 4,096 x 4 x 8      30,000  15.7 b  about 95      36
#
# Hours are estimates from counted launches (H100, bfloat16: for 8 x 4,096 tokens a layer of 170m
# takes 117 ms to launch and 82 ms to compute); nobody has run this yet. Expect the loss to fall
# below 4 nats a token within 1,000 steps of warmup. A gradient norm that stays above 10 asks for a
# lower --lr. Ctrl-C finishes the step and saves; `--resume --out OUT` goes on, on as many GPUs as
# you like, as long as --grad-accum is a multiple of their number.
#
# On a CPU, offline, with small numbers: TOKENIZER=byte LENGTH=512 \\
#   FLAGS="--size tiny --steps 2 --batch-size 2" bash results/medium.sh CORPUS
set -euo pipefail
corpus=$1
size=${2:-170m}
tokenizer=${TOKENIZER:-gpt2}
flags="--size $size ${FLAGS:-}"
gpus=1
if [ "$size" = 340m ]; then gpus=8; fi

if [ ! -d tokens ]; then          # rows are joined, with an END between them
    python3 data.py --data "$corpus" --tokenizer "$tokenizer" --out tokens
fi
if [ "$gpus" = 1 ]; then
    python3 train.py $flags --data tokens --tokenizer "$tokenizer" --out "out-$size"
else
    torchrun --nproc-per-node "$gpus" train.py $flags --data tokens --tokenizer "$tokenizer" \
        --out "out-$size"
fi
python3 eval.py --ckpt "out-$size" --length "${LENGTH:-16384}" --plot             # by position
python3 sample.py --ckpt "out-$size" --prompt "The memory of" --tokens 200 --seed 1
