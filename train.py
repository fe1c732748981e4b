"""train.py - the outer loop: text in, checkpoints and a log out. The inner loop, which learns as it reads: omega.py.

    python train.py                                      the default ATLAS: tiny, on CUDA baby
    python train.py --data my.txt --degree 1 --no-muon   your own text; nearly every field of models.Config is a flag
    python train.py --plot out out2                      draw the curves of runs
    python train.py --resume                             go on where OUT/ckpt.pt stopped (--steps N: train longer)
    python train.py --init out --data my.txt --out new   begin a new run with the weights of another
    torchrun --nproc-per-node 8 train.py --size 340m --data tokens --tokenizer gpt2                on 8 GPUs
"""
import csv
import json
import math
import os
import shlex
import sys
import time
from argparse import SUPPRESS
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import (DEVICES, Halt, Parser, UserError, add_flags, autocast, check, chosen, exit_code,
                    flag, locked, native_bfloat16, need, noted_signals, opt, pick_dtype, plot,
                    replacing, save_file, say, setup)
from data import (BORDER, TOKENIZERS, Tokenizer, batch, continue_text, documents, encode_prompt, make_tokenizer, read,
                  repeated, streams, windows)
from models import LM, PRESETS, SIZES, Config, holds_all, sized
from muon import newton_schulz

LOGGERS = "wandb", "tensorboard"
RANK, PROCESSES = (int(n) if n.isdecimal() else -1 for n in map(os.environ.get, ("RANK", "WORLD_SIZE"), "01"))
FORMAT = 8                                                    # of checkpoints
BETA2 = 0.95                                                  # decay of AdamW's second moment
EVAL_WINDOWS = 64                                             # about, of validation while training, evenly spaced
REPORT_TOKENS = 2_000_000                                     # of validation at the end, at most
SAMPLE = 200                                                  # tokens of the sample at the end


# ---- settings: each field is a flag
@dataclass
class TrainConfig:
    """Hold everything about a run that is not the network."""
    model: str = opt("atlas", "architecture: a preset of models.py", tuple(PRESETS))
    size: str = opt("auto", "size of the network and of the run; auto: baby on CUDA, else tiny", ("auto", *SIZES))
    data: str = opt("shakespeare", "shakespeare, pydoc, a file, a folder, or a mix by weight: a.txt:0.4,b.jsonl:0.6")
    tokenizer: str = opt("char", "what a token is; gpt2: the byte pairs of GPT-2", TOKENIZERS)
    out: str = opt("out", "folder for ckpt.pt, best.pt, log.csv, config.json; an earlier run moves to OUT/old-N")
    resume: bool = opt(False, "go on from OUT/ckpt.pt; --lr may be lower, --steps, --device and logs may differ")
    init: str = opt("", "a checkpoint or its folder: begin a new run with its network, weights and tokenizer")
    steps: int = opt(600, "optimizer steps", low=1)
    seed: int = opt(1337, "seed of weights, batches and dropout", high=2**40)
    batch_size: int = opt(8, "sequences in a forward pass", low=1)
    grad_accum: int = opt(1, "forward passes in a step", low=1)
    seq_len: int = opt(256, "tokens in a sequence", low=1)
    repeats: float = opt(0.0, "share of windows that read a passage twice, at first many times", high=1)
    documents: bool = opt(False, "train on each document (row of .jsonl, file) with a new memory, at a chunk's border")
    optimizer: str = opt("adamw", "outer optimizer; muon trains hidden matrices, AdamW the rest", ("adamw", "muon"))
    lr: float = opt(2e-3, "peak learning rate of AdamW; it falls linearly to 0 at the last step")
    embed_lr: float = opt(1.0, "learning rate of the embedding, in multiples of --lr")
    gates_lr: float = opt(1.0, "learning rate of keep, step, momentum and gamma, in multiples of --lr")
    outer_muon_lr: float = opt(2e-2, "peak learning rate of the outer Muon (the inner one has none)")
    weight_decay: float = opt(0.1, "weight decay of hidden matrices; nothing else decays")
    warmup: int = opt(20, "steps of linear warmup; by default at most a tenth of --steps")
    eval_every: int = opt(100, "steps between validations, each of which saves the checkpoint", low=1)
    log_to: str = opt("csv", "log to Weights & Biases or to TensorBoard files in --out, too", ("csv", *LOGGERS))
    log_every: int = opt(10, "steps between log lines", low=1)
    device: str = opt("auto", "auto: cuda, else cpu (mps is untested)", DEVICES)
    dtype: str = opt("auto", "auto: bfloat16 where it is native, else float32",
                     ("auto", "float32", "bfloat16"))
    compile: bool = opt(False, "torch.compile; on CUDA the default is on")
    remat: bool = opt(False, "compute each block again in backward: less memory, a third more time")
    threads: int = opt(0, "CPU threads; 0: torch decides")

    def __post_init__(self):
        check(self)


