"""bench.py - how fast is it on this machine? In tokens/s, forward and backward.

    python bench.py                          short for bench.py layer
    python bench.py layer --size 170m        one layer of several models, with its projections, as
                                             train.py trains it, for several lengths of text
    python bench.py peers --minutes 3        our layer beside attention and, if installed,
                                             titans-pytorch

What is timed takes turns, three times, so that a busy moment of the machine hits all alike. A speed
is a median; after +- stands the distance of the quartiles, as a share of the median. On CUDA,
layers are compiled, and compute in bfloat16 if the GPU has it.
"""
import platform
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from common import (Parser, add_number, add_tasks, autocast, pick_dtype, picture, run_task, say,
                    with_task)

import torch
from torch.utils.benchmark import Measurement, Timer

import models

HEAD = 64                             # width of a head in `peers`


def race(contestants, tokens, minutes):
    """Time functions in turns, for about so many minutes in all. contestants: a list of (columns,
    call), where columns is a dict that names the contestant, and call() reads `tokens` tokens.
    Print and return a row for each contestant: its columns, speed and spread."""
    threads = torch.get_num_threads()
    a_turn = 60 * minutes / 3 / len(contestants)
    timers = [Timer("call()", globals=dict(call=call), num_threads=threads)
              for _, call in contestants]
    turns = []
    for _ in range(3):
        turns.append([timer.blocked_autorange(min_run_time=a_turn) for timer in timers])

    rows = []
    for i, (columns, _) in enumerate(contestants):
        found = Measurement.merge(turn[i] for turn in turns)[0]
        speed = tokens / found.median
        spread = found.iqr / found.median
        rows.append(dict(columns, tokens_per_s=speed, spread=spread))
        words = "  ".join(f"{name} {a!s:14}" for name, a in columns.items())
        say(f"{words}{speed:12,.0f} tokens/s +- {spread:.1%}")
    return rows


def results(device, rows):
    """Return what the file of --json keeps: the machine and the rows."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    machine = dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__)
    return dict(machine=machine, records=rows)


def make_layer(device, config):
    """Return the layer of a models.Config. On CUDA it is compiled, as train.py does it."""
    model = models.LM(replace(config, n_layer=1)).to(device)
    layer = model.blocks[0].layer
    if device.type == "cuda":
        model.compile_memory()
        if isinstance(layer, models.Attention):               # LM compiles the block around it
            layer.compile()
    return layer


def both(layer, x):
    """Run layer(x) -> (y, ..) forward, x (B, T, width), and backward to x and all parameters."""
    if x.is_cuda and hasattr(layer, "config"):                # titans-pytorch has none
        models.set_precision(layer.config)
    dtype = pick_dtype("auto" if x.is_cuda else "float32", x.device)
    with autocast(x.device, dtype):
        y = layer(x)[0]

    # allow_unused: titans-pytorch has parameters that y does not depend on
    leaves = [x, *layer.parameters()]
    torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)


def layer_task(args, device):
    """Time one layer of several models, with its projections, for several lengths of text."""
    configs = {name: models.configure(name, args.size) for name in args.model}
    layers = {name: make_layer(device, config) for name, config in configs.items()}
    width = models.configure(size=args.size).n_embd

    rows = []
    for T in args.lengths:
        x = torch.randn(args.batch_size, T, width, device=device, requires_grad=True)
        contestants = [(dict(name=name, T=T), partial(both, layer, x))
                       for name, layer in layers.items()]
        rows += race(contestants, args.batch_size * T, args.minutes / len(args.lengths))

    lines = {}
    for name in layers:
        speeds = [row["tokens_per_s"] for row in rows if row["name"] == name]
        lines[name] = args.lengths, speeds
    yield results(device, rows)
    picture(args.plot, lines, "sequence length [tokens]",
            "forward + backward of one layer [tokens/s]", log="xy")


def peers_task(args, device):
    """Time attention, our layer with Titans' rule, to which it adds a window and a convolution, and
    titans-pytorch if it is installed. Newton-Schulz at each token, which only ours has, is timed
    with a matrix."""
    wide = partial(models.Config, n_embd=args.width, n_head=args.width // HEAD, head_dim=HEAD)
    attention = make_layer(device, wide(attention=True, attn_window=0))
    layers = [("attention", None, None, None, attention)]
    for memory, chunk, muon in (("mlp", 64, "none"), ("mlp", 64, "chunk"), ("mlp", 16, "none"),
                                ("mlp", 16, "chunk"), ("linear", 16, "token")):
        config = wide(memory=memory, expansion=2, chunk=chunk, muon=muon, features="none",
                      forget="zero")
        ours = make_layer(device, config)
        layers.append(("ours", memory, chunk, muon, ours))
        if memory == "mlp" and find_spec("titans_pytorch"):
            from titans_pytorch import MemoryMLP, NeuralMemory
            mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)      # as ours
            # its gradients move on every batch_size tokens
            theirs = NeuralMemory(
                dim=args.width, heads=args.width // HEAD, dim_head=HEAD, model=mlp,
                chunk_size=chunk, batch_size=chunk, momentum=True,
                spectral_norm_surprises=muon == "chunk")
            layers.append(("titans-pytorch", memory, chunk, muon, theirs.to(device)))

    x = torch.randn(args.batch_size, args.length, args.width, device=device, requires_grad=True)
    contestants = []
    for *row, layer in layers:
        columns = dict(zip(("name", "memory", "chunk", "muon"), row))
        contestants.append((columns, partial(both, layer, x)))
    yield results(device, race(contestants, args.batch_size * args.length, args.minutes))


TASKS = dict(layer=layer_task, peers=peers_task)


def parse(argv=None):
    """Return the flags."""
    parser = Parser(prog="bench.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    tasks = add_tasks(parser, TASKS, plot=["layer"], threads=1)
    layer, peers = tasks
    for task in tasks:
        add_number(task, "--minutes", 0.0, 2.0, "how long to measure, about")
        add_number(task, "--batch-size", 1, 1, "texts at a time")
    usual = ["transformer", "titans", "omeganet", "atlas", "atlas-delta"]
    layer.add_argument("--model", nargs="+", choices=list(models.PRESETS), default=usual,
                       metavar="NAME", help="presets of models.py %(default)s")
    layer.add_argument("--size", choices=list(models.SIZES), default="tiny",
                       help="size of the model that the layer is of %(default)s")
    add_number(layer, "--lengths", 1, [256, 1024, 4096], "tokens of a text")
    add_number(peers, "--length", 8, 2048, "tokens of a text")
    add_number(peers, "--width", HEAD, 256, "width of the layer, best a multiple of 64")
    return parser.parse_args(with_task(argv, "layer"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
