#!/usr/bin/env bash
# The campaign behind recall.json: bash results/recall.sh PART, with a PART of those below; the
# hours are of one core. A run that recall.json has is not repeated, so a part can be stopped and
# begun again. Parts that run at once need files of their own: JSON=FILE bash results/recall.sh ..
set -euo pipefail
recall() { python3 recall.py "$@" --threads 1 --json "${JSON:-results/recall.json}"; }
mqar() { recall mqar --vocab 64 --seq-len 64 --pairs 4 8 12 16 "$@"; }
keys() { recall mqar --vocab 256 --seq-len 96 --pairs 8 16 24 --steps 2400 "$@"; }

# about 500 numbers of state in a layer: fast weights and momentum
delta=deltanet,head_dim=11
gated=gated-deltanet,head_dim=11
titans=titans,head_dim=8
omega=omeganet,n_head=8,head_dim=4
none1=atlas,head_dim=4,muon=none,window=1
none8=atlas,head_dim=4,muon=none,window=8
chunk1=atlas,head_dim=4,muon=chunk,window=1
chunk8=atlas,head_dim=4,muon=chunk,window=8
token1=atlas,head_dim=4,muon=token,window=1
token8=atlas,head_dim=4,muon=token,window=8
ours=atlas-delta,head_dim=4

case "${1:-}" in
sweep)                                    # six hours; seed 1
    for name in $delta $gated $titans $omega $none1 $none8 $chunk1 $ours; do
        mqar --steps 2400 --seeds 1 --model "$name",lr=0.005 "$name",lr=0.0025 "$name",lr=0.01
    done
    for name in $chunk8 $token1 $token8; do
        mqar --steps 2400 --seeds 1 --model "$name",lr=0.005 "$name",lr=0.01
    done
    mqar --steps 2400 --seeds 1 --model $chunk1,lr=0.01,max_step=2.0 $chunk8,lr=0.01,max_step=2.0 \
        $token8,lr=0.01,max_step=0.5 $chunk8,lr=0.02 $token8,lr=0.02 ;;
seeds)                                    # four hours; the best of the sweep
    mqar --steps 2400 --seeds 1 2 3 --model transformer,head_dim=8,lr=0.005 ttt,head_dim=11,lr=0.01
    mqar --steps 2400 --seeds 1 2 3 4 5 --model $delta,lr=0.01 $gated,lr=0.005 $titans,lr=0.01 \
        $omega,lr=0.0025 $none1,lr=0.005 $none8,lr=0.005 $chunk1,lr=0.01 $chunk8,lr=0.01 \
        $token1,lr=0.01 $token8,lr=0.01 $ours,lr=0.005 \
        atlas,head_dim=8,features=none,muon=none,window=8,lr=0.005 ;;
halves)                                   # one hour
    recall halves --steps 1200 --seeds 1 2 3 --model $delta,lr=0.01 $gated $titans,lr=0.01 \
        $omega,lr=0.0025 $none1 $none8 $chunk1,lr=0.01 $chunk8,lr=0.01 $token1,lr=0.01 \
        $token8,lr=0.01 $ours ;;
alike)                                    # one hour
    recall correlated --head-dim 4 --seeds 1 2 3 --model $delta,lr=0.01 $gated $titans,lr=0.01 \
        omeganet,n_head=8,lr=0.0025 atlas,muon=none,window=1 atlas,muon=none \
        atlas,muon=chunk,window=1,lr=0.01 atlas,muon=chunk,window=8,lr=0.01 atlas,window=1,lr=0.01 \
        atlas,lr=0.01 atlas-delta atlas,head_dim=8,features=none,muon=none \
        atlas,muon=none,max_step=0.5 atlas,muon=none,max_step=2.0 \
        ttt,head_dim=11,lr=0.01 ttt,head_dim=16,lr=0.01 \
        ttt-mlp,head_dim=8,expansion=2,max_step=2.0 ;;
keys)                                     # four hours
    keys --seeds 1 2 3 --model $ours $none8,lr=0.005 $token8,lr=0.01
    keys --seeds 1 2 --model $delta $delta,lr=0.01 $titans $titans,lr=0.01 $none1,lr=0.005 \
        deltanet,head_dim=8
    keys --seeds 1 --model deltanet,head_dim=16 atlas-delta,head_dim=5 atlas-delta,head_dim=7 \
        $token8,lr=0.005 ;;
wide)                                     # one hour; 1,440 numbers of fast weights
    mqar --steps 600 --seeds 1 2 3 4 5 --model atlas atlas-delta
    mqar --steps 600 --seeds 1 2 3 --model atlas,chunk=32 ;;
deep)                                     # one hour
    mqar --steps 600 --seeds 1 --model ttt,head_dim=16 ttt-mlp,expansion=1 ttt-mlp,expansion=2 \
        ttt-mlp ttt-mlp,expansion=1,max_step=2.0 ttt-mlp,expansion=2,max_step=2.0 \
        ttt-mlp,max_step=2.0 ttt-mlp,expansion=2,lr=0.0025 ttt-mlp,expansion=2,lr=0.01 \
        ttt-mlp,lr=0.0025 ttt-mlp,lr=0.01 ttt-mlp,expansion=2,lr=0.0025,max_step=2.0 \
        ttt-mlp,expansion=2,chunk=4 ttt,head_dim=16,max_step=2.0 moneta \
        atlas,memory=mlp,muon=none,expansion=4 atlas,memory=mlp,muon=chunk,expansion=4 atlas++
    mqar --steps 600 --seeds 1 2 3 --model ttt,head_dim=16,lr=0.01 \
        ttt-mlp,expansion=2,max_step=2.0 ;;
*)
    echo "name a part: sweep, seeds, halves, alike, keys, wide or deep" >&2
    exit 2 ;;
esac
