"""train.py - the outer loop. It trains a model on a text, and writes checkpoints and a log. The
inner loop, which learns while the model reads, is in omega.py.

    python train.py                               ATLAS on tiny Shakespeare: size tiny, on CUDA baby
    python train.py --data my.txt --degree 1      your own text; models.Config lists more flags
    python train.py --plot out out2               draw the losses of two runs
    python train.py --resume                      continue from OUT/ckpt.pt; --steps N trains longer
    python train.py --init out --data my.txt --out new            begin with the weights of a run
    torchrun --nproc-per-node 8 train.py --size 340m --data tokens --tokenizer gpt2     on 8 GPUs

Read from the bottom: `main` reads the flags, `launch` builds a run from them, `train` loops over
the steps, and `train_step` takes one. What is trained on, and how it is measured, is a Task.
"""
import csv
import math
import os
import sys
import time
from argparse import SUPPRESS
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path

from common import (DEVICES, Halt, Parser, UserError, add_flags, autocast, check_output, chosen,
                    exit_code, flag, locked, native_bfloat16, noted_signals, pick_dtype, plot,
                    replacing, save_file, say, setup, tell, write_json)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from data import (BORDER, TOKENIZERS, Tokenizer, batch, continue_text, documents, encode_prompt,
                  make_tokenizer, read, streams, windows)
from layer import check, opt
from models import LM, PRESETS, SIZES, Config, holds_all, set_precision, sized
from muon import newton_schulz

RANK, PROCESSES = 0, 1
if dist.is_torchelastic_launched():                           # clusters, too, set these variables
    RANK, PROCESSES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FORMAT = 10                                                   # version of the checkpoints
EVAL_WINDOWS = 64                                             # read in each validation
REPORT_TOKENS = 2_000_000                                     # read at most in the final report
SAMPLE = 200                                                  # tokens written at the end


# ---- settings: each field is a flag
@dataclass
class TrainConfig:
    """Everything about a run except the network, which models.Config describes."""
    model: str = opt("atlas", "architecture: a preset of models.py", tuple(PRESETS))
    size: str = opt("auto", "size of network and run; auto: baby on CUDA, else tiny",
                    ("auto", *SIZES))
    data: str = opt("shakespeare", "shakespeare, pydoc, a file, a folder or a mix: a.txt:0.4,b:0.6")
    tokenizer: str = opt("char", "what a token is; gpt2: the byte pairs of GPT-2", TOKENIZERS)
    out: str = opt("out", "folder for ckpt.pt, best.pt, log.csv and config.json")
    resume: bool = opt(False, "continue from OUT/ckpt.pt with its settings; few can be changed")
    init: str = opt("", "a checkpoint or folder: begin with its network, weights and tokenizer; "
                    "flags may change settings that have no weights, like --chunk")
    steps: int = opt(600, "optimizer steps", low=1)
    seed: int = opt(1337, "seed of weights, batches and dropout", high=2**40)
    batch_size: int = opt(8, "sequences per forward pass", low=1)
    grad_accum: int = opt(1, "forward passes per step, over all processes", low=1)
    seq_len: int = opt(256, "tokens per sequence", low=1)
    documents: bool = opt(False, "begin each document (row of .jsonl, file) with a new memory")
    optimizer: str = opt("adamw", "outer optimizer; muon trains hidden matrices, AdamW the rest",
                         ("adamw", "muon"))
    lr: float = opt(2e-3, "peak learning rate of AdamW; it falls linearly to 0 at the last step")
    embed_lr: float = opt(1.0, "learning rate of the embedding, as a multiple of --lr")
    gates_lr: float = opt(1.0, "learning rate of the memory's gates, as a multiple of --lr")
    outer_muon_lr: float = opt(2e-2, "peak learning rate of the outer Muon")
    weight_decay: float = opt(0.1, "weight decay of the hidden matrices; nothing else decays")
    warmup: int = opt(20, "steps of linear warmup; by default at most a tenth of --steps")
    eval_every: int = opt(100, "steps between validations, each with a checkpoint", low=1)
    log_every: int = opt(10, "steps between log lines", low=1)
    wandb: bool = opt(False, "also log to Weights & Biases")
    device: str = opt("auto", "auto: cuda if available, else cpu (mps is untested)", DEVICES)
    dtype: str = opt("auto", "auto: bfloat16 if the device has it, else float32",
                     ("auto", "float32", "bfloat16"))
    compile: bool = opt(False, "use torch.compile; on by default on CUDA")
    graph: bool = opt(False, "CUDA: launch a pass whole, as a CUDA graph; never tried so far")
    remat: bool = opt(False, "recompute blocks in backward: less memory, a third more time")
    threads: int = opt(0, "CPU threads; 0: torch decides")

    def __post_init__(self):
        check(self)


