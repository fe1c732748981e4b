"""bench.py - how fast, on this machine: tokens/s, forward and backward.

    python bench.py                          short for bench.py layer
    python bench.py layer --plot             one layer with its projections, of several models,
                                             over length
    python bench.py rule                     the rule alone, over window, chunk, muon_every, shard
    python bench.py peers --minutes 3        the same work by attention and, if installed,
                                             titans-pytorch

Contestants take turns, three times, so a busy moment of the machine hits all of them. Speeds are
medians, and +- is the distance of the quartiles over the median. On CUDA layers are compiled, in
bfloat16 where that is native.
"""
import platform
import sys
from functools import partial
from importlib.util import find_spec

import torch
from torch.utils.benchmark import Measurement, Timer

import models
from common import (Parser, add_number, add_tasks, autocast, pick_dtype, picture, run_task, say,
                    with_task)

HEAD = 64
SMALL_HEAD = 16                       # in `layer`: 64 numbers have 2,145 monomials of degree 0 to 2
MLP = dict(memory="mlp", expansion=2, features="none", forget="zero")   # of `rule` and `peers`
RULES = [                             # window, chunk, muon_every (0: no Muon), shard
    (8, 64, 0, 0), (1, 64, 0, 0), (64, 64, 0, 0), (8, 16, 0, 0), (8, 256, 0, 0),
    (8, 64, 64, 0), (8, 64, 16, 0), (8, 64, 16, 256)]


def race(contestants, tokens, minutes):
    """Time contestants (columns, call) in turns, for about so long. A call reads so many tokens.
    Return a row for each contestant: its columns, speed and spread."""
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
    """Return what --json keeps: the machine and the rows."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    machine = dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__)
    return dict(machine=machine, records=rows)


def make_layer(device, width, head_dim=HEAD, **differences):
    """Return a layer of a model with these fields of models.Config, compiled on CUDA."""
    config = models.Config(n_embd=width, n_head=width // head_dim, head_dim=head_dim, **differences)
    layer = models.Block(config).layer.to(device)
    if device.type == "cuda":
        models.compile_chunks()
        if isinstance(layer, models.Attention):               # in a model its whole block is
            layer.compile()
    return layer


def both(layer, x):
    """Run a layer x (B, T, width) -> (y, ..) forward, and backward to x and all parameters."""
    dtype = pick_dtype("auto" if x.is_cuda else "float32", x.device)
    with autocast(x.device, dtype):
        y = layer(x)[0]
    leaves = [x, *layer.parameters()]
    torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)     # a peer has idle ones


def layer_task(args, device):
    """Time one layer with its projections, of several models, over length."""
    layers = {}
    for name in args.model:
        differences = models.sized(name, "tiny") | dict(head_dim=SMALL_HEAD, expansion=2)
        layers[name] = make_layer(device, args.width, **differences)
    rows = []
    for T in args.lengths:
        x = torch.randn(args.batch_size, T, args.width, device=device, requires_grad=True)
        contestants = [(dict(name=name, T=T), partial(both, layer, x))
                       for name, layer in layers.items()]
        rows += race(contestants, args.batch_size * T, args.minutes / len(args.lengths))
    lines = {}
    for name in layers:
        speeds = [row["tokens_per_s"] for row in rows if row["name"] == name]
        lines[name] = args.lengths, speeds
    picture(args.plot, lines, "sequence length [tokens]",
            "forward + backward of one layer [tokens/s]", log="xy")
    return results(device, rows)


def rule_call(args, device, muon_every, **differences):
    """Return a function that runs the rule over --length tokens, forward and backward."""
    layer = make_layer(device, args.width, **MLP, max_norm=0.0, muon=muon_every > 0,
                       muon_every=max(1, muon_every), **differences)
    x = torch.randn(args.batch_size, args.length, args.width, device=device)
    state = layer.start(x)
    with torch.no_grad():
        q, k, v, gates, _ = layer.project(x, state)
    leaves = [a.requires_grad_() for a in (q, k, v, *gates[:4])]
    leaves += [p for name, p in layer.named_parameters() if "M0" in name]

    def call():
        y, _ = layer.learn(q, k, v, gates, state.fast)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return call


def rule_task(args, device):
    """Time the rule alone, without projections, over its settings."""
    contestants = []
    for window, chunk, muon_every, shard in RULES:
        columns = dict(window=window, chunk=chunk, muon_every=muon_every, shard=shard)
        contestants.append((columns, rule_call(args, device, **columns)))
    return results(device, race(contestants, args.batch_size * args.length, args.minutes))


def peers_task(args, device):
    """Time attention, our layer with Titans' rule (which adds a window and a convolution), and
    titans-pytorch."""
    attention = make_layer(device, args.width, attention=True, attn_window=0)
    layers = [("attention", None, None, attention)]
    for chunk, muon in (64, False), (64, True), (16, False), (16, True):
        ours = make_layer(device, args.width, **MLP, chunk=chunk, muon=muon, muon_every=chunk)
        layers.append(("ours", chunk, muon, ours))
        if find_spec("titans_pytorch"):
            from titans_pytorch import MemoryMLP, NeuralMemory
            mlp = MemoryMLP(HEAD, depth=2, expansion_factor=2.0)      # as ours
            # its gradients move on every batch_size tokens
            theirs = NeuralMemory(
                dim=args.width, heads=args.width // HEAD, dim_head=HEAD, model=mlp,
                chunk_size=chunk, batch_size=chunk, momentum=True, spectral_norm_surprises=muon)
            layers.append(("titans-pytorch", chunk, muon, theirs.to(device)))
    x = torch.randn(args.batch_size, args.length, args.width, device=device, requires_grad=True)
    contestants = []
    for name, chunk, muon, layer in layers:
        columns = dict(name=name, chunk=chunk, newton_schulz=muon)
        contestants.append((columns, partial(both, layer, x)))
    return results(device, race(contestants, args.batch_size * args.length, args.minutes))


TASKS = dict(layer=layer_task, rule=rule_task, peers=peers_task)


def parse(argv=None):
    """Return the flags."""
    parser = Parser(prog="bench.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    tasks = add_tasks(parser, TASKS, plot=["layer"], threads=1)
    layer, rule, peers = tasks
    for task in tasks:
        add_number(task, "--minutes", 0.0, 2.0, "about so long")
        add_number(task, "--batch-size", 1, 1, "texts at a time")
        add_number(task, "--width", HEAD, 256, "width of the layer, a multiple of 64")
    usual = ["transformer", "titans", "omeganet", "atlas", "atlas-delta"]
    layer.add_argument("--model", nargs="+", choices=list(models.PRESETS), default=usual,
                       metavar="NAME", help="presets of models.py %(default)s")
    add_number(layer, "--lengths", 1, [256, 1024, 4096], "tokens of a text")
    for task in (rule, peers):
        add_number(task, "--length", 8, 2048, "tokens of a text")
    return parser.parse_args(with_task(argv, "layer"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
