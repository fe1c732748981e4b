"""eval.py - what a model has learned: its loss on a text, a stream without end, its memory at work; and the bare rule.

    python eval.py --ckpt out                  short for eval.py loss: validation loss, memory reset and carried, and
                                               by position; then a stream: exit code 1 on NaN or a growing state
    python eval.py loss --ckpt out omega --plot         of several, and without writes, drawn
    python eval.py twice --ckpt out --plot     does it know what it has just read? passages that are read twice
    python eval.py probe --ckpt out --plot     gates, writes and inner losses of each layer over a text
    python eval.py online                      what window, momentum and Newton-Schulz bring, untrained
    python eval.py capacity --plot             how many pairs features can hold, and how many one pass stores
    python eval.py mixing --plot               the matrix P of one chunk, beside a causal softmax
"""
import copy
import itertools
import math
import sys
import time
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import chunks
import data
import memory
import models
import omega
import train
from common import (Halt, Parser, UserError, add_number, add_tasks, picture, run_task, save, say,
                    seeded, with_task)
from layer import rule


WINDOWS = 32                                # of the loss by position, and passages that are read twice
LENGTHS, DRAWN = (64, 128, 256, 512), 128   # tokens of these passages, and of those that are drawn
COLLAPSED = 0.02                            # share of an idle memory, or spread of an attention gate that stands still


# ---- a checkpoint and its text
def load(path, args, device):
    """Return the dict of a checkpoint, its model and tokenizer, the Corpus of --data and its validation tokens."""
    ckpt = train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    corpus = train.read_text(args.data or ckpt["train"]["data"], ckpt)
    return ckpt, model.to(device), tokenizer, corpus, corpus.splits(tokenizer, 1)[1]


def frozen(module):
    """Return a copy of a model or layer whose memory stays at M0."""
    module = copy.deepcopy(module)
    module.config.max_step, module.config.keep = 0.0, False  # the bound of all inner steps; M0 is not forgotten
    return module


@torch.no_grad()
def position_loss(model, batches):
    """Return the mean nats at each position of the texts x, y (B, T) in batches, and the number of texts."""
    total, n, device = 0.0, 0, next(model.parameters()).device
    for x, y in batches:
        losses = F.cross_entropy(model(x.to(device))[0].mT.float(), y.to(device), reduction="none")
        total, n = total + losses.sum(0).double().cpu(), n + len(x)
    return total / n, n


