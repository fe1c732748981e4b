"""eval.py - what a model has learned: its loss on a text, a stream without end, its memory at work.

    python eval.py --ckpt out            short for eval.py loss: the validation loss, with the
                                         memory reset and carried on; the loss by position, with the
                                         memory writing and frozen; then the loss of a long stream.
                                         The exit code is 1 if a loss is not finite or the state
                                         grows
    python eval.py loss --ckpt out omega --stream 0 --plot     several checkpoints in one picture
    python eval.py probe --ckpt out --plot                     gates and inner losses of each layer

Two tasks show the bare rule, and need no checkpoint:

    python eval.py circle --plot       a memory bends to pairs on a circle, token by token
    python eval.py online              what window, momentum and Newton-Schulz bring, untrained
"""
import copy
import itertools
import math
import sys

from common import (Halt, Parser, UserError, add_number, add_tasks, picture, run_task,
                    save_figure, say, seeded, with_task)

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import data
import memory
import models
import omega
import train


WINDOWS = 32                              # of the loss by position
COLLAPSED = 0.02                          # below it a memory is idle, or its gate stands still


# ---- a checkpoint and its text
def load(path, args, device):
    """Return the dict of a checkpoint, its model and tokenizer, and the Corpus of --data with its
    validation tokens."""
    ckpt = train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    corpus = train.read_text(args.data or ckpt["train"]["data"], ckpt)
    _, val = corpus.splits(tokenizer, 1)
    return ckpt, model.to(device), tokenizer, corpus, val


def frozen(module):
    """Return a copy of a model or layer whose memory stays at M0."""
    module = copy.deepcopy(module)
    module.config.max_step = 0.0          # no step is longer, so nothing is written
    module.config.keep = False            # and nothing of M0 is forgotten
    return module


