"""eval.py - what a model has learned: its loss on a text, a stream without end, its memory at work; and the bare rule.

    python eval.py --ckpt out                      validation loss, memory reset and carried, and by position; then
                                                   50,000 tokens in one stream: exit code 1 on NaN or growing memory
    python eval.py --ckpt out omega --plot         loss by position of several, with and without writes, drawn
    python eval.py --task twice --ckpt out --plot  does it know what it has just read? passages that are read twice
    python eval.py --task probe --ckpt out --plot  gates, writes and surprise of each layer over a text
    python eval.py --task online                   what window, momentum and Newton-Schulz bring, untrained
    python eval.py --task capacity --plot          how many pairs features can hold, and how many one pass stores
    python eval.py --task mixing --plot            the matrix P of one chunk, beside a causal softmax
"""
import itertools
import json
import math
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import chunks
import data
import memory
import models
import omega
import train
from common import (Halt, Parser, UserError, add_device, add_flags, at_least, picture, run_task, save, say, task_flags,
                    title)
from layer import rule, state_bytes
from poly import grown


# ---- a checkpoint and its text
def load(path, device, no_write=False):
    """Return the dict of a checkpoint, or of its path, its model, its tokenizer. no_write: the memory stays at M0."""
    ckpt = path if isinstance(path, dict) else train.load_checkpoint(path)
    model, tokenizer = train.rebuild(ckpt)
    if no_write:
        if model.config.attention:
            raise UserError(f"--no-write: {ckpt['path']} ({ckpt['preset']}) has no memory that writes; drop the flag")
        model.config.max_step, model.config.keep = 0.0, False    # the bound of all inner steps; M0 is not forgotten
    return ckpt, model.to(device), tokenizer