PAPER = dict(batch_size=8, grad_accum=16, seq_len=4096, warmup=1000, eval_every=500)       # 0.5M tokens a step: App. E
TRAIN_SIZES = {                                               # differences from the defaults above, like models.SIZES
    "tiny": dict(optimizer="muon", lr=1.2e-2, embed_lr=10.0, gates_lr=0.1, outer_muon_lr=4e-2, steps=500,
                 eval_every=200),
    "baby": dict(steps=5000, batch_size=64, lr=1e-3, warmup=100, eval_every=250),
    **{name: dict(PAPER, steps=3000, lr=3e-3) for name in "34m 54m 67m".split()},     # 1.5e9 tokens
    "195m": dict(PAPER, steps=8000, lr=3e-3),
    "170m": dict(PAPER, steps=30_000, lr=3e-3),               # peak rates and numbers of tokens: Table 7
    "340m": PAPER | dict(batch_size=4, grad_accum=32, steps=30_000, lr=1.5e-3),   # as fits 80 GB
    "760m": PAPER | dict(batch_size=2, grad_accum=64, steps=60_000, lr=1.25e-3),
    "1.3b": PAPER | dict(batch_size=2, grad_accum=64, steps=200_000, lr=7e-4),
}
NO_FLAG = "vocab_size", "attention", "embed_lr"               # which tokenizer, preset and size decide
LAUNCH = {*"out resume device compile threads log_to".split()}     # never from a checkpoint
FREE = LAUNCH | {*"data steps eval_every log_every remat".split()}         # may differ on --resume
KEPT = {"model", "size", "tokenizer"}                         # --init takes them from the checkpoint


def keep_to(old, names, given):
    """Raise UserError for a given flag of these names that differs from the checkpoint. Say where it lowers a rate."""
    was = old["config"] | old["train"]
    for name in names:
        if name in ("lr", "outer_muon_lr") and given[name] < was[name]:
            say(f"{flag(name)} is {given[name]} from here on, {was[name]} before")
        elif given[name] != was[name]:
            raise UserError(f"{flag(name)} is {was[name]} in {old['path']}, not {given[name]}; drop the flag")


