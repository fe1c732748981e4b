"""The training runs of gpu.sh as a table: tokens/s, over the transformer's of that length, and FLOP/s as a share of a large product's (MFU).

    python results/gpu_table.py results                       the folder with gpu-*.log, and bench-step-*.json for the product

FLOPs are bench.step_flops: of forward and backward, --remat's second forward not among them; attention as T x T, twice what a causal kernel has to
compute. The best transformer of a length is what all are compared with.
"""
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

import bench
import models


def network(text):
    """What train.py says of a network -> models.Config; in float32, for the meta device has no autocast, and FLOPs are as many."""
    values = {}
    for f in fields(models.Config):
        value = re.search(rf"\b{f.name} ([^ ,]+)", text)[1]
        values[f.name] = value == "True" if f.type is bool else f.type(value)
    return models.Config(**values | dict(memory_dtype="float32", ns_dtype="float32"))


def runs(log):
    """-> of each run in a log: its name with its flags, tokens/s of its last line, tokens a sequence, its Config."""
    for part in re.split(r"^== ", log, flags=re.M)[1:]:
        name, text, speed = part.splitlines()[0], " ".join(part.split()), re.findall(r"([\d,]+) tokens/s", part)
        told = re.search(r" run model .*? network (.*?) device ", text)
        if told and speed:
            name += ", NOT RECORDED" * ("no CUDA graph" in text)
            yield name, int(speed[-1].replace(",", "")), int(re.search(r"\bseq_len (\d+)", text)[1]), network(told[1])


def main(folder):
    folder = Path(folder)
    found = [(path.stem, *run) for path in sorted(folder.glob("gpu-*.log")) for run in runs(path.read_text())]
    steps = [r for path in folder.glob("bench-step-*.json") for r in json.loads(path.read_text())["records"]]
    product = max((r["product_flops_per_s"] for r in steps if "product_flops_per_s" in r), default=float("nan"))
    best = {}
    for *_, speed, T, config in found:
        if config.mixer == "attention" and not config.attn_window:
            best[T] = max(speed, best.get(T, 0))
    print(f"a large product: {bench.short(product)}FLOP/s\n\n| run | tokens/s | over the transformer's | MFU |\n|---|---|---|---|")
    for stem, name, speed, T, config in found:
        rate = speed * bench.step_flops(config, T, torch.device("meta")) / T
        over = f"{speed / best[T]:.2f}" if T in best else "-"
        print(f"| {stem}: {name} | {speed:,} | {over} | {100 * rate / product:.0f} % |")


if __name__ == "__main__":
    main(*sys.argv[1:])
