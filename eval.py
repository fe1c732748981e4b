"""eval.py - what a model has learned: its loss on a text, a stream without end, its memory at work; and the bare rule.

    python eval.py --ckpt out                      validation loss, memory reset and carried, and by position; then
                                                   50,000 tokens in one stream: exit code 1 on NaN or growing memory
    python eval.py --ckpt out omega --plot         loss by position of several, with and without writes, drawn
    python eval.py --ckpt out --no-write           the same with a memory that may not write: what does it bring?
    python eval.py --task probe --ckpt out --plot  gates, writes and surprise of each layer over a text
    python eval.py --task online                   what window, momentum and Newton-Schulz bring, untrained
    python eval.py --task capacity --plot          how many pairs features can hold, and how many one pass stores
    python eval.py --task mixing --plot            the matrix P of one chunk, beside a causal softmax

recall.py trains small models on synthetic tasks. --plot needs matplotlib.
"""
import itertools
import json
import math
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F

import data
import memory
import models
import omega
import train
from common import Halt, Parser, UserError, add_device, add_flags, at_least, exit_code, need, picture, save, say, setup


# ---- a checkpoint and its text

def load(path, device, no_write=False):
    """Return the dict of a checkpoint, its model in eval mode, its tokenizer. no_write: the memory stays at M0."""
    ckpt = train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    if no_write:
        if model.config.attention:
            raise UserError(f"--no-write: {ckpt['path']} has no memory that writes ({ckpt['preset']}); drop the flag")
        model.config.max_step, model.config.keep = 0.0, False    # the bound of all inner steps; M0 is not forgotten
    return ckpt, model.to(device).eval(), tokenizer