@torch.no_grad()
def position_loss(model, ids, length, batch_size, n_windows):
    """Return the mean nats at each position (length,) of about n_windows evenly spaced windows, and their number."""
    device, whole = next(model.parameters()).device, (len(ids) - 1) // length
    total, n = torch.zeros(length, dtype=torch.float64), 0
    for x, y in data.windows(ids[: whole * length + 1], length, batch_size, max(1, whole // n_windows)):
        total += F.cross_entropy(model(x.to(device))[0].mT.float(), y.to(device), reduction="none").sum(0).cpu()
        n += len(x)
    return total / n, n


def buckets(length):
    """Return the ranges [0, 16), [16, 32), [32, 64), ... up to length, as pairs."""
    edges = [0, *(16 * 2**i for i in range(60) if 16 * 2**i < length), length]
    return list(zip(edges, edges[1:]))


def text_task(args, device):
    """Print the losses of each checkpoint, and draw its loss by position. Raises Halt where one is not finite."""
    lines, curve = {}, lambda at: list(zip(*(((a + b) / 2, at[a:b].mean().item()) for a, b in buckets(len(at)))))
    for path in args.ckpt:
        ckpt, model, tokenizer = load(path, device, args.no_write)
        corpus, T = train.read_text(args.data or ckpt["train"]["data"], ckpt), ckpt["train"]["seq_len"]
        _, val = corpus.splits(tokenizer, 1)
        how = val, min(args.length or 4 * T, len(val) - 1), args.batch_size, args.windows
        say(f"{ckpt['path']}: {ckpt['preset']}, {model.num_params():,} parameters, step {ckpt['step']}, trained on "
            f"{ckpt['data']['used']} in windows of {T}")
        other = "; not the text of the training" * (corpus.sha256 != ckpt["data"]["sha256"])
        say(f"{len(val):,} validation tokens of {corpus.used}{other}" + "; the memory writes nothing" * args.no_write)
        loss = train.report(model, tokenizer, val, T, args.batch_size, max_tokens=args.report_tokens)
        at, n = position_loss(model, *how)
        say(f"\nby position, mean of {n} windows of {len(at)}; trained on {T}\n  tokens before   nats/token")
        for a, b in buckets(len(at)):
            say(f"  {a + 1:6d} - {b:6d}   {at[a:b].mean():.4f}" + "   longer than in training" * (b > T))
        if not (math.isfinite(loss) and at.isfinite().all()):
            raise Halt(f"{ckpt['path']}: a loss is not finite; its weights have diverged")
        if args.stream:
            stream(model, val, args.stream)
        name = f"{title(ckpt['preset'])}, {ckpt['step']} steps" + ", cannot write" * args.no_write
        name += f" ({ckpt['path']})" if name in lines else ""
        lines[name] = curve(at)
        if args.plot and not args.no_write and not model.config.attention:
            lines[f"{name}, cannot write"] = curve(position_loss(load(ckpt, device, no_write=True)[1], *how)[0])
    picture(args.plot, lines, "tokens before", f"loss [nats/token], mean of {n} windows", log="x", trained=T)


# ---- what was just read
LENGTHS, DRAWN = (64, 128, 256, 512), 128   # tokens of a passage, and of those that are drawn


@torch.no_grad()
def twice(model, ids, length, batch_size, n):
    """Return the mean nats (2 length - 1,) at each position of n evenly spaced passages of ids, (N,), each read twice
    from a new memory. Position length - 1, where the text begins again, belongs to neither reading."""
    device, starts = next(model.parameters()).device, torch.arange(n) * ((len(ids) - length) // n)
    passages = torch.as_tensor(ids).long()[starts[:, None] + torch.arange(length)]
    losses = [F.cross_entropy(model(x[:, :-1])[0].mT.float(), x[:, 1:], reduction="none")
              for x in passages.repeat(1, 2).to(device).split(batch_size)]
    return torch.cat(losses).double().mean(0).cpu()


@torch.no_grad()
def names_again(model, tokenizer, n=20):
    """Return how many tokens of n made-up names, told and asked for again, the model guesses, given those before, and
    how many there are; (0, 0) if its vocabulary lacks their letters."""
    random, right, asked = torch.Generator().manual_seed(1), 0, 0
    for _ in range(n):
        drawn = torch.randint(14, (2, 3), generator=random).tolist()
        town, lord = ("".join("ba ce di fo gu la me ni po ru sa te vi zo".split()[i] for i in name) for name in drawn)
        town, lord = town.capitalize(), lord.capitalize()
        told = f"The town of {town} is ruled by the lord "
        try:
            before, name = map(tokenizer.encode, (f"{told}{lord}.\nWhat say you? {told}", lord))
        except UserError:
            return 0, 0
        ids = torch.as_tensor([*before, *name], device=next(model.parameters()).device)[None]
        right += (model(ids[:, :-1])[0].argmax(-1) == ids[:, 1:])[0, -len(name):].sum().item()
        asked += len(name)
    return right, asked


def twice_task(args, device):
    """Print the mean loss of the first and the second reading, with and without writes, and draw it by position."""
    lines = {}
    say(f"nats/token of {args.windows} passages, first reading / second reading, each from a new memory\n\n{'':48}"
        + "".join(f"{f'{n} tokens':>16}" for n in LENGTHS) + f"{'of 20 names':>16}")
    for path in args.ckpt:
        ckpt, model, tokenizer = load(path, device)
        _, ids = train.read_text(args.data or ckpt["train"]["data"], ckpt).splits(tokenizer, 1)
        if len(ids) < LENGTHS[-1]:
            raise UserError(f"--task twice needs {LENGTHS[-1]} validation tokens, not {len(ids)}; give more text")
        name = f"{title(ckpt['preset'])} ({ckpt['path']})"
        rows = {name: model}
        if not model.config.attention:
            rows[f"{name}, cannot write"] = load(ckpt, device, no_write=True)[1]
        for name, model in rows.items():
            found = {n: twice(model, ids, n, args.batch_size, args.windows) for n in LENGTHS}
            means = ((at[: n - 1].mean(), at[n:].mean()) for n, at in found.items())
            say(f"{name:48}" + "".join("{:>8.3f} / {:.3f}".format(*both) for both in means)
                + "{:>9} of {:3}".format(*names_again(model, tokenizer)))
            found[DRAWN][DRAWN - 1] = math.nan                # nothing says what follows the passage
            at = found[DRAWN].unfold(0, 8, 8).nanmean(-1).tolist()
            lines[name] = [8 * i + 4 for i in range(len(at))], at
    picture(args.plot, lines, "tokens before", f"loss [nats/token], mean of 8 tokens and {args.windows} passages",
            marked=(DRAWN, "the text begins again"))


# ---- a stream without end
def resident(device):
    """Return the bytes of memory in use by this process, or on the GPU; nan where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


@torch.inference_mode()
def stream(model, ids, n):
    """Read about n tokens through one state. Raises Halt where a loss is not finite or memory grows with the stream."""
    c, device, state, seen, total, marks = model.config, next(model.parameters()).device, None, 0, 0.0, []
    piece = -(-1024 // c.period()) * c.period()               # where chunk and segment end, as a state depends on both
    ids = data.Joined([ids] * (n // len(ids) + piece // len(ids) + 2))[: -(-n // piece) * piece + 1]
    say(f"\na stream of {n:,} tokens\n     tokens  nats/token  tokens/s  resident MiB  state bytes")
    began = time.perf_counter()
    for x, y in data.streams(ids, piece, 1):
        logits, state = model(x.to(device), state)
        total += F.cross_entropy(logits[0].float(), y[0].to(device), reduction="sum").item()
        seen += y.numel()
        if not math.isfinite(total):
            raise Halt(f"the loss is {total} after {seen:,} tokens of the stream")
        if 10 * seen >= (len(marks) + 1) * n:                 # another tenth; by the second one all buffers are there
            marks.append((resident(device), state_bytes(state)))
            say(f"  {seen:9,}  {total / seen:10.4f}  {seen / (time.perf_counter() - began):8,.0f}  "
                f"{marks[-1][0] / 2**20:12,.1f}  {marks[-1][1]:11,}")
    growth = [after / max(before, 1) - 1 if after else 0.0 for before, after in zip(marks[:2][-1], marks[-1])]
    say(f"since the second line: resident memory {growth[0]:+.1%}, state {growth[1]:+.1%}")
    if models.holds_all(c):
        say("the state of this model holds every token, so it grows with the stream")
    elif any(by > 0.05 for by in growth):                     # never true of nan
        raise Halt("memory grows with the stream")


# ---- watching a memory at work
COLLAPSED = 0.02                          # share of an idle memory, or spread of an attention gate that stands still


def watch(layer, x, state=None):
    """Return the gates and inner losses of each token of x (B, T, n_embd) in a layer.Memory, as `probe` names them."""
    fresh, c = layer.start(x), layer.config
    state = state or fresh
    asked = lambda k, state: layer.recall(k, layer.weights(state)[0], state.fast.keys)
    _, k, v, gates, _ = layer.project(x, state)
    y, _ = chunks.run(rule(c), layer.phi, k.roll(-1, 2), k, v, gates, layer.with_M0(state.fast))         # W_t, k_{t+1}
    y = torch.cat([asked(k[:, :, :1], state), y[:, :, :-1]], 2)
    losses = [torch.vmap(partial(memory.loss, c.loss))(a.flatten(0, 2), v.flatten(0, 2)).view(v.shape[:3])
              for a in (y, asked(k, fresh))]
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
        with ExitStack() as undo:
            undo.callback(vars(model.config).update, vars(model.config).copy())
            model.config.max_step, model.config.keep = 0.0, False
            share = (o - layer(x)[0]).norm() / o.norm().clamp_min(torch.finfo(o.dtype).tiny)     # 0 where o is 0
        at = {name: torch.cat([a[name] for a in seen], -1)[..., -T:] for name in seen[0]}   # no persistent tokens
        W, S = inside.weights(calls[inside][-1][1][1])
        W = [a - b for a, b in zip(W, grown(inside.M0, [w.shape[-2] for w in W]))]
        for name, matrices in ("written", W), ("S", S):
            if matrices:
                at[name] = sum(w.square().sum((-2, -1)) for w in matrices).sqrt()
        if model.config.wiring in ("mag", "mac"):
            at["attn_gate"] = torch.cat([out for _, out in calls[layer.m_norm]], 1).sigmoid()
        found.append(at | dict(share=share))
    return found


def probe_task(args, device):
    """Print, keep and draw what `probe` sees in each layer of a checkpoint over a text."""
    if len(args.ckpt) > 1:
        raise UserError(f"--task probe reads one checkpoint, not {len(args.ckpt)}: --ckpt {' '.join(args.ckpt)}")
    ckpt, model, tokenizer = load(args.ckpt[0], device)
    if model.config.attention or model.config.shard:
        raise UserError(f"--task probe: {ckpt['path']} has no memory, or one in shards ({ckpt['preset']})")
    text = args.data or ckpt["train"]["data"]
    ids = tokenizer.encode(args.prompt) if args.prompt else train.read_text(text, ckpt).splits(tokenizer, 1)[1]
    ids = torch.as_tensor(ids[: args.length or ckpt["train"]["seq_len"]]).long()
    found, lines, kept = probe(model, ids[None].to(device)), {}, []
    say(f"{ckpt['path']}: {ckpt['preset']}, step {ckpt['step']}, over {len(ids)} tokens: mean +- standard deviation\n"
        f"\n{'layer':>14}" + "".join(f"{i + 1:>18}" for i in range(len(found))))
    for name in found[0]:
        say(f"{name:>14}" + "".join(f"{at[name].mean():>10.4f} +-{at[name].std(correction=0):6.3f}" for at in found))
    for i, at in enumerate(found):
        kept.append({name: a.mean((0, 1)).tolist() if a.dim() == 3 and name != "attn_gate" else a.mean().item()
                     for name, a in at.items()})
        mean = lambda name: at[name].mean((0, 1)).unfold(0, min(16, len(ids)), 1).mean(-1)
        dot, taught, untaught = model.config.loss == "dot", mean("surprise"), mean("untaught")
        change = taught - untaught if dot else taught / untaught                 # dot: at M0 it is 0, or of either sign
        for name, seen in ((f"inner loss {'-' if dot else '/'} inner loss without writes", change),
                           ("step / its bound", mean("opened"))):
            lines[f"layer {i + 1}: {name}"] = range(len(ids) - len(seen), len(ids)), seen.tolist()
        if "attn_gate" in at and len(ids) > 1 and min(moves := at["attn_gate"].std(1).mean(), at["share"]) < COLLAPSED:
            say(f"warning: layer {i + 1}: its memory is idle: writes move its output by {at['share']:.3f}, the gate "
                f"moves by {moves:.3f}; train with a narrower --attn-window, --memory-floor or --polarise")
    show(args, kept, lines, "tokens before", "mean of all heads and 16 tokens", log="")


def show(args, kept, lines, x, y="error |M(k) - v|² / |v|²", log="x"):
    """Keep results with --json and draw lines with --plot."""
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")
    picture(args.plot, lines, x, y, log=log)


# ---- the rule by itself
PLAIN = dict(n_head=1, head_dim=32, features="none", window=8, error="chunk", chunk=1, muon_every=1, ns_steps=5,
             ns_coefficients="muon", max_norm=0.0)
STEPS, MOMENTUM = torch.logspace(-3, 1.5, 25), 0.9       # constant inner steps that are tried, the constant momentum


@torch.no_grad()
def one_pass(layer, rule, momentum, k, v):
    """Read pairs k, v (B, 1, T, D) once by a rule (Eq 9, 33, 32) that forgets nothing and weighs a window evenly.
    Return for each of STEPS the mean |M(k) - v|^2 / |v|^2 over all pairs with the last M, inf where it diverges."""
    B, window, (k, v) = len(k), rule.window, (a.repeat(len(STEPS), 1, 1, 1) for a in (k, v))
    one = torch.ones(k.shape[:3], device=k.device)
    step = STEPS.to(one).repeat_interleave(B)[:, None, None] * one
    gates = omega.Gates(one, step, MOMENTUM * one if momentum else None, torch.stack([one / window] * window, -1))
    state = omega.start(rule, layer.phi, list(layer.M0), len(k), momentum)
    _, state = chunks.run(rule, layer.phi, k, k, v, gates, state)
    y = memory.apply(rule.memory, chunks.weights(rule, layer.phi, state)[0], layer.phi(k), k, rule.norm)
    return ((y - v).square().sum(-1) / v.square().sum(-1)).view(len(STEPS), -1).mean(1).nan_to_num(math.inf)


def online_layer(args, device, **more):
    """Return a memory layer by the flags, else by PLAIN; no network surrounds it. Raises UserError for exp features."""
    if args.config.get("features") == "exp":
        raise UserError("--features exp has no weights to read back; take none, monomial, elementwise or sketch")
    torch.manual_seed(args.seed)
    return models.Memory(models.configure("atlas", **{**PLAIN, **more, **args.config})).to(device)


def pairs_to_store(kind, n, dim, args, device):
    """Draw n keys and values (B, 1, n, dim) of unit length; coordinate i of `correlated` keys is 1/i as large."""
    draws = torch.Generator().manual_seed(args.seed)
    k, v = (torch.randn(args.batch_size, 1, n, dim, generator=draws) for _ in range(2))
    k = k / torch.arange(1, dim + 1) if kind == "correlated" else k
    return [F.normalize(a, dim=-1).to(device) for a in (k, v)]


def online_task(args, device):
    """Print the error of one pass with the best of STEPS, for both kinds of keys and each of args.pairs."""
    layer, kinds, lines = online_layer(args, device), ("independent", "correlated"), {}
    config, usual = layer.config, rule(layer.config)
    say(f"memory {config.memory}, heads of {config.head_dim}, features {config.features}, chunk {config.chunk}:\nmean "
        f"|M(k) - v|^2 / |v|^2 of {args.batch_size} x N pairs read once, two kinds of keys, best of {len(STEPS)} steps")
    cells = [pairs_to_store(kind, n, config.head_dim, args, device) for kind in kinds for n in args.pairs]
    say("\n" + " " * 38 + "".join(f"{kind + ', N':>{max(7 * len(args.pairs), 16)}}" for kind in kinds))
    say(f"{'window  momentum  Newton-Schulz':38}" + "".join(f"{n:7d}" for n in args.pairs) * len(kinds))
    for every, momentum, window in itertools.product((0, usual.muon_every), (False, True), (1, 8, 16)):
        one = usual._replace(window=window, muon_every=every)
        best = [one_pass(layer, one, momentum, k, v).min().item() for k, v in cells]
        say(f"{window:6d}  {MOMENTUM if momentum else '-':>8}  {'yes' if every else '-':>13}" + " " * 7
            + "".join(f"{e:7.2f}" for e in best))
        if window < 16:
            name = f"window {window}" + ", momentum" * momentum + ", Newton-Schulz" * bool(every)
            lines[name] = args.pairs, best[len(args.pairs):]
    show(args, lines, lines, "pairs N, correlated keys")


def capacity_task(args, device):
    """Print how many pairs a matrix holds by least squares (Prop 2: its independent features), and in one pass."""
    lines = {}
    for features in ("none", "monomial"):
        layer = online_layer(args, device, head_dim=8, features=features)
        for n in args.pairs:
            k, v = pairs_to_store("independent", n, layer.config.head_dim, args, device)
            x, y = layer.phi(F.normalize(k.double(), dim=-1)), v.double()        # of length 1 to the last digit
            W = torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(device)
            errors = {"least squares": ((x @ W - y).square().sum(-1) / y.square().sum(-1)).mean().item()}
            for window, every in ((1, 0), (8, 0), (8, 1)):
                one = rule(layer.config)._replace(window=window, muon_every=every)
                errors[f"window {window}" + ", Newton-Schulz" * every] = one_pass(layer, one, False, k, v).min().item()
            for name, error in errors.items():
                lines.setdefault(f"{name}, {x.shape[-1]} features", (args.pairs, []))[1].append(error)
    say(f"error |M(k) - v|^2 / |v|^2 of N pairs, heads of {layer.config.head_dim}")
    say(f"{'N':40}" + "".join(f"{n:7d}" for n in args.pairs))
    for name, (_, errors) in lines.items():
        say(f"{name:40}" + "".join(f"{e:7.2f}" for e in errors))
    show(args, lines, lines, "pairs N")


def mixing_task(args, device):
    """Draw P of a chunk beside a causal softmax: row t says with which weight token t reads each pair."""
    T, window, one = 16, 4, torch.ones(1, 16)
    gates = omega.Gates(0.9 * one, one, None, torch.full((1, T, window), 1 / window))
    P = 0 - chunks.waiting(omega.Rule(window=window, chunk=T), gates)[0][0, :, window - 1:]     # less pairs from before
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


TASKS = dict(text=text_task, twice=twice_task, probe=probe_task, online=online_task, capacity=capacity_task,
             mixing=mixing_task)
BY_TASK = dict(text=dict(batch_size=8), twice=dict(batch_size=8),                # other defaults
               capacity=dict(pairs=[4, 8, 16, 32, 44, 64, 128]))
LAYER = "head_dim memory expansion memory_norm loss degree chunk ns_steps ns_coefficients forget max_norm"
USES = dict(text="ckpt data length batch_size windows stream report_tokens no_write",
            twice="ckpt data batch_size windows", probe="ckpt data length prompt json",
            online=f"batch_size pairs seed json {LAYER} features sketch_dim muon_every",
            capacity=f"batch_size pairs seed json {LAYER}")                      # mixing uses none of these


def parse(argv=None):
    parser = Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("--task", default="text", choices=tuple(TASKS), help="what to do, as shown above [text]")
    add("--batch-size", type=at_least(int, 1), default=32, metavar="N", help="sequences at a time [32; text, twice 8]")
    add_device(parser, "TASK.png")
    add = parser.add_argument_group("--task text, twice and probe").add_argument
    add("--ckpt", nargs="+", default=["out"], help="checkpoint files, or folders with best.pt or ckpt.pt [out]")
    add("--data", help="text to read; only its last tenth is used [the training's]")
    add("--length", type=at_least(int, 0), default=0, metavar="N",
        help="text: longest window of the loss by position [4 x training's]; probe: tokens to read [training's]")
    add("--windows", type=at_least(int, 1), default=32, metavar="N",
        help="windows of the loss by position, passages of twice [32]")
    add("--stream", type=at_least(int, 0), default=50_000, metavar="N", help="tokens of the stream; 0: none [50000]")
    add("--report-tokens", type=at_least(int, 0), default=2_000_000, help="of the losses at the top; 0: all [2000000]")
    add("--prompt", help="the text that --task probe reads [the beginning of the last tenth]")
    add("--no-write", action="store_true", help="the memory cannot write: what does it bring?")
    group = parser.add_argument_group("--task online and capacity", "Of the memory's flags [] tells what atlas has.")
    group.add_argument("--pairs", type=at_least(int, 1), nargs="+", default=[8, 16, 32], metavar="N",
                       help="numbers of pairs [8 16 32; capacity 4 8 16 32 44 64 128]")
    group.add_argument("--seed", type=at_least(int, 0), default=1337, metavar="N", help="seed of the pairs [1337]")
    unused = vars(models.Config()).keys() - set(USES["online"].split())
    add_flags(group, models.Config, {**models.PRESETS["atlas"], **PLAIN}, skip=unused)
    return task_flags(parser, argv, BY_TASK, USES, models.Config)


def main(argv=None):
    return run_task(TASKS, parse, argv)


if __name__ == "__main__":
    sys.exit(main())
