"""train.py - the outer loop: text in, checkpoints and a log out. The inner loop, which learns as it reads: omega.py.

    python train.py                                      the default ATLAS: tiny, on CUDA baby
    python train.py --data my.txt --window 1 --no-muon   your own text; nearly every field of models.Config is a flag
    python train.py --plot out out2                      draws the curves of runs
    python train.py --resume                             goes on where OUT/ckpt.pt stopped (--steps N: trains longer)
    python train.py --init out --data my.txt --out tuned a new run that begins with the weights of another
    torchrun --nproc-per-node 8 train.py --size 340m --remat --data tokens --tokenizer gpt2        on 8 GPUs

A batch is a function of (seed, step), and a checkpoint holds everything else. So on a CPU, with as many threads, a run
that was stopped and resumed ends in the same bits as one that was not.
"""
import argparse
import csv
import importlib.util
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import TOKENIZERS, Tokenizer, UserError, batch, make_tokenizer, read, replacing, streams, windows
from models import LM, PRESETS, SIZES, Config, ConfigError, Wiring, check, detach, flag, floor, holds_all, opt, probe
from muon import Muon, make_optimizers, native_bfloat16

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))     # torchrun sets these
FORMAT = 3                                                    # of checkpoints
LONGEST = 16384                                               # tokens a stream, in `report`
SAMPLE = 200                                                  # tokens of the sample at the end


# ---- settings: each field is a flag