# Differences from the defaults above, for each size of models.SIZES. From 34m on, a step has 0.5M
# tokens (App. E), and a batch fits a GPU of 80 GB. From 170m on, peak learning rates and numbers of
# tokens are those of Table 7.
PAPER = dict(batch_size=8, grad_accum=16, seq_len=4096, warmup=1000, eval_every=500)
SMALL = dict(PAPER, steps=3000, lr=3e-3)                      # 1.5e9 tokens
TRAIN_SIZES = {
    "tiny": dict(optimizer="muon", lr=1.2e-2, embed_lr=10.0, gates_lr=0.1, outer_muon_lr=4e-2,
                 steps=500, eval_every=200),
    "baby": dict(steps=5000, batch_size=64, lr=1e-3, warmup=100, eval_every=250),
    "34m": SMALL,
    "170m": dict(SMALL, steps=30_000),
    "195m": dict(SMALL, steps=8000),
    "340m": PAPER | dict(batch_size=4, grad_accum=32, steps=30_000, lr=1.5e-3),
    "760m": PAPER | dict(batch_size=2, grad_accum=64, steps=60_000, lr=1.25e-3),
    "1.3b": PAPER | dict(batch_size=2, grad_accum=64, steps=200_000, lr=7e-4),
}
NO_FLAG = "vocab_size", "attention", "embed_lr"               # set by tokenizer, preset and size
INIT_KEEPS = ["model", "tokenizer"]                           # --init takes them from a checkpoint
# --resume accepts new values of these; any other flag must agree with the checkpoint.
RESUME_CHANGES = ("resume out device dtype compile graph threads data steps lr outer_muon_lr "
                  "eval_every log_every remat wandb plot").split()


def settings(given, old=None):
    """Return the TrainConfig and the Config of a run. given: the flags that were given, {name:
    value}; old: the checkpoint of --resume or --init, or None. In a new run, flags override the
    preset (with --init: the checkpoint), and both override the size."""
    if given.get("resume"):
        values = old["train"] | old["config"] | given
    else:
        size = given.get("size", "auto")
        if size == "auto":
            cuda = torch.cuda.is_available() and given.get("device") != "cpu"
            size = "baby" if cuda else "tiny"
        if old:
            network = old["config"] | {name: old["train"][name] for name in INIT_KEEPS}
        else:
            network = sized(given.get("model", TrainConfig.model), size)
        values = TRAIN_SIZES[size] | network | given | {"size": size}
    tc = TrainConfig(**chosen(values, TrainConfig))
    config = Config(**chosen(values, Config))

    first_tokens = config.wiring != "lmm" and config.persistent       # learned ones, before a text
    if tc.documents and (config.forget == "zero" or first_tokens):
        raise UserError("--documents needs --forget start, and with --wiring also --persistent 0")
    if "warmup" not in given and not tc.resume:
        tc.warmup = min(tc.warmup, tc.steps // 10)
    return tc, config


# ---- the optimizers
class Muon(torch.optim.Muon):
    """Do what torch.optim.Muon does, but compute in the type of the gradients. The original
    computes in bfloat16, which on a CPU without bfloat16 takes 30 times as long.

    B <- mu B + (1 - mu) g
    p <- (1 - lr decay) p - lr sqrt(max(1, rows / columns)) NS((1 - mu) g + mu B)

    mu is the momentum, decay the weight decay.
    """

    @torch.no_grad()
    def step(self):
        """Take one step for all parameters that have a gradient."""
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                B = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                B.lerp_(p.grad, 1 - mu)
                direction = p.grad.lerp(B, mu)
                update = newton_schulz(direction[None])[0]
                rows, columns = p.shape
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


def make_optimizers(model, tc):
    """Return [AdamW], or [AdamW, Muon] if tc.optimizer is "muon": then Muon trains the hidden
    matrices, those of the Linear layers in blocks but the gates. Only the hidden matrices decay;
    the embedding, head, norms, gates, convolutions and M0 do not (choice 20)."""
    matrices = {m.weight for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)}
    embed, rest, gates, hidden = [], [], [], []
    for name, p in model.named_parameters():
        if name == "embed.weight":
            embed.append(p)
        elif ".gates." in name:
            gates.append(p)
        elif p in matrices:
            hidden.append(p)
        else:
            rest.append(p)

    groups = [dict(params=embed, times=tc.embed_lr),          # times: a factor of --lr
              dict(params=rest),
              dict(params=gates, times=tc.gates_lr)]
    decayed = dict(params=hidden, weight_decay=tc.weight_decay)
    others = []
    if tc.optimizer == "muon":
        muon = torch.optim.Muon if native_bfloat16(hidden[0].device) else Muon
        others.append(muon([decayed], lr=tc.outer_muon_lr))
    else:
        groups.append(decayed)
    adamw = torch.optim.AdamW(groups, tc.lr, (0.9, 0.95), weight_decay=0.0, fused=True)
    return [adamw, *others]


