"""train.py - the outer loop: text in, checkpoints and a log out. The inner loop, which learns as it reads: omega.py.

    python train.py                                      the default ATLAS: tiny, on CUDA baby
    python train.py --model transformer --out base       a baseline
    python train.py --data my.txt --window 1 --no-muon   your own text; nearly every field of models.Config is a flag
    python train.py --resume                             go on exactly where OUT/ckpt.pt stopped (--steps: to train longer)
    python train.py --init out --data my.txt --out tuned a new run that begins with the weights of another
    torchrun --nproc-per-node 8 train.py --size 340m --remat --data tokens --tokenizer gpt2
                                                         on 8 GPUs, which share the --grad-accum passes of a step

OUT/ckpt.pt is the last state, OUT/best.pt the one with the best validation loss, OUT/log.csv has one row a logged step.
A batch is a function of (seed, step) alone and a checkpoint holds all the rest, so on a CPU (same number of threads) a
run that was stopped and resumed ends in the same bits as one that was not, as long as --minutes is not what lowers its rates.
"""
import argparse
import math
import os
import shlex
import sys
import tempfile
import textwrap
import time
import warnings
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import TOKENIZERS, batch, make_tokenizer, read, replacing, streams, tokenizer_from_state, windows
from machine import (MATMUL, Halt, Parser, StopOnSignal, UserError, autocast, claim, exit_code, first_line, greatest, native_bfloat16, of_compiler,
                     out_of_memory, peak_memory, pick_device, pick_dtype, processes, rank, say, set_matmul, set_threads, tell, tune_cpu)
from models import LM, PRESETS, SIZES, Config, check, detach, flag, idle, opt
from muon import newton_schulz

if not hasattr(torch.optim, "Muon"):                          # begun in torch 2.9
    sys.exit(f"torch {torch.__version__} is too old; to have a newer one: pip install -r requirements.txt")


# ---- settings and flags


