#!/usr/bin/env bash
# The campaign behind the table of the parts of ATLAS: bash results/factorial.sh [sweep | seeds]
# Ten hours on two cores. recall.py trains only what factorial.json lacks, so it can be stopped.
#
# sweep  learning rates on seed 1, and for Newton-Schulz also max_step
# seeds  seeds 2 to 5 at the best of the sweep, by 16 pairs
set -euo pipefail
run() {
    python3 recall.py mqar --threads 1 --pairs 4 8 12 16 --vocab 64 --seq-len 64 --steps 2400 \
        --json results/factorial.json "$@"
}

# about 500 numbers of fast weights and momentum in a layer
plain="deltanet,head_dim=11 gated-deltanet,head_dim=11 titans,head_dim=8
    omeganet,n_head=8,head_dim=4 atlas,head_dim=4,muon=none,window=1
    atlas,head_dim=4,muon=none,window=8 atlas-delta,head_dim=4"
newton="atlas,head_dim=4,muon=chunk,window=1 atlas,head_dim=4,muon=chunk,window=8
    atlas,head_dim=4,muon=token,window=1 atlas,head_dim=4,muon=token,window=8"
best="deltanet,head_dim=11,lr=0.01 gated-deltanet,head_dim=11,lr=0.005 titans,head_dim=8,lr=0.01
    omeganet,n_head=8,head_dim=4,lr=0.0025 atlas,head_dim=4,muon=none,window=1,lr=0.005
    atlas,head_dim=4,muon=none,window=8,lr=0.005 atlas-delta,head_dim=4,lr=0.005"

if [ "${1:-sweep}" = sweep ]; then
    for name in $plain $newton; do
        run --seeds 1 --model "$name",lr=0.005 "$name",lr=0.0025 "$name",lr=0.01
    done
    for name in $newton; do           # at the best learning rate so far
        run --seeds 1 --model "$name",lr=0.005,max_step=2.0
    done
else
    run --seeds 1 2 3 4 5 --model $best
fi