def lr_scale(step, tc):
    """Return the factor of the peak learning rates at `step` (the first is 0): linear warmup, then
    linear decay to 0."""
    return min((step + 1) / max(tc.warmup, 1), 1 - step / tc.steps)


# ---- what is trained
class Task:
    """Define what a run trains on and what it measures. The subclasses are Text below, and Episodes
    and Grok in episodic.py.

    prepare(tc, old)      read the data; old: the checkpoint (a dict) to begin from, or None
    begin(model)          change the starting values of a new model
    draw(number, period)  return the arguments of model.loss for batch `number`: inputs and targets
                          (B, T). With --documents there are two more, mask and reset, and each
                          document begins at a multiple of period, where a chunk begins. A batch
                          depends on (seed, number) alone, so --resume draws the same ones
    inputs(model, number) return what draw returns, on the device; add its tokens to tokens_read
    loss(model, number)   return the loss of batch `number`, or of inputs that are given
    one_pass(model, number)       add the gradient of its share of a step's loss; return the share
    optimizers(model)     return the optimizers, each made with its peak learning rate
    measure(model)        return the columns of a validation, {name: value}; best.pt is the
                          checkpoint with the least "val"
    finish(model, run)    print the results of the finished run

    `prepare` also sets vocab_size, data (the name and sha256 of what was read), about (a line that
    describes the data) and saved (what the task adds to checkpoints).
    """
    saved = {}
    largest_norm = 1.0                                        # longer gradients are clipped to it

    def __init__(self, tc, device, dtype=torch.float32, old=None):
        self.tc, self.device, self.dtype = tc, device, dtype
        self.tokens_read = 0
        self.prepare(tc, old)

    def prepare(self, tc, old):
        pass

    def begin(self, model):
        pass

    def inputs(self, model, number):
        inputs = self.draw(number, model.config.period())
        self.tokens_read += inputs[0].numel()
        return [a.to(self.device) for a in inputs]

    def loss(self, model, number, inputs=None):
        with autocast(self.device, self.dtype):
            return model.loss(*inputs or self.inputs(model, number))

    def one_pass(self, model, number, *inputs):
        share = self.loss(model, number, *inputs) / self.tc.grad_accum
        share.backward()
        return share.detach()

    def optimizers(self, model):
        return make_optimizers(model, self.tc)

    def measure(self, model):
        return {}