def evenly(ids, length, batch_size):
    """Yield about WINDOWS evenly spaced windows of ids."""
    whole = (len(ids) - 1) // length
    return data.windows(ids[: whole * length + 1], length, batch_size, max(1, whole // WINDOWS))


def buckets(at):
    """Return [first, end, mean] of the values at positions [0, 16), [16, 32), [32, 64), ... up to len(at)."""
    edges = [0, *(16 * 2**i for i in range(60) if 16 * 2**i < len(at)), len(at)]
    return [[a, b, at[a:b].mean().item()] for a, b in zip(edges, edges[1:])]


def loss_task(args, device):
    """Print the losses of checkpoints, also by position. Raises Halt where one is not finite."""
    lines = {}
    for path in args.ckpt:
        ckpt, model, tokenizer, corpus, val = load(path, args, device)
        name, T = path, ckpt["train"]["seq_len"]
        if args.no_write:
            if model.config.attention:
                raise UserError(f"--no-write: {ckpt['path']} has no memory that writes; drop the flag")
            name, model = f"{path}, cannot write", frozen(model)
        other = "; not the text of the training" * (corpus.sha256 != ckpt["data"]["sha256"])
        say(f"{name}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
            f"{ckpt['data']['used']} in windows of {T}\n{len(val):,} validation tokens of {corpus.used}{other}")
        loss = train.report(model, tokenizer, val, T, args.batch_size)
        shape = min(args.length or 4 * T, len(val) - 1), args.batch_size
        at, n = position_loss(model, evenly(val, *shape))
        say(f"\nby position, mean of {n} windows of {len(at)}; trained on {T}\n  tokens before   nats/token")
        for a, b, mean in buckets(at):
            say(f"  {a + 1:6d} - {b:6d}   {mean:.4f}" + "   longer than in training" * (b > T))
        if not (math.isfinite(loss) and at.isfinite().all()):
            raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
        if args.stream:
            stream(model, val, args.stream)
        found = {name: at}
        if args.plot and not (args.no_write or model.config.attention):
            found[f"{name}, cannot write"], _ = position_loss(frozen(model), evenly(val, *shape))
        for name, at in found.items():
            lines[name] = [(a + b) / 2 for a, b, _ in buckets(at)], [mean for *_, mean in buckets(at)]
    picture(args.plot, lines, "tokens before", f"loss [nats/token], mean of {n} windows", log="x",
            marked=(T, "longest text in training"))
    return lines


# ---- what was just read
def read_twice(ids, length, batch_size):
    """Return batches x, y of WINDOWS evenly spaced passages of ids, (N,), each repeated."""
    starts = torch.arange(WINDOWS) * ((len(ids) - length) // WINDOWS)
    passages = torch.as_tensor(ids).long()[starts[:, None] + torch.arange(length)].repeat(1, 2)
    return [(part[:, :-1], part[:, 1:]) for part in passages.split(batch_size)]


def twice_task(args, device):
    """Print the loss of passages at the first and the second reading, with and without writes."""
    lines = {}
    say(f"nats/token of {WINDOWS} passages, first reading / second reading, each from a new memory\n\n{'':48}"
        + "".join(f"{f'{n} tokens':>16}" for n in LENGTHS))
    for path in args.ckpt:
        _, model, _, _, ids = load(path, args, device)
        if len(ids) < LENGTHS[-1]:
            raise UserError(f"twice needs {LENGTHS[-1]} validation tokens, not {len(ids)}; give more text")
        rows = {path: model} | ({} if model.config.attention else {f"{path}, cannot write": frozen(model)})
        for name, model in rows.items():
            found = {n: position_loss(model, read_twice(ids, n, args.batch_size))[0] for n in LENGTHS}
            say(f"{name:48}" + "".join(f"{at[: n - 1].mean():8.3f} / {at[n:].mean():.3f}" for n, at in found.items()))
            found[DRAWN][DRAWN - 1] = math.nan                # nothing says what follows the passage
            at = found[DRAWN].unfold(0, 8, 8).nanmean(-1).tolist()
            lines[name] = [8 * i + 4 for i in range(len(at))], at
    picture(args.plot, lines, "tokens before", f"loss [nats/token], mean of 8 tokens and {WINDOWS} passages",
            marked=(DRAWN, "the text begins again"))
    return lines


# ---- a stream without end
@torch.inference_mode()
def state_bytes(state):
    """Return the bytes of all tensors in a state."""
    return sum(a.numel() * a.element_size() for a in tree_leaves(state) if isinstance(a, torch.Tensor))


def stream(model, ids, n):
    """Read about n tokens through one state. Raises Halt where a loss is not finite or the state grows."""
    c, device, state, seen, total, sizes = model.config, next(model.parameters()).device, None, 0, 0.0, []
    piece = -(-1024 // c.period()) * c.period()               # where chunk and segment end, as a state depends on both
    ids = data.Joined([ids] * (n // len(ids) + piece // len(ids) + 2))[: -(-n // piece) * piece + 1]
    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  tokens/s  state bytes")
    began = time.perf_counter()
    for x, y in data.streams(ids, piece, 1):
        logits, state = model(x.to(device), state)
        total += F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        seen += y.numel()
        if not math.isfinite(total):
            raise Halt(f"the loss is {total} after {seen:,} tokens of the stream")
        if 10 * seen >= (len(sizes) + 1) * n:                 # another tenth; by the second one all buffers are there
            sizes.append(state_bytes(state))
            speed = seen / (time.perf_counter() - began)
            say(f"  {seen:9,}  {total / seen:10.4f}  {speed:8,.0f}  {sizes[-1]:11,}")
    growth = sizes[-1] / max(sizes[:2][-1], 1) - 1
    if models.holds_all(c):
        say("the state of this model holds every token, so it grows with the stream")
    elif growth > 0.05:
        raise Halt(f"the state grows with the stream: {growth:+.1%} since the second line")


# ---- watching a memory at work
def watch(layer, x, state=None):
    """Return the gates and inner losses of each token of x (B, T, n_embd) in a layer.Memory, as `probe` names them."""
    fresh, c = layer.start(x), layer.config
    state = state or fresh
    asked = lambda k, state: layer.recall(k, layer.frozen(state))
    _, k, v, gates, _ = layer.project(x, state)
    y, _ = layer.learn(k.roll(-1, 2), k, v, gates, state.fast)                   # W_t, k_{t+1}
    y = torch.cat([asked(k[:, :, :1], state), y[:, :, :-1]], 2)
    losses = [memory.loss(c.loss, a, v) for a in (y, asked(k, fresh))]
    opened = gates.step / layer.most(gates.momentum)
    found = dict(gates._asdict(), gate=gates.gate.sum(-1), opened=opened, surprise=losses[0], untaught=losses[1])
    return {name: a for name, a in found.items() if a is not None}


@torch.no_grad()
def probe(model, tokens):
    """Watch the memories while the model reads tokens (B, T) from the start -> for each layer a dict of tensors.

        keep, step, momentum, gate   (B, H, T); gate is the sum over the window
        opened      (B, H, T)        the step as a share of its bound
        surprise    (B, H, T)        the inner loss of a pair at the memory before it: l(M(phi(k_t); W_{t-1}), v_t)
        untaught    (B, H, T)        the same at M0
        written, S  (B, H)           |W - M0| and |S| after the last token; S only with momentum
        share       ()               |o - o'| / |o|: what the layer says, o, and says if its memory cannot write, o'
        attn_gate   (B, T, n_embd)   MAG and MAC only: the attention gate, sigmoid(norm(M(..)))
    """
    calls, found, T, layers = {}, [], tokens.shape[1], [block.layer for block in model.blocks]
    keep_call = lambda m, args, out: calls.setdefault(m, []).append((args, out))
    with ExitStack() as hooks:
        for m in (m for layer in layers for m in (layer, *layer.children())):
            hooks.enter_context(m.register_forward_hook(keep_call))
        model(tokens)
    for layer in layers:
        inside = getattr(layer, "memory", layer)              # the Memory of a Wiring; MAC calls it once a segment
        (x, *_), (o, _) = calls[layer][0]
        seen = [watch(inside, *args[:2]) for args, _ in calls[inside]]
        share = (o - frozen(layer)(x)[0]).norm() / o.norm().clamp_min(torch.finfo(o.dtype).tiny)     # 0 where o is 0
        at = {name: torch.cat([a[name] for a in seen], -1)[..., -T:] for name in seen[0]}   # no persistent tokens
        W, S = inside.weights(calls[inside][-1][1][1])
        M0 = [F.pad(m, (0, 0, 0, w.shape[-2] - m.shape[-2])) for m, w in zip(inside.M0, W)]      # dot.py's W grows
        W = [w - m for w, m in zip(W, M0)]
        for name, matrices in ("written", W), ("S", S):
            if matrices:
                at[name] = sum(w.square().sum((-2, -1)) for w in matrices).sqrt()
        if model.config.wiring in ("mag", "mac"):
            at["attn_gate"] = torch.cat([out for _, out in calls[layer.m_norm]], 1).sigmoid()
        found.append(at | dict(share=share))
    return found


def probe_task(args, device):
    """Print and draw what each layer of a checkpoint does with its memory while it reads a text."""
    ckpt, model, _, _, ids = load(args.ckpt, args, device)
    if model.config.attention or model.config.shard:
        raise UserError(f"probe: {ckpt['path']} has no memory, or one in shards ({ckpt['preset']})")
    ids = torch.as_tensor(ids[: args.length or ckpt["train"]["seq_len"]]).long()
    found, lines, kept = probe(model, ids[None].to(device)), {}, []
    say(f"{ckpt['path']}: {ckpt['preset']}, step {ckpt['step']}, over {len(ids)} tokens: mean +- standard deviation\n"
        f"\n{'layer':>14}" + "".join(f"{i + 1:>18}" for i in range(len(found))))
    for name in found[0]:
        say(f"{name:>14}" + "".join(f"{at[name].mean():>10.4f} +-{at[name].std(correction=0):6.3f}" for at in found))
    for i, at in enumerate(found, 1):
        by_token = {name: a.mean((0, 1)) for name, a in at.items() if a.dim() == 3 and name != "attn_gate"}
        kept.append({name: by_token.get(name, a.mean()).tolist() for name, a in at.items()})
        change = by_token["surprise"] - by_token["untaught"]
        for name, a in ("inner loss - inner loss without writes", change), ("step / its bound", by_token["opened"]):
            a = a.unfold(0, min(16, len(ids)), 1).mean(-1)
            lines[f"layer {i}: {name}"] = range(len(ids) - len(a), len(ids)), a.tolist()
        if "attn_gate" in at and len(ids) > 1 and min(moves := at["attn_gate"].std(1).mean(), at["share"]) < COLLAPSED:
            say(f"warning: layer {i}: its memory is idle: writes move its output by {at['share']:.3f}, the gate "
                f"moves by {moves:.3f}; train with a narrower --attn-window, --memory-floor or --polarise")
    picture(args.plot, lines, "tokens before", "mean of all heads and 16 tokens")
    return dict(layers=kept)


# ---- the rule by itself
PLAIN = dict(n_head=1, head_dim=32, features="none", window=8, error="chunk", chunk=1, muon_every=1, ns_steps=5,
             ns_coefficients="muon", max_norm=0.0)
STEPS, MOMENTUM = torch.logspace(-3, 1.5, 25), 0.9       # constant inner steps that are tried, the constant momentum
DRAWS, SEED = 32, 1337


@torch.no_grad()
def one_pass(layer, k, v, every, momentum, window):
    """Read pairs k, v (B, 1, T, D) once by a rule (Eq 9, 33, 32) that forgets nothing and weighs a window evenly;
    `every` is 1 with Newton-Schulz, else 0. Return for each of STEPS the mean |M(k) - v|^2 / |v|^2 over all pairs with
    the last M, inf where it diverges."""
    one = rule(layer.config)._replace(window=window, muon_every=every)
    B, (k, v) = len(k), (a.repeat(len(STEPS), 1, 1, 1) for a in (k, v))
    ones = torch.ones(k.shape[:3], device=k.device)
    step = STEPS.to(ones).repeat_interleave(B)[:, None, None] * ones
    gates = omega.Gates(ones, step, MOMENTUM * ones if momentum else None, torch.stack([ones / window] * window, -1))
    state = omega.start(one, layer.phi, list(layer.M0), len(k), momentum)
    _, state = chunks.run(one, layer.phi, k, k, v, gates, state)
    y = memory.apply(one.memory, chunks.weights(one, layer.phi, state)[0], layer.phi(k), k, one.norm)
    return ((y - v).square().sum(-1) / v.square().sum(-1)).view(len(STEPS), -1).mean(1).nan_to_num(math.inf)


def plain_layer(device, **more):
    """Return a memory layer by PLAIN, but for `more`; no network surrounds it."""
    torch.manual_seed(SEED)
    return models.Memory(models.configure("atlas", **PLAIN | more)).to(device)


def pairs_to_store(kind, n, dim, device):
    """Draw n keys and values (DRAWS, 1, n, dim) of unit length; coordinate i of `correlated` keys is 1/i as large."""
    draws = seeded(SEED)
    k, v = (torch.randn(DRAWS, 1, n, dim, generator=draws) for _ in range(2))
    k = k / torch.arange(1, dim + 1) if kind == "correlated" else k
    return [F.normalize(a, dim=-1).to(device) for a in (k, v)]


def show_errors(args, lines, drawn):
    """Print lines {name: (pairs, errors)}, and draw some of them."""
    say(f"mean |M(k) - v|^2 / |v|^2 of {DRAWS} x N pairs, for one pass with the best of {len(STEPS)} steps\n\n"
        f"{'N':58}" + "".join(f"{n:7d}" for n in args.pairs))
    for name, (_, errors) in lines.items():
        say(f"{name:58}" + "".join(f"{e:7.2f}" for e in errors))
    picture(args.plot, drawn, "pairs N", "error |M(k) - v|² / |v|²", log="x")


def online_task(args, device):
    """Print what window, momentum and Newton-Schulz bring in one pass, untrained, for two kinds of keys."""
    layer, lines = plain_layer(device, chunk=args.chunk), {}
    for kind, *part in itertools.product(("independent", "correlated"), (0, 1), (False, True), (1, 8, 16)):
        every, momentum, window = part
        name = f"{kind} keys, window {window}" + ", momentum" * momentum + ", Newton-Schulz" * every
        pairs = (pairs_to_store(kind, n, layer.config.head_dim, device) for n in args.pairs)
        lines[name] = args.pairs, [one_pass(layer, k, v, *part).min().item() for k, v in pairs]
    drawn = {name: line for name, line in lines.items() if "correlated" in name and "16" not in name}
    show_errors(args, lines, drawn)
    return lines


def capacity_task(args, device):
    """Print how many pairs a matrix holds by least squares (Prop 2: its independent features), and in one pass."""
    lines = {}
    for features in ("none", "monomial"):
        layer = plain_layer(device, head_dim=8, features=features)
        for n in args.pairs:
            k, v = pairs_to_store("independent", n, 8, device)
            x, y = layer.phi(F.normalize(k.double(), dim=-1)), v.double()        # of length 1 to the last digit
            W = torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(device)
            errors = {"least squares": ((x @ W - y).square().sum(-1) / y.square().sum(-1)).mean().item()}
            for window, every in ((1, 0), (8, 0), (8, 1)):
                name = f"window {window}" + ", Newton-Schulz" * every
                errors[name] = one_pass(layer, k, v, every, False, window).min().item()
            for name, error in errors.items():
                lines.setdefault(f"{name}, {x.shape[-1]} features", (args.pairs, []))[1].append(error)
    show_errors(args, lines, lines)
    return lines


def mixing_task(args, device):
    """Print and draw P of a chunk, beside a causal softmax: row t says with which weight token t reads each pair."""
    T, window, one = 16, 4, torch.ones(1, 16)
    gates = omega.Gates(0.9 * one, one, None, torch.full((1, T, window), 1 / window))
    P = chunks.coefficients(omega.Rule(window=window, chunk=T), gates).P[0, :, window - 1:]     # less pairs from before
    softmax = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    say("P of 16 tokens, window 4, keep 0.9, step 1:\n" + "\n".join(" ".join(f"{a:.2f}" for a in row) for row in P))
    if args.plot:
        from matplotlib.figure import Figure
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        names = "softmax, equal scores", "P: window 4, keep 0.9"
        for ax, name, matrix in zip(figure.subplots(1, 2, sharey=True), names, (softmax, P)):
            shown = ax.imshow(matrix.where(matrix > 0, torch.nan), vmin=0, vmax=1)
            ax.set(title=name, xlabel="pair i")
        figure.axes[0].set(ylabel="token t")
        figure.colorbar(shown, ax=figure.axes, label="weight", shrink=0.8)
        save(figure, args.plot)
    return dict(P=P.tolist())


TASKS = dict(loss=loss_task, twice=twice_task, probe=probe_task, online=online_task, capacity=capacity_task,
             mixing=mixing_task)


def parse(argv=None):
    parser = Parser(prog="eval.py", description=__doc__, usage="python %(prog)s [TASK] [flags]")
    loss, twice, probe, online, capacity, _ = add_tasks(parser, TASKS, plot=TASKS)
    for task in loss, twice, probe:
        several = dict(default="out") if task is probe else dict(default=["out"], nargs="+")
        task.add_argument("--ckpt", help="checkpoint file, or folder with best.pt or ckpt.pt [out]", **several)
        task.add_argument("--data", help="text to read; only its last tenth is used [the training's]")
    for task in loss, twice:
        add_number(task, "--batch-size", 1, 8, "texts at a time")
    add_number(loss, "--length", 0, 0, "longest window; 0: 4 times training's")
    add_number(loss, "--stream", 0, 50_000, "tokens of the stream; 0: none")
    loss.add_argument("--no-write", action="store_true", help="the memory cannot write: what does it bring?")
    add_number(probe, "--length", 0, 0, "tokens to read; 0: as training's windows")
    add_number(online, "--pairs", 1, [8, 16, 32], "numbers of pairs")
    add_number(online, "--chunk", 1, 1, "tokens of a chunk")
    add_number(capacity, "--pairs", 1, [4, 8, 16, 32, 44, 64, 128], "numbers of pairs")
    return parser.parse_args(with_task(argv, "loss"))


def main(argv=None):
    return run_task(parse, argv)


if __name__ == "__main__":
    sys.exit(main())