# ---- loss
def evenly(ids, length, batch_size):
    """Yield batches x, y of whole windows of ids, evenly spaced, about WINDOWS windows in all."""
    whole = (len(ids) - 1) // length
    every = max(1, whole // WINDOWS)
    return data.windows(ids[: whole * length + 1], length, batch_size, every)


@torch.no_grad()
def position_loss(model, batches):
    """Return the mean loss in nats at each position, (T,), over all texts of batches x, y (B, T),
    and the number of texts."""
    device = next(model.parameters()).device
    losses = []
    for x, y in batches:
        logits, _ = model(x.to(device))
        losses.append(F.cross_entropy(logits.mT.float(), y.to(device), reduction="none"))
    losses = torch.cat(losses).double().cpu()
    return losses.mean(0), len(losses)


def buckets(at):
    """Cut positions 0 .. len(at) - 1 into [0, 16), [16, 32), [32, 64), .. and return a list of
    [first, end, mean of the values `at` these positions]."""
    found, first, end = [], 0, 16
    while first < len(at):
        found.append([first, min(end, len(at)), at[first:end].mean().item()])
        first, end = end, 2 * end
    return found


def curve(at):
    """Return a line for `picture`: the middles of the buckets, and their means."""
    found = buckets(at)
    return [(first + end) / 2 for first, end, _ in found], [mean for _, _, mean in found]


def loss_task(args, device):
    """Print the losses of checkpoints, also by position, with the memory writing and frozen. The
    exit code is 1 if a loss is not finite or the state grows."""
    lines = {}
    for path in args.ckpt:
        ckpt, model, tokenizer, corpus, val = load(path, args, device)
        T = ckpt["train"]["seq_len"]
        say(f"{path}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, "
            f"trained on {ckpt['data']['used']} in windows of {T}")
        say(f"{len(val):,} validation tokens of {corpus.used}")
        loss = train.report(model, tokenizer, val, T, args.batch_size)
        readers = {path: model}
        if not model.config.attention:
            readers[f"{path}, frozen at M0"] = frozen(model)
        length = min(args.length or 4 * T, len(val) - 1)
        for name, reader in readers.items():
            at, n = position_loss(reader, evenly(val, length, args.batch_size))
            say(f"\n{name}: by position, mean of {n} windows of {length}; trained on {T}")
            say("  tokens before   nats/token")
            for first, end, mean in buckets(at):
                say(f"  {first + 1:6d} - {end:6d}   {mean:.4f}")
            if not math.isfinite(loss + at.sum()):
                raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
            lines[name] = curve(at)
        if args.stream:
            stream(model, val, args.stream)
    yield lines
    picture(args.plot, lines, "tokens before", "loss [nats/token]", log="x",
            marked=(T, "longest text in training"))


# ---- a stream without end
def state_bytes(state):
    """Return the bytes of all tensors in a state."""
    return sum(a.nbytes for a in tree_leaves(state) if isinstance(a, torch.Tensor))


@torch.inference_mode()
def stream(model, ids, n):
    """Read about n tokens in one stream, ids over and over, and carry the state on. Print the mean
    loss and the size of the state about ten times. Raises Halt if the loss is not finite or the
    state grows."""
    c = model.config
    device = next(model.parameters()).device
    piece = math.ceil(1024 / c.period()) * c.period()     # whole chunks: else sizes vary
    length = math.ceil(n / piece) * piece + 1
    ids = data.Joined([ids] * math.ceil(length / len(ids)))[:length]

    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  state bytes")
    state, total, seen, sizes = None, 0.0, 0, []
    for x, y in data.streams(ids, piece, 1):
        logits, state = model(x.to(device), state)
        total += F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        seen += y.numel()
        if not math.isfinite(total):
            raise Halt(f"the loss is {total} after {seen:,} tokens of the stream")
        if 10 * seen >= (len(sizes) + 1) * n:             # another tenth
            sizes.append(state_bytes(state))
            say(f"  {seen:9,}  {total / seen:10.4f}  {sizes[-1]:11,}")

    growth = sizes[-1] / max(1, *sizes[:2]) - 1           # by the second line all buffers are full
    if growth > 0.05 and not models.holds_all(c):         # a transformer's state has to grow
        raise Halt(f"the state grows with the stream: {growth:+.1%} since the second line")


# ---- watching a memory at work
def watch(layer, x, state=None):
    """Return the gates and inner losses of each token while a layer.Memory reads its inputs
    x (B, T, n_embd): a dict of tensors (B, H, T), whose names `probe` explains."""
    fresh = layer.start(x)
    state = state or fresh
    _, k, v, gates, _ = layer.project(x, state)

    # before: the answers M(k_t; W_{t-1}). The queries of `learn` read W_t, after the write, so its
    # query t is the key of t + 1, and the answers move by one. The first key is asked of `state`
    after, _ = layer.learn(k.roll(-1, 2), k, v, gates, state.fast)
    first = layer.recall(k[:, :, :1], layer.frozen(state))
    before = torch.cat([first, after[:, :, :-1]], 2)
    untaught = layer.recall(k, layer.frozen(fresh))           # the answers of M0

    found = gates._asdict()
    found["gate"] = gates.gate.sum(-1)
    found["opened"] = gates.step / layer.most(gates.momentum)
    found["surprise"] = memory.loss(layer.config.loss, before, v)
    found["untaught"] = memory.loss(layer.config.loss, untaught, v)
    return {name: a for name, a in found.items() if a is not None}


@torch.no_grad()
def probe(model, tokens):
    """Watch the memories while the model reads tokens (B, T), the beginning of a text. Return a
    list with a dict of tensors for each layer:

        keep, step, momentum, gate   (B, H, T); gate is the sum over the window
        opened      (B, H, T)        the step as a share of its bound
        surprise    (B, H, T)        the inner loss of a pair at the memory before it:
                                     l(M(phi(k_t); W_{t-1}), v_t)
        untaught    (B, H, T)        the same at M0
        written     (B, H)           |W - M0| after the last token
        share       ()               |o - o'| / |o|, where o is the output of the layer, and o' its
                                     output if its memory cannot write
        attn_gate   (B, n_embd, T)   MAG and MAC only: the attention gate, sigmoid(norm(M(..)))
    """
    calls = {}                            # module: inputs and output of each of its calls

    def note(module, inputs, output):
        calls.setdefault(module, []).append((inputs, output))

    with register_module_forward_hook(note):
        model(tokens)

    found = []
    for block in model.blocks:
        layer = block.layer
        inside = getattr(layer, "memory", layer)          # the Memory, also inside of a Wiring

        # the gates and inner losses; MAC calls its memory for one segment after the other
        seen = [watch(inside, *inputs[:2]) for inputs, _ in calls[inside]]
        at = {}
        for name in seen[0]:
            joined = torch.cat([a[name] for a in seen], -1)
            at[name] = joined[..., -tokens.shape[1]:]     # the persistent tokens come first

        # what was written, from the state after the last call
        _, (_, state) = calls[inside][-1]
        W = inside.frozen(state)
        M0 = inside.frozen(state, tokens[:, 0] >= 0)      # reset is True for all rows
        at["written"] = torch.cat([(w - m).flatten(2) for w, m in zip(W, M0)], 2).norm(dim=2)

        # what the writes change in the output of the layer
        (x, *_), (o, _) = calls[layer][0]
        change = o - frozen(layer)(x)[0]
        at["share"] = change.norm() / o.norm().clamp_min(torch.finfo(o.dtype).tiny)

        if model.config.wiring in ("mag", "mac"):
            normed = torch.cat([output for _, output in calls[layer.m_norm]], 1)
            at["attn_gate"] = normed.sigmoid().mT
        found.append(at)
    return found


def probe_task(args, device):
    """Print and draw what each layer of a checkpoint does with its memory while it reads a text."""
    ckpt, model, _, _, ids = load(args.ckpt, args, device)
    if model.config.attention or model.config.shard:
        raise UserError(f"probe: {ckpt['path']} has no memory, or one in shards "
                        f"({ckpt['preset']}); give another --ckpt")

    ids = ids[: args.length or ckpt["train"]["seq_len"]]
    tokens = torch.as_tensor(ids).long()[None]
    found = probe(model, tokens.to(device))

    say(f"{ckpt['path']}: {ckpt['preset']}, step {ckpt['step']}, over {len(ids)} tokens: "
        "mean +- standard deviation\n")
    say("         layer" + "".join(f"{i + 1:>18}" for i in range(len(found))))
    for name in found[0]:
        cells = [f"{at[name].mean():>10.4f} +-{at[name].std(correction=0):6.3f}" for at in found]
        say(f"{name:>14}" + "".join(cells))

    kept, lines = [], {}
    for i, at in enumerate(found, 1):
        gate = at.get("attn_gate")
        if gate is not None and min(gate.std(-1, correction=0).mean(), at["share"]) < COLLAPSED:
            say(f"warning: layer {i}: its memory is idle, or the gate stands still; train with "
                "a narrower --attn-window, --memory-floor or --polarise")

        # means over rows and heads, of each token where there are tokens
        at = {name: a.mean((0, 1)) if a.dim() == 3 else a.mean() for name, a in at.items()}
        for name in "surprise", "untaught", "opened":
            lines[f"layer {i}: {name}"] = curve(at[name])
        kept.append({name: a.tolist() for name, a in at.items()})
    yield dict(layers=kept)
    picture(args.plot, lines, "tokens before", "mean of all heads", log="x")


# ---- the rule by itself
STEPS = torch.logspace(-3, 1.5, 25)       # constant inner steps that are tried
MOMENTUM = 0.5                            # where there is one
DRAWS, SEED = 32, 1337
READINGS = 3                              # of the pairs of `circle`
SHOWN = 24                                # the draw in its picture. The first numbers of 7 values
                                          # have about the mean errors there
RULES = [                                 # window, is there momentum?, muon
    (1, False, "none"),                                                      # DeltaNet
    (8, False, "none"),                                                      # OmegaNet
    (8, True, "none"),
    (8, True, "token"),                                                      # ATLAS
    (8, False, "token"),
    (1, True, "none")]                                                       # Titans


def plain_layer(device, window, momentum, muon, **more):
    """Return an untrained layer.Memory with these settings that learns at each token, and a name
    for its rule. momentum: is there one? muon: "none" or "token"."""
    config = models.configure("atlas", chunk=1, max_norm=0.0, window=window, momentum=momentum,
                              muon=muon, n_head=len(STEPS), **more)
    name = f"window {window}"
    if momentum:
        name += ", momentum"
    if muon == "token":
        name += ", Newton-Schulz"
    return models.Memory(config).to(device), name


def draw_pairs(n, dim, device, correlated=False):
    """Return keys and values (DRAWS, 1, n, dim) of random directions and length 1. If correlated,
    coordinate i of the keys is divided by i before they get their length."""
    pairs = torch.randn(2, DRAWS, 1, n, dim, generator=seeded(SEED))
    if correlated:
        pairs[0] /= torch.arange(1, dim + 1)
    return F.normalize(pairs, dim=-1).to(device)


@torch.no_grad()
def one_pass(layer, q, k, v):
    """Write pairs k, v (B, 1, T, D) once by the rule of the layer (Eq 9, 33, 32) with constant
    gates: nothing is forgotten, and all pairs of a window weigh the same. Each head takes another
    step of STEPS. Return for each step the mean |M(k) - v|^2 of all pairs, where M is the memory
    after the last pair; inf if it diverges. Return also what queries q (B, 1, T or 1, D) read
    after each token: (B, H, T, D)."""
    c = layer.config
    q, k, v, step = torch.broadcast_tensors(q, k, v, STEPS.to(k)[:, None, None])
    step = step[..., 0]
    ones = torch.ones_like(step)
    momentum = MOMENTUM * ones if c.momentum else None
    gate = ones.new_full((*ones.shape, c.window), 1 / c.window)
    gates = omega.Gates(ones, step, momentum, gate)

    state = layer.start(k)
    y, fast = layer.learn(q, k, v, gates, state.fast)
    errors = layer.recall(k, layer.frozen(state._replace(fast=fast))) - v
    return errors.square().sum(-1).mean((0, 2)).nan_to_num(math.inf), y


def online_task(args, device):
    """Print how well an untrained rule stores pairs in one pass, with and without window, momentum
    and Newton-Schulz, for two kinds of keys."""
    say(f"mean |M(k) - v|^2 / |v|^2 of {DRAWS} x N pairs, for one pass with the best of "
        f"{len(STEPS)} steps\n")
    say(f"{'N':58}" + "".join(f"{n:7d}" for n in args.pairs))
    lines = {}
    for kind in "independent", "correlated":
        drawn = [draw_pairs(n, 32, device, kind == "correlated") for n in args.pairs]
        for rule in RULES:
            layer, name = plain_layer(device, *rule, head_dim=32, features="none")
            errors = [one_pass(layer, k, k, v)[0].min().item() for k, v in drawn]
            name = f"{kind} keys, {name}"
            say(f"{name:58}" + "".join(f"{error:7.2f}" for error in errors))
            lines[name] = args.pairs, errors
    yield lines


# ---- the rule on a circle
def on_circle(degrees):
    """Return the points of a circle at these angles: (N,) -> (N, 2)."""
    return torch.view_as_real((1j * degrees.deg2rad()).exp())


def circle_task(args, device):
    """Print and draw how an untrained memory bends to pairs whose keys go around a circle, for
    monomials of degree 1, 2 and 3. Degree p can fit 2 p + 1 pairs (Prop 2)."""
    # keys and values (DRAWS, 1, READINGS N, 2): the same pairs at each turn
    N = args.pairs
    _, v = draw_pairs(N, 2, device)
    v = v.repeat(1, 1, READINGS, 1)
    at = torch.arange(READINGS * N) * (360 / N)
    k = on_circle(at).to(v).expand_as(v)
    around = torch.linspace(0, 360, 91)
    q = on_circle(around).to(v)[:, None, None]            # (91, 1, 1, 2): all of it at each token

    say(f"mean |M(k) - v|^2 / |v|^2 of {DRAWS} x {N} pairs, read {READINGS} times, with the best "
        f"of {len(STEPS)} steps")
    curves = {}
    for rule, degree in itertools.product(RULES[:4], (1, 2, 3)):
        layer, name = plain_layer(device, *rule, head_dim=2, degree=degree)
        errors, _ = one_pass(layer, k, k, v)
        best = errors.argmin()
        _, y = one_pass(layer, q, k[SHOWN], v[SHOWN])
        name += f"\ndegree {degree}: error {errors[best]:.2f}"
        say(name.replace("\n", ", "))
        curves[name] = y[:, best, :, 0].T.tolist()
    yield curves
    if args.plot:
        draw_curves(args.plot, curves, around, at[:N], v[SHOWN, 0, :N, 0].tolist())


def draw_curves(path, curves, around, at, dots):
    """Draw small pictures, three in a row, with dots at the angles `at`. curves: {name: a list of
    numbers over the angles `around`, one list after each token}."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 7), layout="constrained")
    grid = figure.subplots(len(curves) // 3, 3, sharex=True, sharey=True)
    for axes, (name, ys) in zip(grid.flat, curves.items()):
        for n in 2, 4, 8:
            axes.plot(around, ys[n - 1], "C0", linewidth=0.7, alpha=0.3 + n / 16)
        axes.plot(around, ys[-1], "C0", linewidth=2)
        axes.plot(at, dots, "ok")
        rule, title = name.split("\n")
        axes.set_title(title, fontsize=9)
        if axes in grid[:, 0]:
            axes.set_ylabel(rule.replace(", ", "\n"), fontsize=9)
    figure.supxlabel("angle of the key; dots: first number of each value; curves: that of M,\n"
                     "thin: after token 2, 4, 8; thick: after the last", fontsize=9)
    save_figure(path, figure)


TASKS = dict(loss=loss_task, probe=probe_task, circle=circle_task, online=online_task)


def parse(argv=None):
    parser = Parser(prog="eval.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    loss, probe, circle, online = add_tasks(parser, TASKS, plot=("loss", "probe", "circle"))
    where = "checkpoint file, or folder with best.pt or ckpt.pt [out]"
    loss.add_argument("--ckpt", nargs="+", default=["out"], help=where)
    probe.add_argument("--ckpt", default="out", help=where)
    for task in loss, probe:
        task.add_argument("--data", help="text; only its last tenth is read [the training's]")
    add_number(loss, "--batch-size", 1, 8, "texts at a time")
    add_number(loss, "--length", 0, 0, "longest window; 0: 4 times training's")
    add_number(loss, "--stream", 0, 50_000, "tokens of the stream; 0: none")
    add_number(probe, "--length", 0, 0, "tokens to read; 0: as training's windows")
    add_number(circle, "--pairs", 3, 7, "number of pairs")
    add_number(online, "--pairs", 1, [8, 16, 32], "numbers of pairs")
    return parser.parse_args(with_task(argv, "loss"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