class Text(Task):
    """Train a model to predict the next token of a text."""

    def prepare(self, tc, old):
        corpus = read_text(tc.data, old)
        if old:
            tokenizer = Tokenizer(**old["tokenizer"])
        else:
            tokenizer = make_tokenizer(tc.tokenizer, corpus.text)

        # token files have no text; whether they have borders is not looked up
        if tc.documents:
            if corpus.text and BORDER not in corpus.text:
                raise UserError(f"--documents: {corpus.used} is one text; give .jsonl, a folder or "
                                "token files")
            if tokenizer.end is None:                         # the vocabulary of --init
                raise UserError(f"--documents: the vocabulary of {old['path']} has no {BORDER}; "
                                "drop --documents or --init")

        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.splits = corpus.splits(tokenizer, tc.seq_len)
        self.data = dict(used=corpus.used, sha256=corpus.sha256)
        self.saved = dict(tokenizer=tokenizer.state)
        self.about = (f"{len(self.splits[0]):,} tokens to train, {len(self.splits[1]):,} to "
                      f"validate, {tokenizer.kind} vocabulary of {self.vocab_size:,}")

    def draw(self, number, period):
        tc = self.tc
        x, y = batch(self.splits[0], tc.seed, number, tc.batch_size, tc.seq_len)
        if tc.documents:
            return documents(x, y, self.tokenizer.end, period)
        return x, y

    def measure(self, model):
        tc = self.tc
        val = evaluate(model, self.splits[1], tc.seq_len, tc.batch_size, EVAL_WINDOWS)
        return dict(val=val)

    def finish(self, model, run):
        """Print the validation losses of the best checkpoint, and a sample that it writes."""
        tc = self.tc
        ckpt = load_checkpoint(tc.out)
        model = rebuild(ckpt)[0].to(self.device)
        say(f"\nbest step {ckpt['step']} on the validation split, in windows of {tc.seq_len}:")
        with autocast(self.device, self.dtype):
            loss = report(model, self.tokenizer, self.splits[1], tc.seq_len, tc.batch_size)

        torch.manual_seed(tc.seed)
        start = encode_prompt(self.tokenizer, "")
        pieces = continue_text(model, self.tokenizer, [None, start], SAMPLE, temperature=0.8)
        say(f"\n{''.join(pieces)}\n")
        say(f"done: {tc.model} on {self.data['used']}, best validation loss {loss:.4f} nats/token")
        vals = [row["val"] for row in run["log"] if "val" in row]
        if vals[-1] > min(vals[0], math.log(self.vocab_size)):
            say(f"warning: the last validation loss, {vals[-1]:.4f}, is worse than the first, or "
                "than guessing; lower --lr, or change --steps")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")                     # too many shapes to compile