@dataclass
class TrainConfig:
    """Everything about a run that is not the network. Numbers are at least 0, or at least `low`; integers below models.LIMIT."""
    model: str = opt("atlas", "architecture: a preset of models.py", choices=tuple(PRESETS))
    size: str = opt("auto", "of the network and of the run; auto: baby on CUDA, else tiny", choices=("auto", *SIZES))
    data: str = opt("shakespeare", "shakespeare, pydoc, a text file, or a folder of text files or token files (data.py)")
    tokenizer: str = opt("char", "what a token is; bpe: byte pairs learned from your text, gpt2: those of GPT-2", choices=TOKENIZERS)
    bpe_size: int = opt(1024, "largest vocabulary of --tokenizer bpe", low=256)
    out: str = opt("out", "folder for ckpt.pt, best.pt, log.csv; a new run moves those of an earlier one to OUT/old-N")
    resume: bool = opt(False, "go on from OUT/ckpt.pt, with its settings; --device, --threads, --compile and --cuda-graph are to be given again")
    init: str = opt("", "a checkpoint, or its folder: a new run begins with its network, weights and tokenizer")
    steps: int = opt(600, "optimizer steps", low=1)
    minutes: float = opt(0.0, "end after this time even if short of --steps, the rates having fallen to 0 by then; 0 (the default "
                              "with --steps): no limit")
    stop_after: int = opt(0, "save and stop after this step, as Ctrl-C would, but with exit code 0; 0: never")
    seed: int = opt(1337, "of weights, batches and dropout")
    batch_size: int = opt(8, "sequences a forward pass", low=1)
    grad_accum: int = opt(1, "forward passes a step", low=1)
    seq_len: int = opt(256, "tokens a sequence", low=1)
    optimizer: str = opt("adamw", "outer optimizer; muon: torch.optim.Muon for hidden matrices, AdamW for the rest",
                         choices=("adamw", "muon"))
    lr: float = opt(2e-3, "peak learning rate of AdamW")
    embed_lr: float = opt(1.0, "learning rate of the embedding, in multiples of --lr")
    muon_lr: float = opt(2e-2, "peak learning rate of the outer Muon")
    beta2: float = opt(0.95, "decay of AdamW's second moment")
    weight_decay: float = opt(0.1, "of hidden matrices; nothing else decays")
    grad_clip: float = opt(1.0, "greatest norm of the gradient; 0: no clipping")
    warmup: int = opt(20, "steps of linear warmup; unless given at most a tenth of --steps")
    decay_frac: float = opt(1.0, "last fraction of the run, over which the rates fall linearly to 0")
    eval_every: int = opt(100, "steps between validations, each of which saves the checkpoint", low=1)
    eval_windows: int = opt(64, "about so many validation windows while training, evenly spaced, and at most twice as many; 0: all")
    log_every: int = opt(10, "steps between log lines", low=1)
    sample_tokens: int = opt(200, "length of the sample at the end")
    device: str = opt("auto", "auto: cuda, else cpu (mps is untried: compare its first losses with cpu's)", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = opt("auto", "of autocast; auto: bfloat16 where it is native (CUDA from SM 8.0, AVX-512 BF16, AMX), else float32",
                     choices=("auto", "float32", "bfloat16"))
    matmul: str = opt("auto", "precision of float32 products, torch.set_float32_matmul_precision (results/README.md); auto: high (TF32) "
                              "with bfloat16 on CUDA, medium (exact, and faster) on AMD cores with AVX-512, else highest", choices=MATMUL)
    compile: bool = opt(False, "torch.compile; on CUDA the default is on")
    cuda_graph: bool = opt(False, "record forward and backward as one CUDA graph: one launch a pass instead of one a kernel (not measured)")
    remat: bool = opt(False, "keep only each block's input, and compute the block again in backward: less memory, a third more time")
    threads: int = opt(0, "CPU threads; 0: torch decides")

    def __post_init__(self):
        check(self)
        if self.warmup > self.steps:
            raise ValueError(f"--warmup {self.warmup} is longer than --steps {self.steps}")
        if not self.out:
            raise ValueError("--out is empty; name a folder")
        if self.decay_frac > 1 or self.beta2 >= 1:
            raise ValueError(f"--decay-frac must be at most 1, --beta2 below 1, not {self.decay_frac} and {self.beta2}")


RUN_FLAGS = {f.name for f in fields(TrainConfig)}             # all others are of the network
PAPER = dict(batch_size=8, grad_accum=16, seq_len=4096, warmup=1000, eval_every=500)       # 0.5M tokens a step: App. E
TRAIN_SIZES = {                                               # differences from the defaults above, like models.SIZES; tiny: results/README.md
    "tiny": dict(optimizer="muon", lr=1.2e-2, embed_lr=10.0, muon_lr=4e-2, steps=1150, minutes=4.6, eval_every=575),
    "baby": dict(steps=5000, batch_size=64, lr=1e-3, warmup=100, eval_every=250),
    "170m": dict(PAPER, steps=30_000, lr=3e-3),               # peak rates and numbers of tokens: Table 7
    "340m": dict(PAPER, steps=30_000, lr=1.5e-3),
    "760m": dict(PAPER, steps=60_000, lr=1.25e-3),
    "1.3b": dict(PAPER, steps=200_000, lr=7e-4),
}
LAUNCH = {"out", "resume", "stop_after", "device", "compile", "cuda_graph", "threads"}         # never read from a checkpoint
# may differ on --resume (data: its name)
FREE = LAUNCH | {"data", "steps", "minutes", "eval_every", "log_every", "sample_tokens", "remat"}
NO_FLAG = "vocab_size", "mixer"                               # which the tokenizer and the preset decide


def add_flags(group, cls, presets, skip=()):
    """One flag for each field of a dataclass, in [] what it is with these presets. A flag not given is absent from the result, for `settings`
    to know.
    """
    for f in fields(cls):
        if f.name in skip:
            continue
        kind, choices = type(f.default), f.metadata.get("choices")
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(
            type=kind, choices=choices, metavar=None if choices else {int: "N", float: "X", str: "NAME"}[kind])
        text = f"{f.metadata['help']} [{presets.get(f.name, f.default)}]".replace("%", "%%")
        group.add_argument(flag(f.name), default=argparse.SUPPRESS, help=text, **how)


def parse(argv=None):
    """The flags that were given -> dict."""
    parser = Parser(
        prog="train.py", description=__doc__,
        epilog="In [] is what tiny and atlas have; another --size changes some (SIZES, TRAIN_SIZES), then --model (PRESETS), then flags.")
    presets = {**TRAIN_SIZES["tiny"], **SIZES["tiny"], **PRESETS[TrainConfig.model]}
    add_flags(parser.add_argument_group("the run"), TrainConfig, presets)
    add_flags(parser.add_argument_group("the network"), Config, presets, skip=NO_FLAG)
    return vars(parser.parse_args(argv))


def settings(given, ckpt=None, origin=None):
    """The flags that were given -> TrainConfig, Config.

    In a new run (`new_settings`) defaults < size < preset < flags; on --resume they are those of `ckpt` (`old_settings`).
    With --init `origin` is its checkpoint.
    """
    train, config = old_settings(given, ckpt) if ckpt else new_settings(given, origin)
    if "steps" in given and "minutes" not in given:           # who asks for steps wants them all
        train["minutes"] = 0.0
    known = ckpt or origin
    try:
        return TrainConfig(**train), Config(**config)
    except TypeError as fault:                                # a setting that this version does not have
        raise UserError(f"{known['path']} does not fit this version: {fault}") from None
    except ValueError as fault:
        raise UserError(f"{fault} (what was not given is as in {known['path']})" if known else str(fault)) from None


def old_settings(given, ckpt):
    """Those of a checkpoint that a run goes on from; a flag that would change the run is refused, not ignored."""
    train, config, defaults = ckpt["train"], ckpt["config"], asdict(TrainConfig()) | asdict(Config())
    given = {n: v for n, v in given.items() if (n, v) not in (("size", "auto"), ("head_dim", 0))}          # decided when the run began
    for name, value in given.items():
        old = {**defaults, **train, **config}[name]           # an older version did not save all of them
        if name not in FREE and old != value:
            raise UserError(f"--resume: {flag(name)} is {old!r} in {ckpt['path']}, but {value!r} was given; drop the flag, or start a new "
                            f"run, without --resume, or with its weights: --init {shlex.quote(str(ckpt['path']))} --out FOLDER")
    train = {n: v for n, v in train.items() if n not in LAUNCH} | {n: v for n, v in given.items() if n in RUN_FLAGS}
    if "steps" in given:
        train["warmup"] = min(train.get("warmup", TrainConfig.warmup), given["steps"])
    return train, config


def new_settings(given, origin):
    """Those of a new run. With an `origin` its network takes the place of size and preset, and model, size and tokenizer have to be its own."""
    train = {n: v for n, v in given.items() if n in RUN_FLAGS and (n, v) != ("size", "auto")}
    if origin:
        for name in ("model", "size", "tokenizer", "bpe_size"):
            was = origin["train"].get(name, getattr(TrainConfig, name))
            if train.setdefault(name, was) != was:
                raise UserError(f"--init: {flag(name)} is {was} in {origin['path']}, but {train[name]} was given; drop the flag")
    if "size" not in train:
        train["size"] = "baby" if pick_device(train.get("device", "auto")).type == "cuda" else "tiny"
    model, size = train.get("model", TrainConfig.model), train["size"]
    train = {"warmup": TrainConfig.warmup, "steps": TrainConfig.steps, **TRAIN_SIZES.get(size, {}), **train}
    if "warmup" not in given:
        train["warmup"] = min(train["warmup"], train["steps"] // 10)
    network = origin["config"] if origin else {**SIZES[size], **PRESETS[model]}
    return train, {**network, **{n: v for n, v in given.items() if n not in RUN_FLAGS}}


# ---- checkpoints

FORMAT = 2
FILES = "ckpt.pt", "best.pt", "log.csv"                       # what a run leaves in --out
KEYS = dict(format=int, torch=str, preset=str, config=dict, train=dict, tokenizer=dict, data=dict, step=int, best=float,
            seconds=float, model=dict, optimizers=list, rng=dict)
FOREIGN = "is not a checkpoint of train.py, which makes best.pt and ckpt.pt in --out"


def save_checkpoint(path, run, model, optimizers):
    """The whole state of a run, all or nothing: written beside the target, synced, then renamed over it."""
    if not all(p.isfinite().all() for p in model.parameters()):
        raise Halt(f"step {run['step']}: weights are not finite; not saved, so checkpoints are good; lower --lr")
    rng = dict(cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if next(model.parameters()).is_cuda else None)
    state = dict(run, format=FORMAT, torch=str(torch.__version__), rng=rng, model=model.state_dict(),
                 optimizers=[o.state_dict() for o in optimizers])
    if rank():
        return
    with writing(path), replacing(path) as tmp, open(tmp, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def writing(path):
    """Within, what the disk refuses becomes one line, with the name of the file."""
    try:
        yield
    except (OSError, RuntimeError) as fault:                  # torch tells of a full disk by a RuntimeError, and of a second Ctrl-C
        cause = fault
        while cause and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__
        if cause:
            raise cause from None
        why = "was its folder removed?" if isinstance(fault, FileNotFoundError) else "disk full? Checkpoints that were saved are intact"
        raise Halt(f"cannot write {path} ({first_line(fault)}); {why}") from None


def load_checkpoint(path):
    """A checkpoint file, or the best (else the last) of a folder -> dict of plain values, CPU tensors, its "path" and when it was "written".

    UserError, in words of its own, for each way in which it is none.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = next((path / name for name in ("best.pt", "ckpt.pt") if (path / name).exists()), path)
            if path.is_dir():
                raise UserError(f"no best.pt or ckpt.pt in the folder {path}; python train.py --out {shlex.quote(str(path))} makes them")
        with open(path, "rb") as f:
            head, written = f.read(2), os.fstat(f.fileno()).st_mtime_ns
    except OSError as fault:
        raise UserError(f"no checkpoint {path} ({fault.strerror}); python train.py makes one in --out") from None
    if head != b"PK":                                         # torch.save writes zip archives
        why = {b"": "is empty; use another checkpoint, or train again", b"\x80": "is a bare pickle, which can hold code: refused"}
        raise UserError(f"{path} {why.get(head[:1], FOREIGN)}")
    ckpt = read_archive(path)
    if not isinstance(ckpt, dict) or "format" not in ckpt:
        raise UserError(f"{path} was not written by this program's train.py")
    wrong = [key for key, kind in KEYS.items() if not isinstance(ckpt.get(key), kind)]
    if ckpt["format"] != FORMAT:
        raise UserError(f"{path} has format {ckpt['format']}, this version reads {FORMAT}; train again, or use the version that wrote it")
    if wrong:
        raise UserError(f"{path} lacks, or has of another type: {', '.join(wrong)}; use another checkpoint, or train again")
    return dict(ckpt, path=str(path), written=written)


def read_archive(path):
    """What torch.save has put into a zip archive. Nothing in it is run (weights_only); torch checks no sums when it loads, so zipfile does."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken, names = archive.testzip(), archive.namelist()
    except Exception as fault:                                # what zipfile raises depends on where the file is broken
        broken = fault
    if broken:
        raise UserError(f"{path} is truncated or damaged; use another checkpoint, or train again")
    try:
        with warnings.catch_warnings():                       # of TorchScript files
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as fault:                                # the file decides what is raised
        if out_of_memory(fault):
            raise
        why = "holds more than weights and plain values: refused, and none of it was run" if any(n.endswith("data.pkl") for n in names) else FOREIGN
        raise UserError(f"{path} {why}") from None


@contextmanager
def taken_from(ckpt, remedy=""):
    """Within, what cannot be made of a checkpoint becomes one line."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        if out_of_memory(fault):
            raise
        why = " ".join(str(fault).split("\n\t")[1:2]) or first_line(fault)        # torch has what is missing in lines below a title
        raise UserError(f"{ckpt['path']} does not fit this version: {why}{remedy}") from None


def rebuild(ckpt):
    """The model and the tokenizer of a checkpoint."""
    tokenizer = tokenizer_from_state(ckpt["tokenizer"])
    with taken_from(ckpt, "; use another checkpoint, or train again"):
        model = LM(Config(**ckpt["config"]))
        model.load_state_dict(ckpt["model"])
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(f"{ckpt['path']} contradicts itself: {tokenizer.vocab_size} tokens in its tokenizer, "
                        f"{model.config.vocab_size} in its model")
    return model, tokenizer


def restore(ckpt, optimizers, device):
    """The optimizers' state and the random numbers of a checkpoint."""
    with taken_from(ckpt, "; --init begins a new run with its weights"):
        for optimizer, state in zip(optimizers, ckpt["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(ckpt["rng"]["cpu"])
        if device.type == "cuda" and ckpt["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(ckpt["rng"]["cuda"])


def begin(config, origin):
    """A new model; with an `origin`, the checkpoint of --init, it has its weights."""
    model = LM(config)
    if origin:
        if config.tie != origin["config"].get("tie", False):  # of the same names and shapes, but one matrix would overwrite the other
            raise UserError(f"--init: tie is {not config.tie} in {origin['path']}; drop --{'no-' * (not config.tie)}tie")
        try:
            model.load_state_dict(origin["model"])
        except RuntimeError as fault:
            if out_of_memory(fault):
                raise
            differ = ", ".join(flag(name) for name, value in asdict(config).items() if value != origin["config"].get(name))
            raise UserError(f"--init: the weights of {origin['path']} do not fit a network of another {differ or 'version'}; "
                            "give no flag that changes their shapes") from None
    return model


def clear_away(out):
    """Removes what a run that was killed while it saved has left of its files: in their names `replacing` has a number."""
    with suppress(OSError):
        for name in FILES:
            for left in Path(out).glob(f"{name}.*.tmp"):
                if left.name[len(name) + 1: -4].isdecimal():
                    left.unlink()


def set_aside(out):
    """A new run destroys nothing: what an earlier one left in the folder moves to OUT/old-1, OUT/old-2, ..."""
    left = [out / name for name in FILES if (out / name).exists()]
    if left:
        old = next(p for p in (out / f"old-{n}" for n in count(1)) if not p.exists())
        old.mkdir()
        for path in left:
            os.replace(path, old / path.name)
        say(f"an earlier run lay in {out}; it is now in {old}")


# ---- training

class Muon(torch.optim.Muon):
    """torch.optim.Muon (Jordan et al. 2024), with muon.py's Newton-Schulz in float32 where bfloat16, which torch's is in, is not native.

    B <- momentum B + (1 - momentum) g,   p <- (1 - lr weight_decay) p - lr sqrt(max(1, rows / columns)) NS((1 - momentum) g + momentum B)

    for matrices p (rows, columns) with gradient g; all but lr, momentum and weight_decay as torch has it by default (results/README.md).
    """

    @torch.no_grad()
    def step(self):
        if native_bfloat16(self.param_groups[0]["params"][0].device):
            return super().step()
        for group in self.param_groups:
            params, updates = [p for p in group["params"] if p.grad is not None], []
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(buffer, group["momentum"]))           # Nesterov's
            for p, update in zip(params, newton_schulz(tuple(updates)) if updates else ()):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def make_optimizers(model, tc):
    """[AdamW] or [AdamW, Muon]. Hidden matrices decay and may go to Muon; embedding, head, norms, gates, convolutions
    and the starts of the memories (3-D: one matrix a head) do neither (choice 20). It goes by names: `model` is an LM itself, not wrapped."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    embed, hidden, rest = [], [], []
    for name, p in model.named_parameters():
        outer = name.startswith("head.") or ".gates." in name
        (embed if name.startswith("embed.") else hidden if id(p) in linear and not outer else rest).append(p)
    groups = [dict(params=embed, weight_decay=0.0, times=tc.embed_lr), dict(params=rest, weight_decay=0.0)]
    if tc.optimizer == "adamw":
        groups.append(dict(params=hidden, weight_decay=tc.weight_decay))
    adamw = torch.optim.AdamW(groups, lr=tc.lr, betas=(0.9, tc.beta2), fused=True)
    return [adamw] if tc.optimizer == "adamw" else [
        adamw, Muon(hidden, lr=tc.muon_lr, weight_decay=tc.weight_decay)]


def progress(step, tc, seconds):
    """How much of a run is over before `step`, counted from 0, and after so many seconds: the greater of two fractions, 1 at its end."""
    return max(step / tc.steps, seconds / (60 * tc.minutes) if tc.minutes else 0.0)


def lr_scale(step, tc, seconds=0.0):
    """What the peak rates are multiplied by at `step`, from 0: linear warmup, constant, linear decay to 0 over --steps or --minutes."""
    rise = (step + 1) / tc.warmup if tc.warmup else 1.0
    fall = max(0.0, 1 - progress(step, tc, seconds)) / tc.decay_frac if tc.decay_frac else 1.0
    return min(rise, 1.0, fall)


def one_pass(model, x, y, dtype, passes=1):
    """Forward and backward, one of the `passes` of a step -> their share of its loss; that of its gradient is added to p.grad."""
    with autocast(x.device, dtype):
        loss = model.loss(x, y) / passes
    loss.backward()
    return loss.detach()


def compile_model(model, x, y, dtype):
    """Compile and try it on one batch; where that fails say so once and go on without."""
    began = time.perf_counter()
    torch.compiler.set_stance("default")
    model.compile_memory()
    with torch.random.fork_rng([x.get_device()] if x.is_cuda else []):     # the trial draws no random number of the run
        try:
            one_pass(model, x, y, dtype)
            say(f"compiled in {time.perf_counter() - began:.0f} s")
        except Exception as fault:
            if not of_compiler(fault):
                raise
            torch.compiler.set_stance("force_eager")
            tell(f"warning: torch.compile failed, going on without it: {first_line(fault)}")
    model.zero_grad()


class Recorded:
    """one_pass as a CUDA graph: no Python, and one launch for its thousands of kernels.

    It reads and writes the same memory each time. So each p.grad stays the tensor that it is (update), and a loss lasts until the next pass.
    """

    def __init__(self, model, x, y, dtype, passes):
        self.x, self.y, stream = x.clone(), y.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.random.fork_rng([x.get_device()] if x.is_cuda else []):
            for _ in range(3):                                # what compilers, libraries and p.grad do at first is not to be recorded
                one_pass(model, self.x, self.y, dtype, passes)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss = one_pass(model, self.x, self.y, dtype, passes)
        model.zero_grad(set_to_none=False)

    def __call__(self, x, y):
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss


def record(model, x, y, dtype, passes):
    """-> Recorded, for batches like x, y. UserError where that fails: a broken capture may leave torch's allocator and random state in it, so
    there is no going on without a graph.
    """
    try:
        return Recorded(model, x, y, dtype, passes)
    except RuntimeError as fault:
        causes = [fault]                                      # what was not allowed, then what the end of the recording says of that
        while causes[0].__context__:
            causes.insert(0, causes[0].__context__)
        for cause in causes:
            if out_of_memory(cause):
                raise cause
        raise UserError(f"--cuda-graph: {', then '.join(map(first_line, causes))}; drop the flag") from None


def train_step(model, optimizers, tc, ids, step, scale, device, dtype, recorded=None):
    """One outer step at `scale` times the peak rates -> loss, and norm of the gradient before clipping.

    If one is not finite, no weight has changed. `recorded` takes the place of one_pass.
    """
    x, y = (a.to(device) for a in batch(ids, tc.seed, step, tc.batch_size * tc.grad_accum, tc.seq_len))        # at once, for each copy waits
    loss, parts = 0.0, list(zip(x.split(tc.batch_size), y.split(tc.batch_size)))
    for part in parts[rank()::processes()]:
        loss = loss + (recorded(*part) if recorded else one_pass(model, *part, dtype, tc.grad_accum))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if processes() > 1:
        for a in (loss, *grads.values()):
            dist.all_reduce(a)
    norm = torch.nn.utils.get_total_norm(grads.values())
    loss, size = float(loss), float(norm)
    if not (math.isfinite(loss) and math.isfinite(size)):
        where = next((name for name, g in grads.items() if not g.isfinite().all()), "the norm" if math.isfinite(loss) else "the loss")
        lower = "--lr, --muon-lr or --weight-decay, or raise --warmup" if step else "--max-step"           # no rate has had a part in it
        raise Halt(f"step {step + 1}: loss {loss}, gradient norm {size}: not finite, first in {where}; stopped before "
                   f"the update, so checkpoints are good; lower {lower}")
    if tc.grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), tc.grad_clip, norm)
    update(optimizers, tc, scale, keep_grads=recorded is not None)
    return loss, size


def update(optimizers, tc, scale, keep_grads=False):
    """Each parameter takes a step along its gradient, at `scale` times the peak rates. keep_grads: p.grad stays, filled with zeros."""
    for optimizer in optimizers:
        peak = tc.muon_lr if isinstance(optimizer, Muon) else tc.lr
        for group in optimizer.param_groups:
            group["lr"] = peak * group.get("times", 1.0) * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_grads)


@torch.no_grad()
def evaluate(model, ids, seq_len, batch_size=1, max_windows=0, carry=False, dtype=torch.float32):
    """Mean loss in nats a token over a split cut into windows of seq_len, or about max_windows of them, evenly spaced.

    The memory starts anew in each window; with carry=True the split is read as batch_size long streams and the state passes on.
    """
    device, was_training, state = next(model.parameters()).device, model.training, None
    every = max(1, (len(ids) - 1) // seq_len // max_windows) if max_windows else 1
    total, n = 0.0, 0
    model.eval()
    for x, y in streams(ids, seq_len, batch_size) if carry else windows(ids, seq_len, batch_size, every):
        x, y, whole = x.to(device), y.to(device), x.shape == (batch_size, seq_len)
        # windows that are left over, and last pieces, are few and of shapes of their own: not worth a compiled one
        with autocast(device, dtype), nullcontext() if whole else torch.compiler.set_stance("force_eager"):
            logits, after = model(x, state)
        total += F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum").item()
        n += y.numel()
        state = detach(after) if carry else None
    model.train(was_training)
    return total / n


COLUMNS = ("step", "loss", "val", "grad_norm", "lr", "tokens_per_s", "seconds")


def begin_log(path, step):
    """Makes log.csv ready for the rows after `step`: those that are there, logged by a killed run but not saved, are dropped; a column that an
    older version did not have stays empty in its rows.
    """
    with writing(path):
        text = path.read_text("utf-8-sig", "replace") if path.exists() else ""
    head, *rows = [line.split(",") for line in text.splitlines()] or [COLUMNS]           # no field has a comma in it
    if head[0] != COLUMNS[0]:                                 # a spreadsheet's, or no table
        kept = next(p for p in (path.with_name(f"log-{n}.csv") for n in count(1)) if not p.exists())
        with writing(path):
            os.replace(path, kept)
        say(f"{path} is not a table of this program; it is now {kept}")
    number = lambda a: int(a) if a.isdecimal() and len(a) < 19 else math.inf
    rows = [dict(zip(head, row)) for row in rows if len(row) == len(head) and number(row[0]) <= step]
    rows = [[row.get(name, "") for name in COLUMNS] for row in rows]
    with writing(path), replacing(path) as tmp:
        tmp.write_text("".join(",".join(row) + "\n" for row in [COLUMNS, *rows]))


def clock(seconds):
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def log_step(tc, run, loss, val, norm, lr, speed, eta):
    """A row of log.csv, and a line on stdout. val: None without a validation; speed: tokens a second; eta: seconds that are left."""
    step, path = run["step"], Path(tc.out, "log.csv")
    if rank() == 0:
        row = step, f"{loss:.6f}", "" if val is None else f"{val:.6f}", f"{norm:.4f}", f"{lr:.3g}", f"{speed:.0f}", f"{run['seconds']:.1f}"
        with writing(path), open(path, "a") as log:
            log.write(",".join(map(str, row)) + "\n")
    say(f"step {step:5d}/{tc.steps}  loss {loss:.4f}  val {'-' if val is None else f'{val:.4f}':6s}  grad norm {norm:.2f}  "
        f"lr {lr:.2e}  {speed:,.0f} tokens/s  eta {clock(eta)}")


def train(model, optimizers, run, tc, splits, device, dtype, recorded=None):
    """The loop, from run["step"] on -> None when --steps or --minutes are over, the number of the signal that stopped it, 0 for --stop-after.

    `recorded` is for train_step; for as long as something refers to it, it holds the memory of a pass.
    """
    out, first, earlier, began = Path(tc.out), run["step"], run["seconds"], time.perf_counter()
    busy, tokens = 0.0, 0
    with StopOnSignal() as stop:
        for step in count(first + 1):
            tick = time.perf_counter()
            scale = lr_scale(step - 1, tc, earlier + tick - began)
            if rank():                                        # dropout of its own, and after --resume the same: the checkpoint is the first one's
                torch.manual_seed(tc.seed + rank() + step * processes())
            loss, norm = train_step(model, optimizers, tc, splits[0], step - 1, scale, device, dtype, recorded)
            busy, tokens = busy + time.perf_counter() - tick, tokens + tc.batch_size * tc.grad_accum * tc.seq_len
            if step == first + 1 and rank() == 0:             # only now that a step has worked are older files touched
                if first == 0:
                    set_aside(out)
                begin_log(out / "log.csv", first)
                if norm > 1000 * max(1.0, tc.grad_clip) and model.config.muon:           # a memory of zeros has a large one, too, for a step
                    say(f"warning: the first gradient's norm is {norm:.1e}, which is noise; with Newton-Schulz lower --max-step or raise --chunk")
            val, over = None, progress(step, tc, earlier + time.perf_counter() - began)
            if step % tc.eval_every == 0 or over >= 1:
                val = evaluate(model, splits[1], tc.seq_len, tc.batch_size, tc.eval_windows, dtype=dtype)
            elapsed = time.perf_counter() - began
            run.update(step=step, seconds=earlier + elapsed)
            if val is not None or step % tc.log_every == 0 or step == 1:
                eta = (tc.steps - step) * elapsed / (step - first)
                eta = max(0.0, min(eta, 60 * tc.minutes - run["seconds"])) if tc.minutes else eta
                log_step(tc, run, loss, val, norm, tc.lr * scale, tokens / busy, eta)
                busy, tokens = 0.0, 0
            if val is not None and val < run["best"]:         # never true of nan
                run["best"] = val
                save_checkpoint(out / "best.pt", run, model, optimizers)
            number = greatest(stop.signal, device)            # a signal that comes while they exchange it counts at the next step
            stopping = number or step == tc.stop_after and over < 1
            if val is not None or stopping:
                save_checkpoint(out / "ckpt.pt", run, model, optimizers)
            if stopping:
                go_on = "eval.py --ckpt" if over >= 1 else "train.py --resume --out"
                say(f"stopped after step {step}, peak memory {peak_memory(device)}; to go on: python {go_on} {shlex.quote(tc.out)}")
                return number
            if over >= 1:
                if step < tc.steps:
                    say(f"--minutes {tc.minutes} are over after {step} of {tc.steps} steps")
                return None


LONGEST = 16384                                               # tokens of a stream, where each costs more than the one before


def holds_all(config):
    """Does the state hold every token?"""
    return config.features == "exp" and config.memory_branch if config.mixer == "memory" else not config.attn_window


def report(model, tokenizer, ids, seq_len, batch_size, dtype=torch.float32):
    """Says the mean loss of a whole split, memory reset at each window and carried (where the state holds every token, of the first LONGEST
    of each stream) -> the former, in nats a token."""
    losses = []
    for carry, name in ((False, "memory reset at each window"), (True, f"memory carried, {min(batch_size, len(ids) - 1)} streams")):
        part = ids
        if carry and holds_all(model.config) and len(ids) > batch_size * LONGEST + 1:
            part = ids[: batch_size * LONGEST + 1]
            name = f"carried, first {len(part):,} tokens"
        grows = carry and model.config.mixer == "attention"   # a cache: its length is a shape of its own
        with torch.compiler.set_stance("force_eager") if grows else nullcontext():
            losses.append(evaluate(model, part, seq_len, batch_size, carry=carry, dtype=dtype))
        bits = losses[-1] / math.log(2)
        say(f"  {name:27s}  {losses[-1]:.4f} nats/token  {bits:.4f} bits/token  {bits / tokenizer.bytes_a_token(part):.4f} bits/byte")
    return losses[0]


def finish(model, run, tc, splits, tokenizer, device, dtype):
    """What the best weights make of the whole validation split, memory reset at each window and carried; a sample."""
    ckpt = load_checkpoint(tc.out)
    model.load_state_dict(ckpt["model"])
    val, trained = splits[1], run["step"] * tc.batch_size * tc.grad_accum * tc.seq_len
    eta = 2 * len(val) * run["seconds"] / (3 * trained)       # forward alone is a third of a step, and there are two passes
    long = f" (about {clock(eta)}; Ctrl-C ends it, all is saved)" if eta > 60 else ""
    say(f"\nbest step {ckpt['step']} on the whole validation split, {len(val):,} tokens in windows of {tc.seq_len}{long}:")
    loss = report(model, tokenizer, val, tc.seq_len, tc.batch_size, dtype)
    if not math.isfinite(loss):
        raise Halt(f"the best validation loss is {loss}: the weights have diverged; lower --lr or --muon-lr")
    how = dict(temperature=0.8, generator=torch.Generator(device).manual_seed(tc.seed))
    say("\n" + "".join(continue_text(model, tokenizer, encode_prompt(tokenizer, ""), tc.sample_tokens, **how)) + "\n")
    say(f"peak memory {peak_memory(device)}")
    say(f"done: {tc.model} on {run['data']['used']}, best validation loss {loss:.4f} nats/token, "
        f"{loss / math.log(2):.4f} bits/token (whole split), {clock(run['seconds'])}")


def encode_prompt(tokenizer, prompt):
    """The ids to start from; for an empty prompt those of a newline, or id 0 where the vocabulary has none."""
    try:
        return tokenizer.encode(prompt or "\n")
    except UserError:
        if prompt:
            raise
        return [0]


def continue_text(model, tokenizer, ids, n, **how):
    """Yield what the model writes after `ids`, piece by piece, n tokens in all; `how` goes to model.generate."""
    feed = tokenizer.stream()
    tokens = torch.as_tensor(ids, device=next(model.parameters()).device)[None]
    for token in model.eval().generate(tokens, n, **how):
        yield feed(token)
    yield feed(final=True)


# ---- main

def read_for(ckpt, name):
    """data.read, which cannot know that a name was not given but stands in a checkpoint, perhaps of another machine."""
    try:
        return read(name)
    except UserError as fault:
        if name != ckpt["train"]["data"]:
            raise
        raise UserError(f"{fault} ({ckpt['path']} has this name of its text; --data gives another)") from None


def prepare_data(tc, ckpt=None, origin=None):
    """-> tokenizer, (training ids, validation ids), what text it was: on resume, the one that the run began with.

    The tokenizer is that of either checkpoint, of --resume or --init.
    """
    corpus = read_for(ckpt, tc.data) if ckpt else read(tc.data)
    if ckpt and corpus.sha256 != ckpt["data"]["sha256"]:
        was = ckpt["data"]
        raise UserError(f"--resume: data is {was['used']} (sha256 {was['sha256'][:12]}) in {ckpt['path']}, but now "
                        f"{corpus.used} ({corpus.sha256[:12]}); give the same text with --data")
    known = ckpt or origin
    tokenizer = tokenizer_from_state(known["tokenizer"]) if known else make_tokenizer(tc.tokenizer, corpus.text, tc.bpe_size)
    return tokenizer, corpus.splits(tokenizer, tc.seq_len), dict(used=corpus.used, sha256=corpus.sha256)


def probe(out):
    """Fail now, not at the first checkpoint, if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as fault:
        raise UserError(f"cannot write to --out {out} ({fault.strerror}); choose another folder") from None


def describe(tc, model, device, dtype, tokenizer, splits, used):
    chip = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    chip += f", {processes()} processes" * (processes() > 1)
    for title, values in (("run", asdict(tc)), ("network", effective(model.config))):
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        say(textwrap.fill(text, 118, initial_indent=f"{title:8s} ", subsequent_indent=" " * 9))
    how = "compiled" if tc.compile else "not compiled"
    say(f"device   {device.type} ({chip}), {str(dtype)[6:]}, matmul {torch.get_float32_matmul_precision()}, {how}, torch {torch.__version__}")
    say(f"data     {used}: {len(splits[0]):,} tokens to train, {len(splits[1]):,} to validate, {tokenizer.kind} "
        f"vocabulary of {tokenizer.vocab_size:,}")
    say(f"model    {tc.model}, {tc.size}: {model.num_params():,} parameters")


def effective(config):
    """The fields of a Config, with the muon_every that acts."""
    return asdict(config) | (dict(muon_every=config.rule().muon_every) if config.muon else {})


def warn(given, config, length, unused=(), of="--seq-len"):
    """A line about flags on which nothing depends, as --window of a transformer or those `unused` of the run: an ablation would compare a model
    with itself. A line if Newton-Schulz is not taken as rarely as it was told, and one if what the memory writes is never read, in sequences of the
    `length` that the flag `of` has given them.
    """
    nothing = idle(config)
    names = [flag("no_" * (value is False) + name) for name, value in given.items() if name in {*nothing, *unused}]
    if names:
        say(f"warning: nothing in this run depends on {', '.join(names)}")
    every = 0 if "muon_every" in nothing else config.rule().muon_every
    if every and given.get("muon_every", 0) > every:
        say(f"warning: --muon-every {given['muon_every']} acts as {every}, for Newton-Schulz sees at most a --chunk")
    if every > 1 and length + config.persistent * (config.wiring in ("mag", "mal")) <= every:
        say(f"warning: what a memory has written is first read after --muon-every {every} tokens, so never in a sequence of {of} "
            f"{length}; lower --muon-every")


def join(device, tc):
    """Make this process one of several -> its device. They compute the same steps, each from its share of the passes (train_step)."""
    if device.type == "mps":
        raise UserError("several processes on mps cannot exchange gradients; use one, or --device cpu")
    if tc.grad_accum % processes() or tc.minutes:
        raise UserError(f"{processes()} processes need a --grad-accum that they can share, not {tc.grad_accum}, and no --minutes, "
                        f"for their clocks differ; add --grad-accum {processes()} --minutes 0 (a run that is resumed keeps its --grad-accum)")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def device_of_run(tc, config):
    """The device, of this process if there are several. UserError where it cannot do what was asked for."""
    device = pick_device(tc.device)
    if processes() > 1:
        device = join(device, tc)
    if device.type == "mps" and tc.remat and config.dropout:
        raise UserError("--remat on mps would draw another dropout in backward (torch keeps no random state there); add --dropout 0")
    if tc.cuda_graph and (device.type != "cuda" or tc.remat and config.dropout):
        raise UserError("--cuda-graph needs --device cuda and, beside --remat, --dropout 0: random states cannot be kept while it is recorded")
    return device


def ended_by(ckpt, tc):
    """The flag by which the run of a checkpoint is over, or None."""
    if ckpt["step"] >= tc.steps:
        return "--steps"
    if 0 < tc.stop_after <= ckpt["step"]:
        return "--stop-after"
    return "--minutes" if progress(ckpt["step"], tc, ckpt["seconds"]) >= 1 else None


def launch(given):
    """A run, from its flags to its last line -> exit code."""
    ckpt = load_checkpoint(Path(given.get("out", TrainConfig.out)) / "ckpt.pt") if given.get("resume") else None
    origin = load_checkpoint(given["init"]) if "init" in given and not ckpt else None
    tc, config = settings(given, ckpt, origin)
    end = ended_by(ckpt, tc) if ckpt else None
    if end:
        say(f"nothing to do: {tc.out} has {ckpt['step']} of {tc.steps} steps, which is the end by {end}; eval.py --ckpt {shlex.quote(tc.out)} "
            f"evaluates it, {end} N trains it longer")
        return 0
    device = device_of_run(tc, config)
    dtype = pick_dtype(tc.dtype, device)
    set_matmul(tc.matmul, device, dtype)
    tc.compile = given.get("compile", device.type == "cuda")
    set_threads(tc.threads)
    tokenizer, splits, data = prepare_data(tc, ckpt, origin)
    probe(Path(tc.out))
    torch.manual_seed(tc.seed)
    model = (rebuild(ckpt)[0] if ckpt else begin(replace(config, vocab_size=tokenizer.vocab_size), origin)).to(device).train()
    model.remat = tc.remat
    run = {key: ckpt[key] for key in ("step", "best", "seconds")} if ckpt else dict(step=0, best=math.inf, seconds=0.0)
    run.update(preset=tc.model, config=asdict(model.config), train=asdict(tc), tokenizer=tokenizer.state(), data=data)
    describe(tc, model, device, dtype, tokenizer, splits, data["used"])
    warn(given, model.config, tc.seq_len, ["muon_lr"] * (tc.optimizer != "muon") + ["bpe_size"] * (tokenizer.kind != "bpe"))
    optimizers = make_optimizers(model, tc)
    if ckpt:
        restore(ckpt, optimizers, device)
        say(f"resuming after step {run['step']}")
    if tc.compile or tc.cuda_graph:
        x, y = (a.to(device) for a in batch(splits[0], tc.seed, 0, tc.batch_size, tc.seq_len))
    if tc.compile:
        compile_model(model, x, y, dtype)
    with nullcontext() if rank() else claim(tc.out) as alone:
        if alone:
            clear_away(tc.out)
        if ckpt and not rank() and Path(ckpt["path"]).stat().st_mtime_ns != ckpt["written"]:
            raise UserError(f"another run has gone on with {ckpt['path']} since this one has read it; train.py --resume again goes on from there")
        # what is recorded has no name here: its memory is free again when training ends
        stopped = train(model, optimizers, run, tc, splits, device, dtype, record(model, x, y, dtype, tc.grad_accum) if tc.cuda_graph else None)
        if processes() > 1:
            dist.barrier()                                    # torchrun ends all when one ends: not before the first has saved
            dist.destroy_process_group()
        if stopped is None and rank() == 0:
            finish(model, run, tc, splits, tokenizer, device, dtype)
    return 128 + stopped if stopped else 0


def main(argv=None):
    given = parse(argv)
    tune_cpu()
    return exit_code(lambda: launch(given), "stopped at once; checkpoints that were saved are intact",
                     "add --remat, or lower --batch-size (and raise --grad-accum), --seq-len, --chunk or the size of the network")

if __name__ == "__main__":
    sys.exit(main())