def settings(given, old=None):
    """Return TrainConfig and Config from the given flags and the checkpoint of --resume or --init, if there is one. A
    new run takes defaults < size < preset < flags. With --init the old network takes the place of size and preset."""
    resume, was = given.get("resume"), old["train"] if old else {}
    if old:
        keep_to(old, given.keys() - FREE if resume else given.keys() & KEPT, given)
    size = was.get("size", given.get("size", "auto"))
    if size == "auto":
        size = "baby" if given.get("device") != "cpu" and torch.cuda.is_available() else "tiny"
    kept = {name: was[name] for name in (was.keys() - LAUNCH if resume else KEPT & was.keys())}
    network = old["config"] if old else sized(given.get("model", TrainConfig.model), size)
    values = TRAIN_SIZES[size] | network | kept | given | {"size": size}
    tc, config = (cls(**chosen(values, cls)) for cls in (TrainConfig, Config))
    if tc.documents and (config.forget == "zero" or config.wiring != "lmm" and config.persistent):
        raise UserError("--documents needs --forget start, and with --wiring also --persistent 0")
    if tc.repeats and tc.seq_len < 32:
        raise UserError(f"--repeats needs a --seq-len of 32 or more, not {tc.seq_len}")
    if tc.grad_accum % PROCESSES:
        raise UserError(f"--grad-accum {tc.grad_accum} is no multiple of the number of processes, {PROCESSES}")
    if not resume and "warmup" not in given:
        tc.warmup = min(tc.warmup, tc.steps // 10)
    return tc, config


# ---- what is trained, and by what
class Muon(torch.optim.Muon):
    """torch.optim.Muon, which computes in bfloat16. With bfloat16 = False it computes in the type of the
    gradients: on a CPU without bfloat16 float32 is 30 times as fast.

    B <- mu B + (1 - mu) g,   p <- (1 - lr decay) p - lr sqrt(max(1, rows / columns)) NS((1 - mu) g + mu B)

    mu is the momentum, decay the weight decay. The options are torch's, but for eps.
    """
    bfloat16 = False                                          # True where the device has instructions for it

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step for all parameters that have a gradient -> what the closure returns, if given."""
        if self.bfloat16:
            return super().step(closure)
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                update = self.direction(p, group)[None]
                update, = newton_schulz(update, group["ns_steps"], group["ns_coefficients"])
                rows, columns = p.shape
                longer = max(1, rows / columns) ** 0.5
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    longer = 0.2 * max(rows, columns) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * longer)
        return loss

    def direction(self, p, group):
        """Return what Newton-Schulz takes for the parameter p: its momentum, moved on by the gradient."""
        B = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        B.lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(B, group["momentum"]) if group["nesterov"] else B


def make_optimizers(model, tc, bfloat16=False):
    """Return [AdamW], or with tc.optimizer "muon" [AdamW, Muon], where Muon has the hidden matrices, which decay. The
    embedding, head, norms, gates, convolutions and M0 do not (choice 20). bfloat16: whether Muon computes in it."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    embed, gates, hidden, rest = [], [], [], []
    for name, p in model.named_parameters():
        other = hidden if id(p) in linear and not name.startswith("head.") else rest
        (embed if name.startswith("embed.") else gates if ".gates." in name else other).append(p)
    groups = [dict(params=embed, times=tc.embed_lr), dict(params=rest), dict(params=gates, times=tc.gates_lr)]
    adamw = lambda *more: torch.optim.AdamW([*groups, *more], tc.lr, (0.9, BETA2), weight_decay=0.0, fused=True)
    if tc.optimizer == "adamw":
        return [adamw(dict(params=hidden, weight_decay=tc.weight_decay))]
    outer = Muon(hidden, lr=tc.outer_muon_lr, weight_decay=tc.weight_decay)
    outer.bfloat16 = bfloat16
    return [adamw(), outer]


class Task:
    """Define what a run trains and measures: Text below, Episodes and Grok in episodic.py. draw(number, period) returns
    inputs and targets, with mask and reset of documents that begin at multiples of period, as a function of (seed,
    number). `launch` also needs vocab_size, data (what is read), finish(model, run). A checkpoint keeps `saved`."""
    about, saved, columns = "", {}, []
    largest_norm = 1.0                                        # of the gradient, which is clipped

    def __init__(self, tc, device, dtype=torch.float32, old=None):
        self.tc, self.device, self.dtype, self.tokens_read = tc, device, dtype, 0
        self.prepare(tc, old)

    def prepare(self, tc, old):
        """Read the data. old: the dict of the checkpoint that the run begins from, or None."""

    def begin(self, model):
        """Change the starting values of a new model, or say what a new run is about to cost."""

    def inputs(self, model, number):
        """Return what `draw` does, on the device."""
        drawn = self.draw(number, model.config.period())
        if self.device.type == "cuda":
            drawn = [a.pin_memory() for a in drawn]           # else a copy waits
        return [a.to(self.device, non_blocking=True) for a in drawn]

    def loss(self, model, number):
        inputs = self.inputs(model, number)
        self.tokens_read += inputs[0].numel()
        with autocast(self.device, self.dtype):
            return model.loss(*inputs)

    def optimizers(self, model):
        """Return the optimizers of the model, each made with its peak learning rate."""
        return make_optimizers(model, self.tc, native_bfloat16(self.device))

    def measure(self, model):
        """Return {column: value} of a validation; best.pt has the least "val"."""
        return {}


class Text(Task):
    """Predict the next token of a text."""
    columns = ["val"]

    def prepare(self, tc, old):
        corpus = read_text(tc.data, old)
        tokenizer = Tokenizer(**old["tokenizer"]) if old else make_tokenizer(tc.tokenizer, corpus.text)
        self.tokenizer, self.splits = tokenizer, corpus.splits(tokenizer, tc.seq_len)
        self.data, self.vocab_size = dict(used=corpus.used, sha256=corpus.sha256), tokenizer.vocab_size
        self.saved = dict(tokenizer=tokenizer.state)
        several = [part.tokens or BORDER in part.text for part in (corpus, *(part for _, part in corpus.mix))]
        if tc.documents and (tokenizer.end is None or not any(several)):
            raise UserError(f"--documents: {corpus.used} is one text; give .jsonl, a folder or token files")
        self.about = (f"{len(self.splits[0]):,} tokens to train, {len(self.splits[1]):,} to validate, "
                      f"{tokenizer.kind} vocabulary of {self.vocab_size:,}")

    def begin(self, model):
        if self.tc.documents:
            period = model.config.period()
            gaps = 1 - torch.cat([self.draw(i, period)[2] for i in range(32)]).double().mean()
            say(f"--documents: each begins at a multiple of {period} tokens; gaps take {gaps:.1%}")

    def draw(self, number, period):
        tc = self.tc
        x, y = batch(self.splits[0], tc.seed, number, tc.batch_size, tc.seq_len)
        if tc.repeats:
            x, y = repeated(x, y, tc.repeats, number < tc.steps * tc.grad_accum // 8, tc.seed, number)
        return documents(x, y, self.tokenizer.end, period) if tc.documents else (x, y)

    def measure(self, model):
        tc = self.tc
        return dict(val=evaluate(model, self.splits[1], tc.seq_len, tc.batch_size, EVAL_WINDOWS, dtype=self.dtype))

    def finish(self, model, run):
        """Say what the best weights make of the validation split, and let them write a sample."""
        tc, ckpt = self.tc, load_checkpoint(self.tc.out)
        model = rebuild(ckpt)[0].to(self.device)
        say(f"\nbest step {ckpt['step']} on the validation split, in windows of {tc.seq_len}:")
        loss = report(model, self.tokenizer, self.splits[1], tc.seq_len, tc.batch_size, self.dtype)
        torch.manual_seed(tc.seed)
        start = encode_prompt(self.tokenizer, "")
        text = continue_text(model, self.tokenizer, [None, start], SAMPLE, temperature=0.8)
        say(f"\n{''.join(text)}\n")
        if self.device.type == "cuda":
            say(f"peak memory on the GPU: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
        before, after = run["start"]["val"], run["end"]["val"]
        if after <= before:
            say(f"done: {tc.model} on {self.data['used']}, best validation loss {loss:.4f} nats/token, "
                f"{loss / math.log(2):.4f} bits/token, {timedelta(seconds=int(run['seconds']))}")
        else:                                                 # or nan
            say(f"warning: the validation loss rose from {before:.4f} to {after:.4f}; lower --lr and --outer-muon-lr")


@torch.no_grad()
def evaluate(model, ids, seq_len, batch_size=1, max_windows=0, carry=False, dtype=torch.float32):
    """Return the mean nats a token of a model in eval mode over ids in windows of seq_len, or about max_windows of
    them, each with a new memory. carry=True reads ids as batch_size long streams."""
    device, state, total, n = next(model.parameters()).device, None, 0.0, 0
    every = max(1, (len(ids) - 1) // seq_len // max_windows) if max_windows else 1
    for x, y in streams(ids, seq_len, batch_size) if carry else windows(ids, seq_len, batch_size, every):
        # shapes that come once, as a last window or the length of a cache, are not worth compiling
        odd = x.shape != (batch_size, seq_len) or carry and model.config.attention
        with autocast(device, dtype), torch.compiler.set_stance("force_eager") if odd else nullcontext():
            logits, after = model(x.to(device), state)
        total += F.cross_entropy(logits.flatten(0, 1).float(), y.to(device).flatten(), reduction="sum").item()
        n += y.numel()
        if not max_windows and n % max(200_000, len(ids) // 10) < y.numel():      # not too often
            say(f"  .. {n:,} of {len(ids):,} tokens")
        state = after if carry else None
    return total / n


def report(model, tokenizer, ids, seq_len, batch_size, dtype=torch.float32):
    """Say the mean loss of a split, or of its first REPORT_TOKENS, memory reset at each window and
    carried on. Return the former, in nats a token."""
    losses, split, ids = [], len(ids), ids[:REPORT_TOKENS]
    for carry, name in (False, "memory reset at each window"), (True, f"memory carried, {batch_size} streams"):
        # where the state holds every token, each costs more than the last
        part = ids[: batch_size * 16384 + 1] if carry and holds_all(model.config) else ids
        losses.append(evaluate(model, part, seq_len, batch_size, carry=carry, dtype=dtype))
        bits, of = losses[-1] / math.log(2), f" of {split:,}" * (len(part) < split)
        say(f"  {name:27s}  {len(part):,}{of} tokens  {losses[-1]:.4f} nats/token  {bits:.4f} bits/token  "
            f"{bits / tokenizer.bytes_a_token(part):.4f} bits/byte")
    return losses[0]


# ---- the loop
def lr_scale(step, tc):
    """Return the factor of the peak rates at `step`, from 0: linear warmup, then linear decay to 0 at --steps."""
    return min((step + 1) / max(tc.warmup, 1), 1 - step / tc.steps)


def check_finite(step, loss, norm):
    """Raise Halt if the loss or the gradient norm of a step is not finite."""
    if not math.isfinite(float(loss + norm)):
        raise Halt(f"step {step} is not finite: loss {float(loss)}, gradient norm {float(norm)}; stopped, saved files "
                   f"are intact; lower {'--lr or --outer-muon-lr' if step > 1 else '--max-step'}")


def train_step(model, optimizers, task, step):
    """Take outer step `step`, from 0 -> loss, gradient norm, two tensors. On a CPU it raises Halt before the update if
    one is not finite. A GPU would have to wait for that, so `train` asks before it logs or saves."""
    tc, loss = task.tc, 0.0
    for i in range(RANK, tc.grad_accum, PROCESSES):
        share = task.loss(model, step * tc.grad_accum + i) / tc.grad_accum
        share.backward()
        loss = loss + share.detach()
    if PROCESSES > 1:                                         # in one message: hundreds of small ones take longer
        parts = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        dist.all_reduce(together := torch.cat([a.flatten() for a in parts]))
        for a, summed in zip(parts, together.split([a.numel() for a in parts])):
            a.copy_(summed.view_as(a))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), task.largest_norm)
    if task.device.type == "cpu":
        check_finite(step + 1, loss, norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * group.get("times", 1.0) * lr_scale(step, tc)
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def validate(model, task):
    """Return what the task measures of the model in eval mode, and the same in words, without nan."""
    measured = task.measure(model.eval())
    model.train()
    return measured, "".join(f"  {name} {a:.4f}" for name, a in measured.items() if a == a)


def train(model, optimizers, run, task):
    """Train from run["step"] on -> the number of the signal that stopped it, or None. Write no files if not tc.out."""
    tc, logs, out = task.tc, [], Path(task.tc.out) if task.tc.out and not RANK else None
    if run["step"] == 0:
        model.set_floor(0.0)
        run["start"], words = validate(model, task)
        say(f"step {0:5d}/{tc.steps}{words}")
    tick, read_before = time.perf_counter(), task.tokens_read
    began = tick - run["seconds"]
    with noted_signals("finishing this step, then saving", PROCESSES == 1) as noted:
        for step in range(run["step"] + 1, tc.steps + 1):
            last, due = step == tc.steps, step % tc.eval_every == 0
            torch.manual_seed(tc.seed + RANK + step * PROCESSES)     # of dropout: a function of (seed, step, process)
            model.set_floor((step - 1) / tc.steps)
            loss, norm = train_step(model, optimizers, task, step - 1)
            if out and not logs:                              # only now that a step has worked are older files touched
                logs = open_logs(out, run, COLUMNS + task.columns)
            logged, measured, words = last or due or step == 1 or step % tc.log_every == 0, {}, ""
            if logged:                                        # only here a GPU has to catch up
                check_finite(step, loss, norm)
                loss, norm = float(loss), float(norm)
                speed = (task.tokens_read - read_before) * PROCESSES / (time.perf_counter() - tick)
            if (last or due) and not RANK:
                measured, words = validate(model, task)
            run.update(step=step, seconds=time.perf_counter() - began, end=measured)
            if logged:
                rate, eta = tc.lr * lr_scale(step - 1, tc), (tc.steps - step) * run["seconds"] / step
                say(f"step {step:5d}/{tc.steps}  loss {loss:.4f}  grad norm {norm:.2f}  lr {rate:.2e}  "
                    f"{speed:,.0f} tokens/s  eta {timedelta(seconds=int(eta))}{words}")
                row = dict(zip(COLUMNS, (step, loss, norm, rate, speed, run["seconds"]))) | measured
                for log in logs:
                    log({name: float(f"{a:.6g}") if isinstance(a, float) else a for name, a in row.items()})
                tick, read_before = time.perf_counter(), task.tokens_read
            number = noted[0] if noted and (logged or PROCESSES == 1) else 0
            if PROCESSES > 1 and logged:                      # all stop, whichever has had the signal
                dist.all_reduce(most := torch.tensor(number, device=task.device), dist.ReduceOp.MAX)
                number = int(most)
            if number:
                check_finite(step, loss, norm)
            if out and measured.get("val", math.inf) < run["best"]:  # never true of nan
                run["best"] = measured["val"]
                save_checkpoint(out / "best.pt", run, model, optimizers)
            if out and (measured or number):
                save_checkpoint(out / "ckpt.pt", run, model, optimizers)
            if number and not last:
                again = "; to go on: " + shlex.join(["python", sys.argv[0], "--resume", "--out", tc.out])
                say(f"stopped after step {step}{again if tc.out else ''}")
                return int(number)


# ---- logs and checkpoints
COLUMNS = "step loss grad_norm lr tokens_per_s seconds".split()     # of log.csv, before the task's


def open_logs(out, run, columns):
    """Prepare OUT for the steps after run["step"] -> functions that log a row. An earlier run, or a
    log.csv that a power cut or a spreadsheet has damaged, moves to OUT/old-N."""
    step, log, tc, rows = run["step"], out / "log.csv", run["train"], []
    left = ("log.csv" if step else "ckpt.pt best.pt log.csv config.json events.out.*").split()
    with suppress(ValueError):
        if step and log.exists():                             # without what a kill left unsaved
            lines = log.read_text().split()[1:]
            rows, left = [a for a in lines if int(a.partition(",")[0]) <= step], ()
    if left := [path for name in left for path in out.glob(name)]:
        old = next(p for p in (out / f"old-{n}" for n in count(1)) if not p.exists())
        old.mkdir()
        for path in left:
            path.rename(old / path.name)
        say(f"{'a damaged log.csv' if step else 'an earlier run'} lay in {out}; it is now in {old}")
    with replacing(log) as temporary:
        temporary.write_text("\n".join([",".join(columns), *rows, ""]))
    (out / "config.json").write_text(json.dumps({key: run[key] for key in ("train", "config", "data")}, indent=1))
    logs = [csv.DictWriter(log.open("a", buffering=1), columns, lineterminator="\n").writerow]
    if tc["log_to"] == "wandb":
        import wandb
        # without an id it is a new run
        run["wandb"] = wandb.init(project="atlas", id=run["wandb"], resume="allow", config=tc | run["config"]).id
        logs.append(lambda row: wandb.log(row, step=row["step"]))
    if tc["log_to"] == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(out, purge_step=step + 1)
        logs.append(lambda row: [*(writer.add_scalar(name, a, row["step"]) for name, a in row.items()), writer.flush()])
    return logs


def save_checkpoint(path, run, model, optimizers):
    save_file(path, dict(run, format=FORMAT, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers]))


def load_checkpoint(path, text=True):
    """Return the dict of a checkpoint file, or of the best (else last) in a folder. text: it must have a tokenizer."""
    if (path := Path(path)).is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "ckpt.pt")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if ckpt["format"] != FORMAT or text and "tokenizer" not in ckpt:
            raise ValueError("a run of episodic.py" if ckpt["format"] == FORMAT else "of another format")
        Config(**ckpt["config"])                              # TypeError for a field that it lacks
    except Exception as fault:                                # its type depends on what the file is
        raise UserError(f"cannot load {path} ({fault!r:.99}): missing, damaged, "
                        "or not made by this train.py")
    return dict(ckpt, path=str(path))


def read_text(name, ckpt):
    """Return the Corpus of a name. Where it cannot be read and a checkpoint, or None, has the name, say so."""
    try:
        return read(name)
    except UserError as fault:
        if ckpt and ckpt["train"]["data"] == name:
            raise UserError(f"{fault}; the name is from {ckpt['path']}, --data replaces it")
        raise


def rebuild(ckpt, config=None):
    """Return the model of a checkpoint in eval mode, by another Config if one is given, and its tokenizer if any."""
    model = LM(config or Config(**ckpt["config"])).eval()
    try:
        model.load_state_dict(ckpt["model"])
    except RuntimeError:
        raise UserError(f"the weights of {ckpt['path']} do not fit; drop flags that change shapes")
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"weights of {ckpt['path']} are not finite: its training diverged; give an earlier checkpoint")
    model.set_floor((ckpt["step"] - 1) / ckpt["train"]["steps"])
    return model, Tokenizer(**ckpt["tokenizer"]) if "tokenizer" in ckpt else None


# ---- a run
def parse(argv=None):
    """Return a dict of the flags that were given."""
    parser = Parser(prog="train.py", description=__doc__, epilog="In [] is what tiny and atlas have. Flags win over "
                    "--model (models.PRESETS), and that over --size (models.SIZES, TRAIN_SIZES).")
    presets = TRAIN_SIZES["tiny"] | sized(TrainConfig.model, "tiny")
    add_flags(parser, "the run", TrainConfig, presets, skip=NO_FLAG)
    add_flags(parser, "the network", Config, presets, skip=NO_FLAG)
    parser.add_argument("--plot", nargs="+", metavar="OUT", default=SUPPRESS,
                        help="no run: draw OUT/curves.png, the losses of runs")
    return vars(parser.parse_args(argv))


def rehearse(model, task):
    """Try a forward and backward pass. Where torch.compile fails, go on without. Where memory runs out in a new run of
    one process, halve the batch, with twice as many in a step. Say so in a line."""
    tc = task.tc
    while True:
        try:
            if tc.compile:
                model.compile_memory()
            moments = [torch.empty_like(p) for p in model.parameters() for _ in range(3)]      # AdamW's, and gradients
            task.loss(model, 0).backward()
            return model.zero_grad()
        except torch.OutOfMemoryError:
            if tc.resume or PROCESSES > 1 or tc.batch_size % 2:
                raise
            tc.batch_size, tc.grad_accum = tc.batch_size // 2, 2 * tc.grad_accum
            say(f"out of memory; now --batch-size {tc.batch_size} --grad-accum {tc.grad_accum}")
        except Exception as fault:                            # one that is not the compiler's comes again without it
            if not tc.compile:
                raise
            tc.compile = False
            torch.compiler.set_stance("force_eager")
            say(f"warning: torch.compile failed, going on without it: {fault!r:.400}")
        moments = model.zero_grad()                           # only now, as the fault held on to what the pass made
        torch.cuda.empty_cache()


def launch(given, settings=settings, make_task=Text):
    """Make a run, from its flags to its last line. Return the exit code. make_task(tc, device, dtype, old) -> Task."""
    text = make_task is Text
    if not 0 <= RANK < PROCESSES or PROCESSES > 1 and not (text and "MASTER_PORT" in os.environ):
        raise UserError("RANK and WORLD_SIZE are set: only torchrun sets these, and only for train.py; unset them")
    if RANK:
        sys.stdout = open(os.devnull, "w")                    # process 0 talks
    out = Path(given.get("out", TrainConfig.out))
    with nullcontext() if RANK else locked(out):              # before a checkpoint is read
        resume, source = given.get("resume"), given.get("init")
        if resume:                                            # the disk was full after best.pt?
            source = last if (last := out / "ckpt.pt").exists() else out
        old = load_checkpoint(source, text) if source else None
        tc, config = settings(given, old)
        if resume:
            if old["step"] >= tc.steps:
                return say(f"nothing to do: {out} has {old['step']} of {tc.steps} steps; "
                           "--steps N trains it longer")
            say(f"going on from {old['path']}, step {old['step']}")
        need(tc.log_to, tc.log_to in LOGGERS)
        device = setup(tc.device, tc.threads)
        if PROCESSES > 1:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        tc.compile = given.get("compile", device.type == "cuda")
        task = make_task(tc, device, pick_dtype(tc.dtype, device), old)
        if resume and task.data["sha256"] != old["data"]["sha256"]:
            raise UserError(f"{out} was trained on {old['data']['used']}, another text than "
                            f"--data {tc.data}; give that")
        torch.manual_seed(tc.seed)
        config.vocab_size = task.vocab_size
        model = rebuild(old, config)[0] if old else LM(config)
        if not resume:
            torch.no_grad()(task.begin)(model)
        model.to(device).train().remat = tc.remat
        run = dict(step=0, best=math.inf, seconds=0.0, start=None, wandb=None)
        if resume:
            run = {key: old[key] for key in run}
        where = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        say(f"model    {tc.model}{f', {tc.size}' * text}: {model.num_params():,} parameters, "
            f"settings in {out}/config.json\ndata     {task.data['used']}: {task.about}\n"
            f"device   {where} x {PROCESSES}, threads: {torch.get_num_threads()}, "
            f"{str(task.dtype)[6:]}" + ", compiling .." * tc.compile)
        optimizers = task.optimizers(model)
        for optimizer, state in zip(optimizers, old["optimizers"] if resume else ()):
            optimizer.load_state_dict(state)
        rehearse(model, task)
        run |= dict(preset=tc.model, config=asdict(model.config), train=asdict(tc), data=task.data, **task.saved)
        stopped = train(model, optimizers, run, task)
        if PROCESSES > 1:
            dist.barrier()                # torchrun ends all when one ends: not before 0 has saved
            dist.destroy_process_group()
        if not (RANK or stopped):
            task.finish(model, run)
        return 128 + stopped if stopped else 0


def main(argv=None):
    given = parse(argv)
    return exit_code(lambda: plot(given["plot"]) if "plot" in given else launch(given))


if __name__ == "__main__":
    sys.exit(main())