@dataclass
class TrainConfig:
    """Everything about a run that is not the network."""
    model: str = opt("atlas", "architecture: a preset of models.py", choices=tuple(PRESETS))
    size: str = opt("auto", "of the network and of the run; auto: baby on CUDA, else tiny", choices=("auto", *SIZES))
    data: str = opt("shakespeare", "shakespeare, pydoc, a text file (.json: its \"text\" fields), a folder of text or "
                    "token files, or a mix by weight: a.txt:0.4,b.jsonl:0.6")
    tokenizer: str = opt("char", "bpe: byte pairs learned from your text, gpt2: those of GPT-2", choices=TOKENIZERS)
    bpe_size: int = opt(1024, "largest vocabulary of --tokenizer bpe", low=256)
    out: str = opt("out", "folder for ckpt.pt, best.pt, log.csv, config.json; an earlier run moves to OUT/old-N")
    resume: bool = opt(False, "go on from OUT/ckpt.pt with its settings (not --device, --threads, --compile)")
    init: str = opt("", "a checkpoint or its folder: begin a new run with its network, weights and tokenizer")
    steps: int = opt(600, "optimizer steps", low=1)
    seed: int = opt(1337, "of weights, batches and dropout")
    batch_size: int = opt(8, "sequences a forward pass", low=1)
    grad_accum: int = opt(1, "forward passes a step", low=1)
    seq_len: int = opt(256, "tokens a sequence", low=1)
    optimizer: str = opt("adamw", "muon: for hidden matrices, beside AdamW for the rest", choices=("adamw", "muon"))
    lr: float = opt(2e-3, "peak learning rate of AdamW; it falls linearly to 0 at the last step")
    embed_lr: float = opt(1.0, "learning rate of the embedding, in multiples of --lr")
    gate_lr: float = opt(1.0, "learning rate of the memory's gates, likewise")
    muon_lr: float = opt(2e-2, "peak learning rate of the outer Muon")
    beta2: float = opt(0.95, "decay of AdamW's second moment")
    weight_decay: float = opt(0.1, "of hidden matrices; nothing else decays")
    grad_clip: float = opt(1.0, "greatest norm of the gradient; 0: no clipping")
    warmup: int = opt(20, "steps of linear warmup; unless given at most a tenth of --steps")
    eval_every: int = opt(100, "steps between validations, each of which saves the checkpoint", low=1)
    eval_windows: int = opt(64, "about so many evenly spaced validation windows while training; 0: all")
    telemetry: bool = opt(False, "log at each validation what the memories do, as eval.py --task probe")
    wandb: bool = opt(False, "log to Weights & Biases, too")
    tensorboard: bool = opt(False, "log to TensorBoard files in --out, too")
    log_every: int = opt(10, "steps between log lines", low=1)
    device: str = opt("auto", "auto: cuda, else cpu (mps is untested)", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = opt("auto", "auto: bfloat16 where it is native, else float32", choices=("auto", "float32", "bfloat16"))
    compile: bool = opt(False, "torch.compile; on CUDA the default is on")
    remat: bool = opt(False, "compute each block again in backward: less memory, a third more time")
    threads: int = opt(0, "CPU threads; 0: torch decides")

    def __post_init__(self):
        check(self)


PAPER = dict(batch_size=8, grad_accum=16, seq_len=4096, warmup=1000, eval_every=500)       # 0.5M tokens a step: App. E
TRAIN_SIZES = {                                               # differences from the defaults above, like models.SIZES
    "tiny": dict(optimizer="muon", lr=1.2e-2, embed_lr=10.0, gate_lr=0.1, muon_lr=4e-2, steps=500, eval_every=200),
    "baby": dict(steps=5000, batch_size=64, lr=1e-3, warmup=100, eval_every=250),
    **{name: dict(PAPER, steps=3000, lr=3e-3) for name in ("34m", "54m", "67m")},             # 1.5 billion tokens
    "195m": dict(PAPER, steps=8000, lr=3e-3),
    "170m": dict(PAPER, steps=30_000, lr=3e-3),               # peak rates and numbers of tokens: Table 7
    "340m": dict(PAPER, steps=30_000, lr=1.5e-3),
    "760m": dict(PAPER, steps=60_000, lr=1.25e-3),
    "1.3b": dict(PAPER, steps=200_000, lr=7e-4),
}
NO_FLAG = "vocab_size", "mixer"                               # which the tokenizer and the preset decide
LAUNCH = {"out", "resume", "device", "compile", "threads", "wandb", "tensorboard"}    # never read from a checkpoint
FREE = LAUNCH | {"data", "steps", "eval_every", "log_every", "remat", "telemetry"}            # may differ on --resume
KEPT = {"model", "size", "tokenizer", "bpe_size"}             # that of the checkpoint on --init


def settings(given, old=None):
    """Flags that were given, and the checkpoint of --resume or --init, if any -> TrainConfig, Config.

    A new run has defaults < size < preset < flags. --init puts its network in the place of size and preset.
    """
    resume, was = given.get("resume"), {**old["config"], **old["train"]} if old else {}
    for name in given.keys() - FREE if resume else given.keys() & KEPT & was.keys():
        if given[name] != was[name]:
            remedy = "" if name in KEPT else ", or begin a new run with these weights: --init CHECKPOINT --out FOLDER"
            raise UserError(f"{flag(name)} is {was[name]} in {old['path']}, not {given[name]}; drop the flag{remedy}")
    size = was.get("size", given.get("size", "auto"))
    if size == "auto":
        size = "baby" if given.get("device") != "cpu" and torch.cuda.is_available() else "tiny"
    run = {name: was[name] for name in (old["train"].keys() - LAUNCH if resume else KEPT & was.keys())}
    network = old["config"] if old else {**SIZES[size], **PRESETS[given.get("model", TrainConfig.model)]}
    ours = given.keys() & {f.name for f in fields(TrainConfig)}
    run = {**TRAIN_SIZES[size], **run, **{name: given[name] for name in ours}, "size": size}
    tc, config = TrainConfig(**run), Config(**{**network, **{name: given[name] for name in given.keys() - ours}})
    if tc.telemetry and (config.mixer != "memory" or config.shard):
        raise UserError(f"--telemetry: {tc.model} has no memory, or one in shards; drop the flag")
    if not resume and "warmup" not in given:
        tc.warmup = min(tc.warmup, tc.steps // 10)
    return tc, config


# ---- a step

def lr_scale(step, tc):
    """The factor of the peak rates at `step`, from 0: linear warmup, then linear decay to 0 at --steps."""
    return min((step + 1) / max(tc.warmup, 1), 1 - step / tc.steps)


def train_step(model, optimizers, tc, ids, step, scale, device, dtype):
    """One outer step at `scale` times the peak rates -> loss, gradient norm. Raises Halt if one is not finite."""
    x, y = (a.to(device) for a in batch(ids, tc.seed, step, tc.batch_size * tc.grad_accum, tc.seq_len))
    passes, loss = list(zip(x.split(tc.batch_size), y.split(tc.batch_size))), 0.0
    for x, y in passes[RANK::PROCESSES]:
        with autocast(device, dtype):
            share = model.loss(x, y) / tc.grad_accum
        share.backward()
        loss = loss + share.detach()
    if PROCESSES > 1:
        for a in (loss, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(a)
    return update(model, optimizers, tc, step, scale, loss)


def update(model, optimizers, tc, step, scale, loss):
    """Clips the gradient and takes a step along it, at `scale` times the peak rates -> loss, norm. Halt as above."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), tc.grad_clip or math.inf)
    loss, norm = float(loss), float(norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise Halt(f"step {step + 1}: loss {loss}, gradient norm {norm}; stopped before the update, saved files are "
                   f"intact; lower {'--lr or --muon-lr' if step else '--max-step'}")
    for optimizer in optimizers:
        peak = tc.muon_lr if isinstance(optimizer, Muon) else tc.lr
        for group in optimizer.param_groups:
            group["lr"] = peak * group.get("times", 1.0) * scale
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(model, ids, seq_len, batch_size=1, max_windows=0, carry=False, dtype=torch.float32):
    """Mean loss in nats a token over a split cut into windows of seq_len, or about max_windows of them, evenly spaced.

    The memory starts anew in each window. With carry=True it reads the split as batch_size long streams instead.
    """
    device, was_training, state = next(model.parameters()).device, model.training, None
    every = max(1, (len(ids) - 1) // seq_len // max_windows) if max_windows else 1
    total, n = 0.0, 0
    model.eval()
    for x, y in streams(ids, seq_len, batch_size) if carry else windows(ids, seq_len, batch_size, every):
        # shapes that come once, as a last window or the length of a cache, are not worth compiling
        odd = x.shape != (batch_size, seq_len) or carry and model.config.mixer == "attention"
        x, y = x.to(device), y.to(device)
        with autocast(device, dtype), torch.compiler.set_stance("force_eager") if odd else nullcontext():
            logits, after = model(x, state)
        total += F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum").item()
        n += y.numel()
        state = detach(after) if carry else None
    model.train(was_training)
    return total / n


# ---- the loop

COLUMNS = ["step", "loss", "val", "grad_norm", "lr", "tokens_per_s", "seconds"]       # of log.csv; then of --telemetry
MEMORY = [f"memory/{name}" for name in ("keep", "step", "momentum", "gate", "surprise", "untaught", "written", "S",
                                        "share", "mixing", "mixing_spread")]


def telemetry(model, ids, tc, dtype):
    """Means of models.probe over the first validation windows and all layers -> {"memory/keep": .., ..}"""
    x = next(windows(ids, tc.seq_len, tc.batch_size))[0].to(next(model.parameters()).device)
    with autocast(x.device, dtype):
        found = probe(model.eval(), x)
    model.train()
    for at in found:
        at |= {"mixing_spread": at["mixing"].std((0, 1))} if "mixing" in at else {}
    return {f"memory/{name}": round(sum(at[name].float().mean().item() for at in found) / len(found), 6)
            for name in found[0]}


def loggers(tc, run):
    """Functions that take each logged row, besides log.csv."""
    told = []
    if tc.wandb:
        import wandb
        wandb.init(project="atlas", name=tc.out, config={**run["train"], **run["config"]})
        told.append(lambda row: wandb.log(row, step=row["step"]))
    if tc.tensorboard:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(tc.out)
        told.append(lambda row: [writer.add_scalar(name, row[name], row["step"]) for name in row] and writer.flush())
    return told


def train(model, optimizers, run, tc, splits, device, dtype):
    """The loop from run["step"] on -> the number of the signal that stopped it, or None after --steps."""
    out, first, told = Path(tc.out), run["step"], [] if RANK else loggers(tc, run)
    validate = partial(evaluate, model, splits[1], tc.seq_len, tc.batch_size, tc.eval_windows, dtype=dtype)
    if first == 0:
        run["start"] = validate()
        say(f"step {0:5d}/{tc.steps}  val {run['start']:.4f}")
    began = time.perf_counter() - run["seconds"]
    with noted_signals() as noted:
        for step in range(first + 1, tc.steps + 1):
            tick, scale = time.perf_counter(), lr_scale(step - 1, tc)
            torch.manual_seed(tc.seed + RANK + step * PROCESSES)     # of dropout: a function of (seed, step, process)
            for m in model.modules():
                if isinstance(m, Wiring):
                    m.floor = floor(m.config, (step - 1) / tc.steps)
            loss, norm = train_step(model, optimizers, tc, splits[0], step - 1, scale, device, dtype)
            speed = tc.batch_size * tc.grad_accum * tc.seq_len / (time.perf_counter() - tick)
            if step == first + 1 and RANK == 0:               # only now that a step has worked are older files touched
                begin_files(out, run)
            val = validate() if step % tc.eval_every == 0 or step == tc.steps else None
            run.update(step=step, seconds=time.perf_counter() - began, val=val)
            if val is not None or step % tc.log_every == 0 or step == 1:
                eta = timedelta(seconds=int((tc.steps - step) * run["seconds"] / step))
                say(f"step {step:5d}/{tc.steps}  loss {loss:.4f}  grad norm {norm:.2f}  lr {tc.lr * scale:.2e}  "
                    f"{speed:,.0f} tokens/s  eta {eta}" + ("" if val is None else f"  val {val:.4f}"))
                row = dict(step=step, loss=round(loss, 6), val=val and round(val, 6), grad_norm=round(norm, 4),
                           lr=float(f"{tc.lr * scale:.3g}"), tokens_per_s=round(speed),
                           seconds=round(run["seconds"], 1))
                if tc.telemetry and val is not None:
                    row |= telemetry(model, splits[1], tc, dtype)
                with open(os.devnull if RANK else out / "log.csv", "a") as log:
                    csv.DictWriter(log, COLUMNS + MEMORY * tc.telemetry, lineterminator="\n").writerow(row)
                for tell in told:
                    tell({name: value for name, value in row.items() if value is not None})
            if val is not None and val < run["best"]:         # never true of nan
                run["best"] = val
                save_checkpoint(out / "best.pt", run, model, optimizers)
            number = torch.tensor(noted[0] if noted else 0, device=device)
            if PROCESSES > 1:                                 # all stop, whichever has had the signal
                dist.all_reduce(number, dist.ReduceOp.MAX)
            if val is not None or number:
                save_checkpoint(out / "ckpt.pt", run, model, optimizers)
            if number and step < tc.steps:
                say(f"stopped after step {step}; to go on: python train.py --resume --out {tc.out!r}")
                return int(number)


@contextmanager
def noted_signals():
    """Within, the first Ctrl-C or SIGTERM is added to the list that this yields; a second one stops at once."""
    noted = []

    def note(number, frame):
        if noted and PROCESSES == 1:                          # torchrun passes on a Ctrl-C that all have had already
            raise KeyboardInterrupt(number)
        noted.append(number)
        with suppress(OSError):                               # the same Ctrl-C may have ended `2>&1 | tee log`
            os.write(2, b"\nfinishing this step, then saving; once more stops at once\n")
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(model, run, tc, splits, tokenizer, device, dtype):
    """What the best weights make of the whole validation split, and a sample."""
    ckpt = load_checkpoint(tc.out)
    model.load_state_dict(ckpt["model"])
    say(f"\nbest step {ckpt['step']} on the whole validation split, in windows of {tc.seq_len}:")
    loss = report(model, tokenizer, splits[1], tc.seq_len, tc.batch_size, dtype)
    how = dict(temperature=0.8, generator=torch.Generator(device).manual_seed(tc.seed))
    say("\n" + "".join(continue_text(model, tokenizer, encode_prompt(tokenizer, ""), SAMPLE, **how)) + "\n")
    if device.type == "cuda":
        say(f"peak memory on the GPU: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
    if run["val"] <= run["start"]:
        say(f"done: {tc.model} on {run['data']['used']}, best validation loss {loss:.4f} nats/token, "
            f"{loss / math.log(2):.4f} bits/token (whole split), {timedelta(seconds=int(run['seconds']))}")
    else:                                                     # or nan
        say(f"warning: the validation loss rose from {run['start']:.4f} before the first step to {run['val']:.4f}; "
            "lower --lr and --muon-lr")


def report(model, tokenizer, ids, seq_len, batch_size, dtype=torch.float32):
    """Says the mean loss of a split, memory reset at each window and carried -> the former, in nats a token."""
    losses = []
    for carry, name in ((False, "memory reset at each window"), (True, f"memory carried, {batch_size} streams")):
        # where the state holds every token, each costs more than the last
        part = ids[: batch_size * LONGEST + 1] if carry and holds_all(model.config) else ids
        losses.append(evaluate(model, part, seq_len, batch_size, carry=carry, dtype=dtype))
        bits = losses[-1] / math.log(2)
        say(f"  {name:27s}  {len(part):,} tokens  {losses[-1]:.4f} nats/token  {bits:.4f} bits/token  "
            f"{bits / tokenizer.bytes_a_token(part):.4f} bits/byte")
    return losses[0]


def encode_prompt(tokenizer, prompt):
    """The ids to start from; for an empty prompt that of a newline, or id 0 where the vocabulary has none."""
    return tokenizer.encode(prompt) if prompt else [tokenizer.tokens.index(b"\n") if b"\n" in tokenizer.tokens else 0]


def continue_text(model, tokenizer, ids, n, **how):
    """Yields what the model writes after `ids`, piece by piece, n tokens in all; `how` goes to model.generate."""
    feed = tokenizer.stream()
    tokens = torch.as_tensor(ids, device=next(model.parameters()).device)[None]
    for token in model.eval().generate(tokens, n, **how):
        yield feed(token)
    yield feed(final=True)


# ---- checkpoints

def save_checkpoint(path, run, model, optimizers):
    """The whole state of a run, all or nothing: written beside the target, synced, then renamed over it."""
    if RANK:
        return
    state = dict(run, format=FORMAT, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers])
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as fault:                  # torch tells of a full disk by a RuntimeError
        raise Halt(f"cannot write {path} ({fault}); disk full? The checkpoint saved before is intact") from None


def load_checkpoint(path, text=True):
    """A checkpoint file, or the best (else the last) of a folder -> dict, with its "path". text: as train.py's."""
    path = Path(path)
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "ckpt.pt")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if ckpt["format"] != FORMAT or text and "tokenizer" not in ckpt:
            raise ValueError
    except Exception as fault:                                # its type depends on what the file is
        raise UserError(f"cannot load {path} ({type(fault).__name__}): missing, damaged, or no checkpoint of this "
                        "version of train.py, which makes one in --out") from None
    return dict(ckpt, path=str(path))


def rebuild(ckpt, config=None):
    """The model, with this Config or its own, and the tokenizer of a checkpoint."""
    model = LM(config or Config(**ckpt["config"]))
    try:
        model.load_state_dict(ckpt["model"])
    except RuntimeError:
        raise UserError(f"the weights of {ckpt['path']} do not fit; drop flags that change shapes") from None
    return model, Tokenizer(**ckpt["tokenizer"])


def begin_files(out, run):
    """Makes the folder ready for the steps after this one. A new run moves what an earlier one left to OUT/old-N."""
    left = [out / name for name in ("ckpt.pt", "best.pt", "log.csv", "config.json") if (out / name).exists()]
    if left and run["step"] == 0:
        old = next(p for p in (out / f"old-{n}" for n in count(1)) if not p.exists())
        old.mkdir()
        for path in left:
            os.replace(path, old / path.name)
        say(f"an earlier run lay in {out}; it is now in {old}")
    log = out / "log.csv"
    rows = log.read_text().splitlines()[1:] if log.exists() else []
    rows = [row for row in rows if int(row.partition(",")[0]) <= run["step"]]
    with replacing(log) as temporary:                         # without what a killed run logged but did not save
        temporary.write_text("\n".join([",".join(COLUMNS + MEMORY * run["train"]["telemetry"]), *rows, ""]))
    (out / "config.json").write_text(json.dumps({key: run[key] for key in ("train", "config", "data")}, indent=1))


# ---- what all programs share: pictures, the command line, the device

COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"      # Okabe, Ito: for all eyes


def need(package):
    """UserError where it is missing: to be asked before the work."""
    if not importlib.util.find_spec(package):
        raise UserError(f"this needs {package}: pip install {package}")


def picture(path, lines, x, y, log="", level=None):
    """Draws lines {label: (xs, ys)}, or (xs, ys, spreads), with axes named x and y. log: which axes are logarithmic.

    level: a dotted line, as of guessing.
    """
    need("matplotlib")
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    ax = figure.subplots()
    for i, (label, (xs, ys, *spreads)) in enumerate(lines.items()):
        style = dict(color=COLOURS[i % 7], marker="os^vDPX"[i % 7], markersize=4, markevery=max(1, len(xs) // 12))
        ax.plot(xs, ys, label=label, linestyle=("-", "--", ":")[i // 7 % 3], **style)
        for a in spreads:
            low, high = ([b + sign * c for b, c in zip(ys, a)] for sign in (-1, 1))
            ax.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if level is not None:
        ax.axhline(level, color="gray", linestyle=":", label="by guessing")
    ax.set(xlabel=x, ylabel=y)
    for axis in log:
        getattr(ax, f"set_{axis}scale")("log", base=2)
        getattr(ax, f"{axis}axis").set_major_formatter("{x:,g}")
    ax.grid(alpha=0.3)
    figure.legend(loc="outside upper center", fontsize=8, ncols=2 if len(lines) > 1 else 1)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
    say(f"wrote {path}")


class Halt(Exception):
    """Ends a program with one line and exit code 1: not the user's mistake, and saved files are intact."""


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one line instead of its whole usage."""

    def __init__(self, **how):
        style = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=118)
        super().__init__(usage="python %(prog)s [flags]", allow_abbrev=False, formatter_class=style, **how)

    def error(self, message):
        self.exit(2, f"error: {message} (python {self.prog} --help lists the flags)\n")


def add_flags(group, cls, presets, skip=()):
    """One flag for each field of a dataclass. A flag that was not given is absent from the result."""
    for f in fields(cls):
        if f.name not in skip:
            how = dict(type=f.type, choices=f.metadata["choices"])
            how = dict(action=argparse.BooleanOptionalAction) if f.type is bool else how
            text = f"{f.metadata['help']} [{presets.get(f.name, f.default)}]".replace("%", "%%")
            group.add_argument(flag(f.name), default=argparse.SUPPRESS, help=text, **how)


def at_least(kind, low, high=2**31 - 1):
    """An argparse type: a number in [low, high]."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:                          # false for nan, too
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return value
    return number


def say(text):
    """A line on stdout. A run outlives its reader, as `| head`, for it has things to save."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")


def exit_code(task):
    """task() -> its exit code; what a user can be told in one line is told on stderr."""
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")            # a sample has letters that a terminal lacks
    try:
        return task() or 0
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")                    # or it would fail again at exit
        return 0
    except KeyboardInterrupt as fault:
        code, message = 128 + (fault.args or (signal.SIGINT,))[0], "stopped; files that were saved are intact"
    except (UserError, ConfigError, Halt, OSError) as fault:
        code, message = 1 if isinstance(fault, (Halt, OSError)) else 2, fault
    except (MemoryError, RuntimeError) as fault:
        if not any(words in repr(fault) for words in ("MemoryError", "out of memory", "allocate memory")):
            raise
        code, message = 1, "out of memory; lower --batch-size, --seq-len, --chunk or the size, or train with --remat"
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def setup(device_name, threads=0):
    """The torch.device of a --device, with torch set up for speed. To be called before the first product."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device_name == "auto" else device_name
    if not torch.get_device_module(name).is_available():
        raise UserError(f"--device {name}: torch {torch.__version__} finds no such device here; use --device cpu")
    torch.set_flush_denormal(True)                            # decayed gates fall below 1e-38, where Intel cores crawl
    if threads:
        torch.set_num_threads(threads)
    cpu = getattr(torch.cpu, "get_capabilities", dict)()
    if name == "cuda":
        torch.set_float32_matmul_precision("high")            # TF32
    elif cpu.get("avx512_f") and cpu.get("sse4a"):            # an AMD core: no Intel core has SSE4a
        torch.set_float32_matmul_precision("medium")          # oneDNN instead of MKL, which uses half of such a core
        a = torch.full((64, 64), 1 + 2**-12)
        if (a @ a)[0, 0] <= 64.01:                            # bfloat16 rounds a to 1: not exact on this core
            torch.set_float32_matmul_precision("highest")
    return torch.device(name)


def pick_dtype(name, device):
    """The torch.dtype of a --dtype."""
    return getattr(torch, ("bfloat16" if native_bfloat16(device) else "float32") if name == "auto" else name)


def autocast(device, dtype):
    """Within, products outside of the memory are in bfloat16, if that is the dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


# ---- a run

def parse(argv=None):
    """-> dict of the flags that were given."""
    parser = Parser(prog="train.py", description=__doc__, epilog="In [] is what tiny and atlas have. Flags win over "
                    "--model (models.PRESETS), that over --size (models.SIZES, TRAIN_SIZES).")
    presets = {**TRAIN_SIZES["tiny"], **SIZES["tiny"], **PRESETS[TrainConfig.model]}
    add_flags(parser.add_argument_group("the run"), TrainConfig, presets)
    add_flags(parser.add_argument_group("the network"), Config, presets, skip=NO_FLAG)
    add = parser.add_argument_group("no run").add_argument
    add("--plot", nargs="+", metavar="OUT", default=argparse.SUPPRESS,
        help="train nothing; draw the log.csv of these folders in the first: curves.png, of --telemetry share.png")
    return vars(parser.parse_args(argv))


def plot(folders):
    """Draws the losses of runs over their steps, and what --telemetry saw of the memory's share."""
    lines, shares = {}, {}
    for out in map(Path, folders):
        try:
            rows = list(csv.DictReader((out / "log.csv").open()))
            train_loss, val = ([(int(r["step"]), float(r[key])) for r in rows if r[key]] for key in ("loss", "val"))
            lines |= {f"{out}, {name}": zip(*at) for name, at in (("training", train_loss), ("validation", val)) if at}
            if share := [(int(r["step"]), float(r["memory/share"])) for r in rows if r.get("memory/share")]:
                shares[str(out)] = zip(*share)
        except (OSError, KeyError, ValueError) as fault:
            raise UserError(f"cannot read {out / 'log.csv'}: {fault}; give --plot folders of runs") from None
    picture(Path(folders[0], "curves.png"), lines, "step", "loss [nats/token]")
    if shares:
        picture(Path(folders[0], "share.png"), shares, "step", "share of what the memory wrote", log="y")


def join(device, passes):
    """Makes this process one of torchrun's, which share the passes of each step -> its device."""
    if passes % PROCESSES:
        raise UserError(f"--grad-accum {passes} is no multiple of the {PROCESSES} processes, which share its passes")
    if RANK:
        sys.stdout = open(os.devnull, "w")                    # process 0 talks
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def compile_model(model, x, y, dtype):
    """Compiles, and tries it on one batch. Where that fails, says so and goes on without."""
    try:
        model.compile_memory()
        with autocast(x.device, dtype):
            loss = model.loss(x, y)
        loss.backward()
    except Exception as fault:                                # one that is not the compiler's comes again without it
        torch.compiler.set_stance("force_eager")
        say(f"warning: torch.compile failed, going on without it: {str(fault).partition(chr(10))[0]}")
    model.zero_grad()


def launch(given):
    """A run, from its flags to its last line -> exit code."""
    if "plot" in given:
        return plot(given["plot"])
    resume = given.get("resume")
    source = Path(given.get("out", TrainConfig.out), "ckpt.pt") if resume else given.get("init")
    old = load_checkpoint(source) if source else None
    tc, config = settings(given, old)
    if resume and old["step"] >= tc.steps:
        say(f"nothing to do: {tc.out} has {old['step']} of {tc.steps} steps; --steps N trains it longer")
        return 0
    for package in ("wandb", "tensorboard"):
        if getattr(tc, package):
            need(package)
    device = setup(tc.device, tc.threads)
    if PROCESSES > 1:
        device = join(device, tc.grad_accum)
    dtype = pick_dtype(tc.dtype, device)
    tc.compile = given.get("compile", device.type == "cuda")
    corpus = read(tc.data)
    data = dict(used=corpus.used, sha256=corpus.sha256)
    if resume and data["sha256"] != old["data"]["sha256"]:
        raise UserError(f"{tc.out} was trained on another text than --data {tc.data}: {old['data']['used']}; give that")
    torch.manual_seed(tc.seed)
    if old:
        model, tokenizer = rebuild(old, config)
    else:
        tokenizer = make_tokenizer(tc.tokenizer, corpus.text, tc.bpe_size)
        model = LM(replace(config, vocab_size=tokenizer.vocab_size))
    splits = corpus.splits(tokenizer, tc.seq_len)
    model.to(device).train().remat = tc.remat
    run = old if resume else dict(step=0, best=math.inf, seconds=0.0, start=None)
    run = {key: run[key] for key in ("step", "best", "seconds", "start")}
    run.update(preset=tc.model, config=asdict(model.config), train=asdict(tc), tokenizer=tokenizer.state(), data=data)
    say(f"model    {tc.model}, {tc.size}: {model.num_params():,} parameters, settings in {tc.out}/config.json\n"
        f"data     {corpus.used}: {len(splits[0]):,} tokens to train, {len(splits[1]):,} to validate, "
        f"{tokenizer.kind} vocabulary of {tokenizer.vocab_size:,}\n"
        f"device   {torch.cuda.get_device_name() if device.type == 'cuda' else device.type} x {PROCESSES}, threads: "
        f"{torch.get_num_threads()}, {str(dtype)[6:]}, float32 products: {torch.get_float32_matmul_precision()}"
        + ", compiling .." * tc.compile)
    optimizers = make_optimizers(model, tc)
    for optimizer, state in zip(optimizers, old["optimizers"] if resume else ()):
        optimizer.load_state_dict(state)
    if tc.compile:
        compile_model(model, *(a.to(device) for a in batch(splits[0], tc.seed, 0, tc.batch_size, tc.seq_len)), dtype)
    stopped = train(model, optimizers, run, tc, splits, device, dtype)
    if PROCESSES > 1:
        dist.barrier()                                        # torchrun ends all when one ends: not before 0 has saved
        dist.destroy_process_group()
    if stopped:
        return 128 + stopped
    if RANK == 0:
        finish(model, run, tc, splits, tokenizer, device, dtype)


def main(argv=None):
    return exit_code(lambda: launch(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