def evaluate(model, ids, seq_len, batch_size=1, max_windows=2**31, carry=False):
    """Return the mean loss, in nats per token, of a model in eval mode. Usually it reads ids in
    windows of seq_len tokens, evenly spaced and about max_windows of them at most, each with a new
    memory. With carry=True it reads all ids, cut into batch_size long streams side by side, and
    carries the memory on."""
    every = max(1, (len(ids) - 1) // seq_len // max_windows)
    batches = windows(ids, seq_len, batch_size, every)
    if carry:
        batches = streams(ids, seq_len, batch_size)

    device = next(model.parameters()).device
    total, n, state = 0.0, 0, None
    for x, y in batches:
        logits, after = model(x.to(device), state)
        logits, y = logits.flatten(0, 1).float(), y.flatten().to(device)
        total += F.cross_entropy(logits, y, reduction="sum").item()
        n += y.numel()
        if carry:
            state = after
    return total / n


def report(model, tokenizer, ids, seq_len, batch_size):
    """Print two mean losses over ids, or over their first REPORT_TOKENS: that with a new memory in
    each window, and that with the memory carried on. Return the first, in nats per token."""
    ids = ids[:REPORT_TOKENS]
    loss = evaluate(model, ids, seq_len, batch_size)
    say(f"  memory reset at each window {in_bits(tokenizer, ids, loss)}")

    if holds_all(model.config):                               # later tokens cost more and more
        ids = ids[: batch_size * 16384 + 1]
    carried = evaluate(model, ids, seq_len, batch_size, carry=True)
    say(f"  memory carried, {batch_size} streams   {in_bits(tokenizer, ids, carried)}")
    return loss


def in_bits(tokenizer, ids, loss):
    """Return a loss in nats per token as text, in three units."""
    bits = loss / math.log(2)
    return (f"{len(ids):,} tokens  {loss:.4f} nats/token  {bits:.4f} bits/token  "
            f"{bits / tokenizer.bytes_a_token(ids):.4f} bits/byte")


# ---- checkpoints and the log
def save_checkpoint(out, run, model, optimizers, best):
    """Write OUT/ckpt.pt, and before it OUT/best.pt if this is the best validation so far: a kill
    between the two must not leave a ckpt.pt that takes a lost model for the best."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    ckpt = dict(run, format=FORMAT, model=model.state_dict(), optimizers=states)
    if best:
        save_file(out / "best.pt", ckpt)
    save_file(out / "ckpt.pt", ckpt)


def load_checkpoint(path, text=True):
    """Return the dict in a checkpoint file. In a folder this is best.pt, or ckpt.pt if there is no
    best.pt. Raises UserError if the file is missing or no checkpoint of this FORMAT, and, with
    text=True, if it has no tokenizer."""
    path = Path(path)
    if path.is_dir():
        best = path / "best.pt"
        path = best if best.exists() else path / "ckpt.pt"
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        if ckpt["format"] != FORMAT or text and "tokenizer" not in ckpt:
            raise ValueError("of another format or program")
        Config(**ckpt["config"])                              # TypeError for an unknown field
    except Exception as fault:                                # its type depends on what the file is
        raise UserError(f"cannot load {path} ({type(fault).__name__}): it is missing, damaged, or "
                        "not made by this train.py")
    return ckpt | {"path": str(path)}


def rebuild(ckpt, config=None):
    """Return the model of a checkpoint, in eval mode, and its tokenizer (None if it has none).
    config: another Config for the same weights."""
    model = LM(config or Config(**ckpt["config"])).eval()
    try:
        model.load_state_dict(ckpt["model"])
    except RuntimeError:
        raise UserError(f"the weights of {ckpt['path']} do not fit; drop flags that change shapes")
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"the weights of {ckpt['path']} are not finite; give an earlier checkpoint")
    model.set_floor((ckpt["step"] - 1) / ckpt["train"]["steps"])  # as at that step
    tokenizer = Tokenizer(**ckpt["tokenizer"]) if "tokenizer" in ckpt else None
    return model, tokenizer


def read_text(name, ckpt):
    """Return the Corpus that a name of --data stands for. Raises UserError if it cannot be read; if
    the name came from the checkpoint ckpt (or None), the error says so."""
    try:
        return read(name)
    except UserError as fault:
        if ckpt and ckpt["train"]["data"] == name:
            raise UserError(f"{fault}; the name is from {ckpt['path']}, --data replaces it")
        raise


def write_log(path, rows):
    """Write all rows to log.csv. What a killed run wrote there after its last checkpoint is lost:
    --resume trains those steps again."""
    columns = max(rows, key=len)                              # rows with a validation have more
    with replacing(path) as temporary, temporary.open("w") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ---- the loop
def train_step(model, optimizers, task, step):
    """Take optimizer step `step` (the first is 0). Return the loss and the norm of its gradient."""
    tc, loss = task.tc, 0.0
    for i in range(RANK, tc.grad_accum, PROCESSES):           # the processes share these passes
        loss = loss + task.one_pass(model, step * tc.grad_accum + i)

    # sum loss and gradients over the processes, in one long message, which is the fastest
    if PROCESSES > 1:
        parts = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        joined = parameters_to_vector(parts)
        dist.all_reduce(joined)
        vector_to_parameters(joined, parts)

    norm = clip_grad_norm_(model.parameters(), task.largest_norm)

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = optimizer.defaults["lr"] * group.get("times", 1.0)
            group["lr"] = peak * lr_scale(step, tc)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not tc.graph)
    return loss, norm


@torch.no_grad()
def validate(model, task):
    """Return what the task measures, {column: value}, with the model in eval mode meanwhile."""
    with autocast(task.device, task.dtype):
        measured = task.measure(model.eval())
    model.train()
    return measured


def signalled(noted, device):
    """Return the number of a signal that any process has received, or 0 for none. All processes get
    the same answer, so all stop together."""
    number = noted[0] if noted else 0
    if PROCESSES > 1:
        number = torch.tensor(number, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def train(model, optimizers, run, task):
    """Train from step run["step"] + 1 on: learn, evaluate, log and save. Return the number of the
    signal that stopped training, or None. run is what a checkpoint holds beside the weights and the
    states of the optimizers; `train` keeps it up to date. It writes no files if tc.out is empty."""
    tc = task.tc
    out = Path(tc.out) if tc.out and not RANK else None       # only process 0 writes files
    warn = lru_cache(tell)                                    # tells the same only once
    tick, task.tokens_read = time.perf_counter(), 0
    began = tick - run["seconds"]
    with noted_signals("finishing this step, then saving", PROCESSES == 1) as noted:
        for step in range(run["step"] + 1, tc.steps + 1):
            # learn; the seed makes dropout depend on (seed, step, process) alone
            torch.manual_seed(tc.seed + RANK + step * PROCESSES)
            model.set_floor((step - 1) / tc.steps)            # --memory-floor changes with time
            loss, norm = train_step(model, optimizers, task, step - 1)

            # most steps end here. If there are several processes, they tell each other of signals
            # only in steps that are logged
            evaluated = step % tc.eval_every == 0 or step == tc.steps
            logged = evaluated or step % tc.log_every == 0 or step == 1
            stop = signalled(noted, task.device) if logged or PROCESSES == 1 else 0
            if not (logged or stop):
                continue

            loss, norm = float(loss), float(norm)             # only here we wait for the GPU
            if not math.isfinite(loss + norm):
                raise Halt(f"step {step} is not finite: loss {loss}, gradient norm {norm}; "
                           "saved files are intact; lower --lr, --outer-muon-lr or --max-step")
            speed = task.tokens_read * PROCESSES / (time.perf_counter() - tick)

            # evaluate
            measured = validate(model, task) if evaluated and not RANK else {}
            words = "".join(f"  {name} {a:.4f}" for name, a in measured.items())
            seconds = time.perf_counter() - began
            run.update(step=step, seconds=seconds, end=measured)

            # log
            lr = tc.lr * lr_scale(step - 1, tc)
            eta = timedelta(seconds=int(seconds / step * (tc.steps - step)))
            say(f"step {step:5d}/{tc.steps}  loss {loss:.4f}  grad norm {norm:.2f}  lr {lr:.2e}  "
                f"{speed:,.0f} tokens/s  eta {eta}{words}")
            if out:
                row = dict(step=step, loss=loss, grad_norm=norm, lr=lr, tokens_per_s=speed,
                           seconds=seconds, **measured)
                run["log"].append(row)
                try:
                    write_log(out / "log.csv", run["log"])
                except Halt as fault:                         # training can go on without it
                    warn(f"warning: {fault}")
                if tc.wandb:
                    import wandb
                    wandb.log(row, step=step)

                # save
                best = measured.get("val", math.inf) < run["best"]            # False for nan
                if best:
                    run["best"] = measured["val"]
                if measured or stop:
                    save_checkpoint(out, run, model, optimizers, best)
            if stop:
                say(f"stopped after step {step}; to go on: --resume --out {tc.out}")
                return stop
            tick, task.tokens_read = time.perf_counter(), 0


# ---- a run
def begin_from(out, given, text):
    """Return the checkpoint of --resume or --init, or None without these flags. Raises UserError if
    a new run would overwrite an old one, and for flags that contradict the checkpoint."""
    # decided: the flags that must agree with the checkpoint
    # present: after a kill before the first ckpt.pt, it may be best.pt alone
    present = [name for name in ("ckpt.pt", "best.pt") if (out / name).exists()]
    if not given.get("resume") and not RANK:                  # process 0 has made the folder
        check_output(out / "log.csv", "grad_norm")
    if given.get("resume"):
        source, decided = out / (*present, "ckpt.pt")[0], given.keys() - RESUME_CHANGES
    elif present:
        raise UserError(f"{out} already holds a run ({', '.join(present)}); go on with --resume, "
                        "give another --out, or remove it")
    elif "init" in given:
        source, decided = given["init"], given.keys() & INIT_KEEPS
    else:
        return None

    old = load_checkpoint(source, text)
    was = old["train"] | old["config"]
    for name in decided:
        if given[name] != was.get(name):
            raise UserError(f"{flag(name)} is {was.get(name)} in {old['path']}, not {given[name]}; "
                            "drop the flag")
    return old


def begin_wandb(run):
    """Begin a run of Weights & Biases, or go on with that of --resume. Raises UserError if this
    fails, as it does without a login."""
    try:
        import wandb
        run["wandb"] = wandb.init(project="atlas", id=run["wandb"], resume="allow",
                                  config=run["train"]).id     # with it, --resume goes on there
    except Exception as fault:                                # its types are those of wandb
        raise UserError(f"--wandb: {fault!r:.200}; pip install wandb and wandb login, or drop the "
                        "flag")


def start_device(tc):
    """Return the device of this process. Under torchrun, join the other processes."""
    if tc.grad_accum % PROCESSES:
        raise UserError(f"--grad-accum {tc.grad_accum} is no multiple of the number of processes, "
                        f"{PROCESSES}")
    device = setup(tc.device, tc.threads)
    if PROCESSES > 1 and device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    elif PROCESSES > 1:
        dist.init_process_group("gloo")
    return device


def try_compiled(model, task):
    """Compile the model and try a forward and a backward pass. If that fails, warn and go on
    without compilation."""
    try:
        model.compile_memory()
        task.loss(model, 0).backward()
    except Exception as fault:                                # of any type
        torch.compiler.set_stance("force_eager")
        say(f"warning: torch.compile failed, going on without it: {fault!r:.400}")
    model.zero_grad()


def cuda_graph(f):
    """Return a function that repeats the kernels of f(), all at one launch, and what f() returned,
    which repeating overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()                               # what is set up only once does not belong in the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = f()
    return graph.replay, result


class Graph:
    """Task.one_pass as a CUDA graph. A graph repeats its kernels on the same addresses, so a batch
    is copied to where the captured one was, and gradients are added to those that were there: clear
    them with zero_grad(set_to_none=False). Raises RuntimeError if a repeated pass differs from the
    usual one."""

    def __init__(self, model, task):
        self.task, self.batch = task, task.inputs(model, 0)
        usual = partial(task.one_pass, model, 0, self.batch)
        wanted = self.measure(model, usual)                   # it also makes the gradients
        self.replay, self.share = cuda_graph(usual)
        model.zero_grad(set_to_none=False)
        found = self.measure(model, partial(self, model, 0))
        if not torch.allclose(found, wanted, rtol=1e-3):
            raise RuntimeError(f"loss and gradient norm are {found.tolist()}, not "
                               f"{wanted.tolist()}")

    def measure(self, model, one_pass):
        torch.manual_seed(self.task.tc.seed)                  # of dropout
        share = one_pass()
        found = torch.stack([share, clip_grad_norm_(model.parameters(), math.inf)])
        model.zero_grad(set_to_none=False)
        return found

    def __call__(self, model, number):
        for a, b in zip(self.batch, self.task.inputs(model, number)):
            a.copy_(b)
        self.replay()
        return self.share


def try_graph(model, task):
    """Let the passes of a task run as a CUDA graph. If that fails, warn and go on without it."""
    try:
        task.one_pass = Graph(model, task)
    except Exception as fault:                                # of any type
        say(f"warning: --graph failed, going on without it: {fault!r:.400}")
        model.zero_grad()


def launch(given, settings=settings, make_task=Text):
    """Make a whole run from `given`, its flags {name: value}: read, build, train. Return the exit
    code, None for success. episodic.py gives its own settings(given, old) -> TrainConfig, Config
    and make_task(tc, device, dtype, old) -> Task."""
    if RANK:
        sys.stdout = open(os.devnull, "w")                    # only process 0 prints
    out = Path(given.get("out", TrainConfig.out))
    lock = nullcontext() if RANK else locked(out)             # process 0 locks it for all
    with lock:
        # read
        old = begin_from(out, given, make_task is Text)
        tc, config = settings(given, old)
        if tc.resume and old["step"] > tc.steps:
            raise UserError(f"{old['path']} is at step {old['step']}, past --steps {tc.steps}; "
                            "give more")
        device = start_device(tc)
        tc.compile = given.get("compile", device.type == "cuda")
        changes = PROCESSES > 1 or tc.documents or "," in config.memory_floor
        if tc.graph and (changes or device.type != "cuda"):
            raise UserError("--graph needs CUDA, one process, no --documents and a constant "
                            "--memory-floor; drop it")
        task = make_task(tc, device, pick_dtype(tc.dtype, device), old)
        if tc.resume and task.data["sha256"] != old["data"]["sha256"]:
            raise UserError(f"{out} was trained on {old['data']['used']}, another text than "
                            f"--data {tc.data}; give that")

        # build
        if device.type == "cuda":
            set_precision(config)
        torch.manual_seed(tc.seed)
        config.vocab_size = task.vocab_size
        model = rebuild(old, config)[0] if old else LM(config)
        model.to(device).train()
        model.remat = tc.remat
        optimizers = task.optimizers(model)

        # run: how far the training is. best: the least "val" so far; end: the last validation
        run = dict(step=0, best=math.inf, seconds=0.0, end={}, log=[], wandb=None)
        if tc.resume:
            run = {name: old[name] for name in run}
            for optimizer, state in zip(optimizers, old["optimizers"]):
                optimizer.load_state_dict(state)
        else:
            with torch.no_grad():
                task.begin(model)

        # settled: what the run is, for checkpoints and config.json
        settled = dict(train=asdict(tc), config=asdict(model.config), data=task.data)
        run.update(settled, preset=tc.model, **task.saved)
        if not RANK:
            if tc.wandb:
                begin_wandb(run)
            write_json(out / "config.json", settled)
        say(f"model    {tc.model}: {model.num_params():,} parameters, see {out}/config.json\n"
            f"data     {task.data['used']}: {task.about}\n"
            f"device   {device} x {PROCESSES}, threads: {torch.get_num_threads()}, {task.dtype}\n"
            f"steps    {run['step'] + 1} to {tc.steps}")
        if tc.compile:
            try_compiled(model, task)
        if tc.graph:
            try_graph(model, task)

        # train
        stopped = train(model, optimizers, run, task)
        if device.type == "cuda":
            say(f"largest GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        if PROCESSES > 1:
            dist.barrier()                # when one process ends, torchrun ends all: wait for 0
            dist.destroy_process_group()
        if stopped:
            return 128 + stopped
        if not RANK:
            task.finish(model, run)


def parse(argv=None):
    """Return only the flags that were given, {name: value}; `settings` knows the defaults."""
    parser = Parser(prog="train.py", description=__doc__,
                    epilog="[] shows the values of --size tiny --model atlas. --model overrides "
                    "--size.")
    presets = TRAIN_SIZES["tiny"] | sized(TrainConfig.model, "tiny")
    add_flags(parser, "the run", TrainConfig, presets, skip=NO_FLAG)
    add_flags(parser, "the network", Config, presets, skip=NO_FLAG)
    parser.add_argument("--plot", nargs="+", metavar="OUT", default=SUPPRESS,
                        help="train nothing; draw the losses of these runs in OUT/curves.png")
    return vars(parser.parse_args(argv))


def main(argv=None):
    given = parse(argv)
    if "plot" in given:
        return exit_code(partial(plot, given["plot"]))
    return exit_code(partial(launch, given))


if __name__ == "__main__":
    sys.exit(main())