@torch.no_grad()
def position_loss(model, ids, length, batch_size, n_windows):
    """Return the mean nats at each position (length,) of about n_windows evenly spaced windows, and their number."""
    device, whole = next(model.parameters()).device, (len(ids) - 1) // length
    total, n = torch.zeros(length, dtype=torch.float64), 0
    every = max(1, whole // n_windows)
    if every == 1:                                            # whole windows only; with more the last one is whole
        ids = ids[: whole * length + 1]
    for x, y in data.windows(ids, length, batch_size, every):
        total += F.cross_entropy(model(x.to(device))[0].mT.float(), y.to(device), reduction="none").sum(0).cpu()
        n += len(x)
    return total / n, n


COLLAPSED = 0.02                          # share of an idle memory, or spread of an attention gate that stands still


def buckets(length):
    """Return [0, 16), [16, 32), [32, 64), ... up to length."""
    edges = [0, *(16 * 2**i for i in range(60) if 16 * 2**i < length), length]
    return list(zip(edges, edges[1:]))


def text_task(args, device):
    """Print all losses of each checkpoint. Raises Halt where one is not finite."""
    lines = {}
    for path in args.ckpt:
        ckpt, model, at, n = text_losses(path, args, device)
        name = f"{models.title(ckpt['preset'])}, {ckpt['step']} steps"
        name += f" ({ckpt['path']})" if name in lines else ""
        lines[name + ", may not write" * args.no_write] = at
        if args.plot and not args.no_write and not model.config.attention:
            lines[f"{name}, may not write"] = text_losses(path, args, device, silent=True)[2]
    if args.plot:
        mean = lambda at: zip(*(((a + b) / 2, at[a:b].mean().item()) for a, b in buckets(len(at))))
        picture(args.plot, {name: mean(at) for name, at in lines.items()}, "tokens before",
                f"loss [nats/token], mean of {n} windows", log="x", trained=ckpt["train"]["seq_len"])


def text_losses(path, args, device, silent=False):
    """Print the losses of one checkpoint -> it, its model, its loss by position, of how many windows.

    silent: print nothing, and the memory may not write.
    """
    ckpt, model, tokenizer = load(path, device, args.no_write or silent)
    corpus, T = data.read(args.data or ckpt["train"]["data"]), ckpt["train"]["seq_len"]
    _, val = corpus.splits(tokenizer, 1)
    length = min(args.length or 4 * T, len(val) - 1)
    at, n = position_loss(model, val, length, args.batch_size, args.windows)
    if silent:
        return ckpt, model, at, n
    say(f"{ckpt['path']}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
        f"{ckpt['data']['used']} in windows of {T}")
    part = "the validation files" if corpus.tokens else "the last tenth"
    other = "" if corpus.sha256 == ckpt["data"]["sha256"] else "; not the text of the training"
    say(f"{part} of {corpus.used}, {len(val):,} tokens{other}" + "; the memory writes nothing" * args.no_write)
    loss = train.report(model, tokenizer, val, T, args.batch_size)
    say(f"\nby position, mean of {n} windows of {length}; trained on {T}\n  tokens before   nats/token")
    for a, b in buckets(length):
        say(f"  {a + 1:6d} - {b:6d}   {at[a:b].mean().item():.4f}" + ("   longer than in training" if b > T else ""))
    if not (math.isfinite(loss) and at.isfinite().all()):
        raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
    if args.stream:
        stream(model, val, args.stream)
    return ckpt, model, at, n


# ---- a stream without end

def resident(device):
    """Return the bytes of memory in use by this process, or on the GPU; nan where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


def pieces(ids, n, length):
    """Yield at least n tokens and the one after each, over and over the same ids, in pieces x, y (1, length)."""
    ids = torch.as_tensor(ids[: n + 1]).long()
    for t in range(0, n, length):
        at = torch.arange(t, t + length) % (len(ids) - 1)
        yield ids[at][None], ids[at + 1][None]


@torch.inference_mode()
def stream(model, ids, n):
    """Read n tokens through one state. Raises Halt if a loss is not finite, or memory grows though the state does not."""
    c, device, state, seen, total, marks = model.config, next(model.parameters()).device, None, 0, 0.0, []
    # a state's size depends on the place in a chunk, and in a segment of mac: look at it at the end of both
    period = math.lcm(1 if c.attention else c.shard or c.chunk, c.attn_window if c.wiring == "mac" else 1)
    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  tokens/s  resident MiB  state bytes")
    began = time.perf_counter()
    for x, y in pieces(ids, n, -(-1024 // period) * period):
        logits, state = model(x.to(device), state)
        loss = F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        total, seen = total + loss, seen + y.numel()
        if not math.isfinite(loss):
            raise Halt(f"the loss is {loss} after {seen:,} tokens of the stream")
        if 10 * seen >= (len(marks) + 1) * n:                 # another tenth; by the first one all buffers are there
            marks.append((resident(device), models.state_bytes(state)))
            say(f"  {seen:9,}  {total / seen:10.4f}  {seen / (time.perf_counter() - began):8,.0f}  "
                f"{marks[-1][0] / 2**20:12,.1f}  {marks[-1][1]:11,}")
    growth = [after / max(before, 1) - 1 if after else 0.0 for before, after in zip(marks[0], marks[-1])]
    say(f"since the first tenth: resident memory {growth[0]:+.1%}, state {growth[1]:+.1%}")
    if models.holds_all(c):
        say("the state of this model holds every token, so it grows with the stream")
    elif any(by > 0.05 for by in growth):                     # never true of nan
        raise Halt("memory grows with the stream")


# ---- watching a memory at work

def probe_task(args, device):
    """Print, keep and draw what models.probe sees in each layer of a checkpoint over a text."""
    ckpt, model, tokenizer = load(args.ckpt[0], device)
    if model.config.attention or model.config.shard:
        raise UserError(f"--task probe: {ckpt['path']} has no memory, or one in shards ({ckpt['preset']})")
    if args.prompt:
        ids = data.encode_prompt(tokenizer, args.prompt)
    else:
        ids = data.read(args.data or ckpt["train"]["data"]).splits(tokenizer, 1)[1]
    ids = torch.as_tensor(ids[: args.length or ckpt["train"]["seq_len"]]).long()
    found, lines, kept = models.probe(model, ids[None].to(device)), {}, []
    say(f"{ckpt['path']}: {ckpt['preset']}, step {ckpt['step']}, over {len(ids)} tokens: mean +- standard deviation\n"
        f"\n{'layer':>14}" + "".join(f"{i + 1:>18}" for i in range(len(found))))
    for name in found[0]:
        cells = [(at[name].mean().item(), at[name].std(correction=0).item()) for at in found]
        say(f"{name:>14}" + "".join(f"{mean:>10.4f} +-{spread:6.3f}" for mean, spread in cells))
    for i, at in enumerate(found):
        kept.append({name: a.mean((0, 1)).tolist() if a.dim() == 3 and name != "attn_gate" else a.mean().item()
                     for name, a in at.items()})
        mean = lambda name: at[name].mean((0, 1)).unfold(0, min(16, len(ids)), 1).mean(-1)
        for name, seen in (("inner loss / inner loss without writes", mean("surprise") / mean("untaught")),
                           ("step / its bound", mean("step") * model.config.chunk / model.config.max_step)):
            lines[f"layer {i + 1}: {name}"] = range(len(ids) - len(seen), len(ids)), seen.tolist()
        if "attn_gate" in at and len(ids) > 1 and min(moves := at["attn_gate"].std(1).mean(), at["share"]) < COLLAPSED:
            say(f"warning: layer {i + 1}: its memory is idle: writes move its output by {at['share']:.3f}, the gate "
                f"moves by {moves:.3f}; train with a narrower --attn-window, --memory-floor or --polarise")
    if args.json:
        Path(args.json).write_text(json.dumps(kept) + "\n")
    if args.plot:
        picture(args.plot, lines, "tokens before", "mean of all heads and 16 tokens")


# ---- the rule by itself

# the memory of online and capacity where no flag says otherwise; there is no network around it
PLAIN = dict(n_head=1, head_dim=32, features="none", chunk=1, muon_every=1, ns_steps=5, max_norm=0.0)
STEPS = torch.logspace(-3, 1.5, 25)             # constant inner steps that are tried
MOMENTUM = 0.9


@torch.no_grad()
def one_pass(layer, rule, momentum, k, v):
    """Read pairs k, v (B, 1, T, D) once by the rule (Eq 9, 33, 32), without forgetting, with equal weights in a window.

    -> for each of STEPS, as the step of all tokens, the mean over all pairs of |M(k) - v|^2 / |v|^2 with the last M
    """
    B, (k, v) = len(k), (a.repeat(len(STEPS), 1, 1, 1) for a in (k, v))
    one = torch.ones(k.shape[:3], device=k.device)
    step = STEPS.to(one).repeat_interleave(B)[:, None, None] * one
    gate = (one / rule.window)[..., None].expand(*one.shape, rule.window)
    gates = omega.Gates(one, step, MOMENTUM * one if momentum else None, gate)
    state = omega.start(rule, layer.phi, list(layer.M0), len(k), momentum)
    _, state = omega.omega(rule, layer.phi, k, k, v, gates, state)
    y = memory.apply(rule.memory, omega.total(state), layer.phi(k), k, rule.norm)
    return ((y - v).square().sum(-1) / v.square().sum(-1)).view(len(STEPS), -1).mean(1)


def online_layer(args, device, **more):
    """Return a memory layer by the flags, else by PLAIN."""
    torch.manual_seed(args.seed)
    layer = models.Memory(models.configure("atlas", **{**PLAIN, **more, **args.config})).to(device)
    if layer.config.features == "exp":
        raise UserError("--features exp has no weights to read back; take none, monomial, elementwise or sketch")
    return layer


def pairs_to_store(kind, n, dim, args, device):
    """Draw n keys and values (B, 1, n, dim) of unit length; coordinate i of `correlated` keys is 1/i as large."""
    draws = torch.Generator().manual_seed(args.seed)
    k, v = (torch.randn(args.batch_size, 1, n, dim, generator=draws) for _ in range(2))
    k = k / torch.arange(1, dim + 1) if kind == "correlated" else k
    return [F.normalize(a, dim=-1).to(device) for a in (k, v)]


def least(layer, rule, momentum, k, v):
    """Return the error of one pass with the best of STEPS."""
    return one_pass(layer, rule, momentum, k, v).nan_to_num(math.inf).min().item()


def show(args, lines, x):
    """Keep and draw the errors of one pass."""
    if args.json:
        Path(args.json).write_text(json.dumps(lines, indent=1) + "\n")
    if args.plot:
        picture(args.plot, lines, x, "error |M(k) - v|² / |v|²", log="x")


def online_task(args, device):
    """Print the error of one pass with the best of STEPS, for both kinds of keys and each of args.pairs."""
    layer, kinds, lines = online_layer(args, device), ("independent", "correlated"), {}
    config, rule = layer.config, layer.config.rule()
    say(f"memory {config.memory}, heads of {config.head_dim}, features {config.features}, chunk {config.chunk}:\nmean "
        f"|M(k) - v|^2 / |v|^2 of {args.batch_size} x N pairs read once, two kinds of keys, best of {len(STEPS)} steps")
    cells = [pairs_to_store(kind, n, config.head_dim, args, device) for kind in kinds for n in args.pairs]
    say("\n" + " " * 38 + "".join(f"{kind + ', N':>{max(7 * len(args.pairs), 16)}}" for kind in kinds))
    say(f"{'window  momentum  Newton-Schulz':38}" + "".join(f"{n:7d}" for n in args.pairs) * len(kinds))
    for every, momentum, window in itertools.product((0, rule.muon_every), (False, True), (1, 8, 16)):
        best = [least(layer, rule._replace(window=window, muon_every=every), momentum, k, v) for k, v in cells]
        say(f"{window:6d}  {MOMENTUM if momentum else '-':>8}  {'yes' if every else '-':>13}" + " " * 7
            + "".join(f"{e:7.2f}" for e in best))
        if window < 16:
            name = f"window {window}" + ", momentum" * momentum + ", Newton-Schulz" * bool(every)
            lines[name] = args.pairs, best[len(args.pairs):]
    show(args, lines, "pairs N, correlated keys")


def capacity_task(args, device):
    """Print how many pairs a matrix holds by least squares (Prop 2: its independent features), and in one pass."""
    lines, found = {}, {}
    for features in ("none", "monomial"):
        layer = online_layer(args, device, head_dim=8, features=features)
        rule, E = layer.config.rule(), layer.phi.out_dim
        for n in args.pairs:
            k, v = pairs_to_store("independent", n, layer.config.head_dim, args, device)
            x, y = layer.phi(F.normalize(k.double(), dim=-1)), v.double()        # of length 1 to the last digit
            W = torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(device)
            found["least squares", n] = ((x @ W - y).square().sum(-1) / y.square().sum(-1)).mean().item()
            for window, every in ((1, 0), (8, 0), (8, 1)):
                one = rule._replace(window=window, muon_every=every)
                found[f"window {window}" + ", Newton-Schulz" * every, n] = least(layer, one, False, k, v)
        for name in dict.fromkeys(name for name, _ in found):
            lines[f"{name}, {E} features"] = args.pairs, [found[name, n] for n in args.pairs]
    say(f"error |M(k) - v|^2 / |v|^2 of N pairs, heads of {layer.config.head_dim}")
    say(f"{'N':40}" + "".join(f"{n:7d}" for n in args.pairs))
    for name, (_, errors) in lines.items():
        say(f"{name:40}" + "".join(f"{e:7.2f}" for e in errors))
    show(args, lines, "pairs N")


def mixing_task(args, device):
    """Draw P of a chunk beside a causal softmax: row t says with which weight token t reads each pair."""
    T, window, one = 16, 4, torch.ones(1, 16)
    gates = omega.Gates(0.9 * one, one, None, torch.full((1, T, window), 1 / window))
    P = -omega.mixing(gates)[0][0, :, window - 1:]            # the columns before are pairs from before the chunk
    softmax = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    say("-P of 16 tokens, window 4, keep 0.9, step 1:\n" + "\n".join(" ".join(f"{a:.2f}" for a in row) for row in P))
    if args.plot:
        from matplotlib.figure import Figure
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        names = "causal softmax, all scores equal", "-P: window 4, keep 0.9"
        for ax, name, matrix in zip(figure.subplots(1, 2, sharey=True), names, (softmax, P)):
            shown = ax.imshow(matrix.where(matrix > 0, torch.nan), vmin=0, vmax=1)
            ax.set(title=name, xlabel="pair i")
        figure.axes[0].set(ylabel="token t")
        figure.colorbar(shown, ax=figure.axes, label="weight", shrink=0.8)
        save(figure, args.plot)


# ---- main

TASKS = dict(text=text_task, probe=probe_task, online=online_task, capacity=capacity_task, mixing=mixing_task)
USUAL = dict(batch_size=32, pairs=[])                         # what the flags are where they are not given
BY_TASK = dict(text=dict(batch_size=8), online=dict(pairs=[8, 16, 32]), capacity=dict(pairs=[4, 8, 16, 32, 44, 64, 128]))


def parse(argv=None):
    """Return the flags, with the task's defaults where one was not given; `config` holds those of models.Config."""
    parser = Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("--task", default="text", choices=tuple(TASKS), help="text: losses of checkpoints; probe: one checkpoint at "
        "work; online, capacity, mixing: the rule by itself [text]")
    add("--batch-size", type=at_least(int, 1), metavar="N", help="sequences at a time [32; text 8]")
    add("--plot", nargs="?", const="", metavar="FILE", help="draw a picture [results/TASK.png]")
    add("--json", metavar="FILE", help="probe, online, capacity: keep the results there")
    add_device(parser)
    add = parser.add_argument_group("--task text and probe").add_argument
    add("--ckpt", nargs="+", default=["out"], help="checkpoint files, or folders with best.pt or ckpt.pt [out]")
    add("--data", help="read another text than that of the training; its last tenth counts")
    add("--length", type=at_least(int, 0), default=0, metavar="N",
        help="text: longest window of the loss by position [4 x training's]; probe: tokens to read [training's]")
    add("--windows", type=at_least(int, 1), default=32, metavar="N", help="windows of the loss by position [32]")
    add("--stream", type=at_least(int, 0), default=50_000, metavar="N",
        help="tokens of the endless stream; 0: none [50000]")
    add("--prompt", help="the text that --task probe reads [the beginning of the last tenth]")
    add("--no-write", action="store_true", help="the memory may not write: what does it bring?")
    group = parser.add_argument_group("--task online and capacity", "And the flags of the memory, of which [] tells "
                                      "what atlas has.")
    group.add_argument("--pairs", type=at_least(int, 1), nargs="+", metavar="N", help="numbers of pairs "
                       "[8 16 32; capacity 4 8 16 32 44 64 128]")
    group.add_argument("--seed", type=at_least(int, 0), default=1337, metavar="N", help="seed of the pairs [1337]")
    add_flags(group, models.Config, {**models.PRESETS["atlas"], **PLAIN}, skip=train.NO_FLAG)
    args = parser.parse_args(argv)
    args.config = {f.name: vars(args).pop(f.name) for f in fields(models.Config) if hasattr(args, f.name)}
    for name, value in {**USUAL, **BY_TASK.get(args.task, {})}.items():
        setattr(args, name, getattr(args, name) or value)
    args.plot = f"results/{args.task}.png" if args.plot == "" else args.plot
    return args


def main(argv=None):
    args = parse(argv)

    def run():
        if args.plot:
            need("matplotlib")
        TASKS[args.task](args, setup(args.device, args.threads))
    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
