"""models.py - from tokens to logits: configuration, layers, blocks, the language model, and the paper's models as data.

    block(x) = x + mixer(norm(x)),  then  x + SwiGLU(norm(x))                           ATLAS Figure 3 (left)
    mixer    = a memory that learns at test time (Figure 3, right), attention, or both wired as in Titans Eq 21-31

There are two loops. The outer loop (train.py) learns every nn.Parameter here, among them M0, where each memory starts.
The inner loop (omega.py) runs inside forward. It starts from M0 at the beginning of every sequence, changes only the
fast weights W of that sequence, and never touches a parameter. What it has learned is in the `state` that it returns.
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import memory
import omega
from memory import LOSSES, MEMORIES
from muon import COEFFICIENTS
from poly import FEATURES, Features, features_dim

WIRINGS = ("lmm", "mag", "mal", "mac")


# ---- configuration

class ConfigError(ValueError):
    """A setting that cannot be, told in one line; train.exit_code prints it."""


def opt(default, help, choices=None, low=0):
    """A field of Config or train.TrainConfig: `help` is its flag's, `low` the least number, for `check`."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low))


def flag(name):
    """The flag of a field: n_embd -> --n-embd"""
    return "--" + name.replace("_", "-")


def check(config):
    """ValueError for a value of another type, a number below its `low` or not finite, a name that is no choice."""
    for f in fields(config):
        value, choices, low = getattr(config, f.name), f.metadata["choices"], f.metadata["low"]
        kind = (int, float) if f.type is float else f.type
        if not isinstance(value, kind) or isinstance(value, bool) != (f.type is bool):
            raise ConfigError(f"{flag(f.name)} must be of type {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not low <= value < math.inf:               # false for nan, too
            raise ConfigError(f"{flag(f.name)} must be at least {low}, not {value}")
        if choices and value not in choices:
            raise ConfigError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value!r}")


@dataclass
class Config:
    """All it takes to rebuild the network. train.py makes flags of the fields, and saves them in the checkpoint."""
    vocab_size: int = opt(65, "number of tokens; set from the tokenizer", low=1)
    n_layer: int = opt(2, "blocks", low=1)
    n_head: int = opt(8, "heads; each has its own memory", low=1)
    n_embd: int = opt(192, "width of the residual stream", low=1)
    head_dim: int = opt(16, "width of a head; 0 takes n_embd / n_head")
    mixer: str = opt("memory", "what mixes tokens", ("memory", "attention"))
    wiring: str = opt("lmm", "memory alone, or with attention after Titans: gate, layer, context", WIRINGS)
    persistent: int = opt(4, "learned tokens before the sequence, in mag, mal and mac")
    memory: str = opt("linear", "the memory: a matrix, Eq 42, or Eq 43", MEMORIES)
    expansion: int = opt(1, "hidden width of the memory, in head dims", low=1)
    memory_norm: bool = opt(False, "a norm (RMS) inside a deep memory, before its residual")
    loss: str = opt("l2", "inner loss (attentional bias)", LOSSES)
    window: int = opt(8, "tokens the Omega rule looks back on (the paper's c); 1 is Titans", low=1)
    chunk: int = opt(64, "tokens that share one gradient point (the paper's b)", low=1)
    momentum: bool = opt(True, "momentum of the inner gradients, Eq 33")
    muon: bool = opt(True, "Newton-Schulz on the momentum, Eq 32")
    muon_every: int = opt(64, "tokens from one Newton-Schulz to the next, at most --chunk; 1 is Eq 40", low=1)
    ns_steps: int = opt(5, "Newton-Schulz iterations", low=1)
    ns_coefficients: str = opt("muon", "polynomial of Newton-Schulz", tuple(COEFFICIENTS))
    features: str = opt("monomial", "feature map phi of keys and queries", FEATURES)
    degree: int = opt(2, "polynomial degree of phi (the paper's p)", low=1)
    sketch_dim: int = opt(64, "features of the sketch of degree 2, for --features sketch", low=1)
    keep: bool = opt(True, "learned forgetting (alpha); --no-keep never forgets")
    forget: str = opt("start", "what is forgotten: what was written, or (zero, as printed) M0 too", ("start", "zero"))
    conv: bool = opt(True, "causal depthwise convolution of width 4 on q, k, v")
    gate: str = opt("token", "gamma: a learned weight for each token of the window, or all equal", ("token", "uniform"))
    max_step: float = opt(2.0, "upper bound of the sum of a chunk's step sizes eta: each is at most max_step / chunk")
    step_start: float = opt(0.0, "bias of eta's gate at the start; the lower, the less is written", low=-20)
    max_norm: float = opt(50.0, "largest norm of a fast weight matrix, less M0, at a chunk boundary; 0: no bound")
    polarise: float = opt(0.0, "of mag and mac: adds to the loss so many times mean(1 - |2g - 1|), g the mixing gate")
    gate_floor: str = opt("0", "of mag and mac: least share of the memory itself, until a tenth of the run, a third of "
                          "it, and after: 0.3,0.1,0.05")
    shard: int = opt(0, "tokens of a shard; each has a local memory of its own, beside a global one (TNT); 0: off")
    attn_window: int = opt(64, "sliding window of attention in tokens, the segment of mac; 0 is full attention")
    mlp_hidden: int = opt(0, "hidden width of the SwiGLU; 0 takes 8/3 of n_embd")
    dropout: float = opt(0.0, "dropout on what each block adds to the residual stream, below 1")
    tie: bool = opt(False, "share the embedding with the output layer")

    def __post_init__(self):
        check(self)
        if not self.head_dim and self.n_embd % self.n_head:
            raise ConfigError(f"--n-embd {self.n_embd} is no multiple of --n-head {self.n_head}; give --head-dim")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        try:
            floors = [float(f) for f in self.gate_floor.split(",")]
        except ValueError:
            floors = [math.nan]
        attention = self.mixer == "attention"
        polynomial = features_dim(self.features, self.head_dim, self.degree, self.sketch_dim)
        for fault, message in (
            (self.dropout >= 1, f"--dropout must be below 1, not {self.dropout}"),
            (attention and self.wiring != "lmm", f"--wiring {self.wiring} needs a memory model, not attention alone"),
            ((attention or self.wiring != "lmm") and self.head_dim % 2, "rotary embedding needs an even --head-dim"),
            (not all(0 <= f < 1 for f in floors), f"--gate-floor takes shares from 0 to below 1, as 0.3,0.1,0.05, not "
             f"{self.gate_floor!r}"),
            ((self.polarise or any(floors)) and self.wiring not in ("mag", "mac"), "--gate-floor and --polarise need "
             "--wiring mag or mac"),
            (self.wiring != "lmm" and not self.attn_window, f"--wiring {self.wiring} needs an --attn-window"),
            (not attention and polynomial > 10**6, "more than a million features; lower --degree or --head-dim"),
            (self.shard and (attention or self.wiring == "mac" or self.features == "exp"),
             "--shard needs a memory with finite features, and another --wiring than mac"),
            (self.features == "sketch" and self.degree != 2, "--features sketch is of --degree 2"),
            (not attention and self.muon and self.features == "exp", "--features exp needs --no-muon: it is infinite"),
        ):
            if fault:
                raise ConfigError(message)

    def rule(self):
        """The same for omega.py: `muon_every` is at most `chunk`, and 0 without Newton-Schulz."""
        return omega.Rule(
            memory=self.memory, loss=self.loss, window=self.window, chunk=self.chunk,
            muon_every=min(self.muon_every, self.chunk) if self.muon else 0, ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients, forget=self.forget, norm=self.memory_norm, ball=self.max_norm)


# The paper's models as differences from Config's defaults. Where no memory is named, the size decides.
_simple = dict(momentum=False, muon=False)
_muon = dict(chunk=32, muon_every=8, ns_steps=3)              # chosen by measuring: results/README.md
_kernel = dict(memory="mlp", features="exp", keep=False, **_simple)
PRESETS = {
    "transformer":     dict(mixer="attention", head_dim=0, attn_window=0),
    "swa":             dict(mixer="attention", head_dim=0),
    #                       memory           loss        window
    "linear":          dict(memory="linear", loss="dot", window=1, features="none", keep=False, **_simple),  # Eq 45
    "deltanet":        dict(memory="linear", loss="l2",  window=1, features="none", keep=False, **_simple),  # Eq 47
    "titans":          dict(                 loss="l2",  window=1, features="none", muon=False),             # Eq 12, 13
    "dla":             dict(memory="mlp",    loss="dot", window=1, memory_norm=True, **_simple),             # Eq 19
    "swla":            dict(memory="linear", loss="dot", window=8, features="none", **_simple),  # Eq 55, D.2
    "deeptransformer": dict(_kernel,         loss="dot", window=1, memory_norm=True),                        # Eq 25
    "swdt":            dict(_kernel,         loss="dot", window=8, memory_norm=True),                        # Table 1
    "dot":             dict(_kernel,         loss="l2",  window=8),                                          # Eq 27
    "omeganet":        dict(                 loss="l2",  window=8, **_simple),                               # Eq 10
    "atlas":           dict(                 loss="l2",  window=8, **_muon),                                 # Eq 32, 33
    "atlas++":         dict(memory="gated",  loss="l2",  window=8, **_muon),                                 # Eq 43
}

# Sizes, under the preset. `tiny` is Config itself: its memory is a matrix, which on a laptop learns more in the same
# time than the paper's MLP (results/README.md). From 170m on the shapes are those of the paper's Table 7. Wide heads
# have too many exact monomials, so there phi is a sketch, of 1 + D + 255 features: a multiple of 16, which GPUs like.
_large = dict(memory="mlp", head_dim=0, expansion=4, features="sketch", sketch_dim=255)
SIZES = {
    "tiny": dict(),
    "baby": dict(memory="mlp", n_layer=6, n_head=12, n_embd=384, dropout=0.1),
    "34m": dict(n_layer=6, n_head=6, n_embd=384, tie=True, **_large),
    "54m": dict(n_layer=6, n_head=8, n_embd=512, tie=True, **_large),
    "67m": dict(n_layer=8, n_head=8, n_embd=512, tie=True, **_large),
    "170m": dict(n_layer=12, n_head=16, n_embd=768, **_large),
    "195m": dict(n_layer=12, n_head=12, n_embd=768, **_large),
    "340m": dict(n_layer=24, n_head=16, n_embd=1024, **_large),
    "760m": dict(n_layer=24, n_head=16, n_embd=1536, **_large),
    "1.3b": dict(n_layer=18, n_head=8, n_embd=2048, **_large),
}


def configure(preset="atlas", size="tiny", **overrides):
    """Config's defaults < a size < a preset < `overrides` (fields of Config) -> Config."""
    for name, known in ((preset, PRESETS), (size, SIZES)):
        if name not in known:
            raise ConfigError(f"unknown model or size {name!r}; choose one of {', '.join(known)}")
    return Config(**{**SIZES[size], **PRESETS[preset], **overrides})


def build(preset="atlas", size="tiny", **overrides):
    """A language model: LM(configure(preset, size, **overrides))."""
    return LM(configure(preset, size, **overrides))


# ---- parts of layers

class Norm(nn.Module):
    """RMSNorm over the last dimension with a learned scale, of any shape."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=2**-23) * self.weight


def heads(x, H):
    """(B, T, H D) -> (B, H, T, D)"""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x):
    """Fast weights stay float32: in bfloat16 a keep of 0.999 is 1. (The meta device has no autocast.)"""
    there = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if there else nullcontext()


def check_input(x, n_embd):
    """ValueError if a layer's x is not (B >= 1, T >= 1, n_embd)."""
    if x.dim() != 3 or not x.numel() or x.shape[2] != n_embd:
        raise ValueError(f"a layer reads (B, T >= 1, {n_embd}), not {tuple(x.shape)}; one sequence is x[None]")


class MemoryState(NamedTuple):
    """What a Memory carries from call to call."""
    rule: omega.State | omega.Shards      # the memory itself
    conv: torch.Tensor                    # (B, 3, 3 H D), the last inputs of the convolution


def short_conv(before, x, taps):
    """silu of sum_j taps[j] * x_{t-n+j}, by channel: before (B, n, C), x (B, T, C), taps (n + 1, C) -> (B, T, C).

    In 2 dimensions, the channels last: on a CPU twice as fast as conv1d.
    """
    seen = torch.cat([before, x], 1)[:, None].permute(0, 3, 1, 2)                # (B, C, 1, n + T)
    y = F.conv2d(seen, taps.T[:, None, None].to(x.dtype), groups=x.shape[2])
    return F.silu(y).permute(0, 2, 3, 1)[:, 0]


def unit(x):
    """x / |x|; 0 for 0."""
    return F.normalize(x, dim=-1, eps=1e-6)


class Memory(nn.Module):
    """The layer that learns at test time (Figure 3, right).

        x --+-- qkv -- short_conv, SiLU --+-- q, k -- unit length -- phi --+
            |                             +-- v ---------------------------+-- omega: write (k, v), read q -- norm --+
            +-- gates -- keep, step, momentum, gate -----------------------+                                    * -- out
            +-- out_gate -- SiLU ------------------------------------------------------------------------------------+

    With `muon` and a `muon_every` above 1, what a block of so many tokens writes is first read by its last token. A
    shorter sequence reads M0 alone.
    """
    conv_width = 4

    def __init__(self, config):
        super().__init__()
        self.config = config
        c, d, H, inner = config, config.n_embd, config.n_head, config.n_head * config.head_dim
        self.qkv = nn.Linear(d, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.zeros(self.conv_width, 3 * inner)) if c.conv else None
        self.n_gates = [1, 1, int(c.momentum), c.window if c.gate == "token" else 0]             # as in make_gates
        self.gates = nn.Linear(d, H * sum(self.n_gates))
        self.phi = Features(c.features, c.head_dim, c.degree, c.sketch_dim)
        sizes = memory.shapes(c.memory, self.phi.out_dim, c.expansion * c.head_dim, c.head_dim)
        make = lambda: nn.ParameterList(nn.Parameter(torch.zeros(H, *s)) for s in sizes)
        self.M0, self.global_M0 = make(), make() if c.shard else ()
        self.norm = Norm(H, 1, c.head_dim)
        self.out_gate = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d, bias=False)
        self.init()

    def init(self):
        """Starting values beyond those of nn.Linear. In a model of your own call it after model.apply(your_init)."""
        H, c = self.config.n_head, self.config
        if self.conv is not None:  # a channel begins with a mixture of four tokens of its own
            nn.init.normal_(self.conv, std=self.conv_width ** -0.5)
        for M0 in (self.M0, self.global_M0):  # x W as long as 2 phi(k), and little added to k  (choice 10)
            for W in M0:
                last = 1.0 if c.memory_norm else 0.25
                std = 0.0 if c.memory == "linear" else last if W is M0[-1] else 2.0
                nn.init.normal_(W, std=std * M0[-1].shape[1] ** -0.5)
        nn.init.normal_(self.gates.weight, std=0.02)
        keep = torch.linspace(1, 6, H) if H > 1 else torch.full((1,), 3.5)       # 0.73 .. 0.998, by head  (choice 16)
        step, others = torch.full((H, 1), c.step_start), torch.zeros(H, sum(self.n_gates[2:]))   # 1/4 of its bound, 1/2
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([keep[:, None], step, others], 1).flatten())

    def make_gates(self, x):
        """keep, step, momentum (B, H, T) and gate (B, H, T, window), each a function of its token."""
        c = self.config
        made = heads(self.gates(x.to(self.M0[0].dtype)), c.n_head)
        keep, step, momentum, gate = made.split(self.n_gates, -1)
        opened = step.squeeze(-1).sigmoid().square()          # squared, it closes well  (choice 16)
        step = c.max_step / c.chunk * opened                                                     # eta
        keep = 1 - opened * (-keep).squeeze(-1).sigmoid() if c.keep else torch.ones_like(opened)                 # alpha
        momentum = momentum.squeeze(-1).sigmoid() if c.momentum else None                        # theta
        gate = gate.sigmoid() if c.gate == "token" else gate.new_ones(*keep.shape, c.window)     # gamma  (choice 6)
        return omega.Gates(keep, step, momentum, gate / c.window)

    def start(self, x):
        """The state before the first token, for a batch of len(x) sequences."""
        c, B = self.config, len(x)
        inner = omega.start(c.rule(), self.phi, list(self.global_M0 or self.M0), B, momentum=c.momentum)
        if c.shard:
            kk = self.M0[0].new_zeros(B, c.n_head, c.head_dim, c.head_dim)
            inner = omega.Shards(tuple(self.M0), inner, None, kk, 0)
        return MemoryState(inner, x.new_zeros(B, self.conv_width - 1, self.qkv.out_features))

    def forward(self, x, state=None):
        """x (B, T, n_embd), MemoryState or None -> (B, T, n_embd), MemoryState. ValueError as `check_input`."""
        check_input(x, self.config.n_embd)
        state = state or self.start(x)
        *qkv, gates, tail = self.project(x, state)
        with without_autocast(x):
            run = partial(omega.shards, self.config.shard) if self.config.shard else omega.omega
            y, inner = run(self.config.rule(), self.phi, *qkv, gates, state.rule)
        return self.finish(x, y), MemoryState(inner, tail)

    def project(self, x, state):
        """-> q, k, v (B, H, T, D), gates, and what the convolution carries on."""
        qkv, n = self.qkv(x), self.conv_width - 1
        before = state.conv.to(qkv.dtype)
        tail = torch.cat([before, qkv[:, -n:]], 1)[:, -n:]
        qkv = F.silu(qkv) if self.conv is None else short_conv(before, qkv, self.conv)
        q, k, v = (at_least_float32(heads(a, self.config.n_head)) for a in qkv.chunk(3, -1))
        with without_autocast(x):
            return unit(q), unit(k), v, self.make_gates(x), tail                 # choice 8

    def watch(self, x, state=None):
        """The gates and the surprise of each token of x (B, T, n_embd) -> a dict as of `probe`."""
        state, rule = state or self.start(x), self.config.rule()
        _, k, v, gates, _ = self.project(x, state)
        with without_autocast(x):
            y = omega.omega(rule, self.phi, k.roll(-1, 2), k, v, gates, state.rule)[0]           # W_t asked for k_t+1
            k, W, keys = k[:, :, :1], omega.total(state.rule), state.rule.keys
            y0 = memory.apply(rule.memory, W, self.phi(k) if keys is None else omega.kernel_rows(k, keys), k, rule.norm)
            y = torch.cat([y0, y[:, :, :-1]], 2)
            surprise = torch.vmap(lambda y, v: memory.loss(rule.loss, y, v))(y.flatten(0, 2), v.flatten(0, 2))
        found = dict(gates._asdict(), gate=gates.gate.sum(-1), surprise=surprise.view(y.shape[:3]))
        return {name: a for name, a in found.items() if a is not None}

    def finish(self, x, y):
        """Norm of each head, output gate, projection: y (B, H, T, D) -> (B, T, n_embd)."""
        y = self.norm(y).transpose(1, 2).flatten(2).to(x.dtype)
        return self.out(y * F.silu(self.out_gate(x)))

    def retrieve(self, x, W, keys=None):
        """M*(q), Titans Eq 21: what the fast weights W recall for x (B, T, n_embd), without writing -> likewise."""
        q = F.silu(self.qkv(x).chunk(3, -1)[0])               # no convolution: choice 18
        q = unit(at_least_float32(heads(q, self.config.n_head)))
        with without_autocast(x):
            rule, rows = self.config.rule(), self.phi(q) if keys is None else omega.kernel_rows(q, keys)
            y = memory.apply(rule.memory, W, rows, q, rule.norm)
        return self.finish(x, y)


class AttentionState(NamedTuple):
    """What Attention carries from call to call, and mac within a segment."""
    k: torch.Tensor                       # (B, H, n, D), n < attn_window if that is set; in mac
    v: torch.Tensor                       # (B, H, 2, n, D), of h and x
    pos: int                              # tokens so far; in mac of the segment


def rope(x, pos):
    """Rotary positions (Su et al. 2021): pairs of coordinates of x (B, H, T, D) turn, the more the later."""
    half, exact = x.shape[-1] // 2, torch.float32 if x.device.type == "mps" else torch.float64   # long streams need it
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    turns = torch.arange(pos, pos + x.shape[2], device=x.device, dtype=exact)[:, None] * (freq / (2 * math.pi))
    angle = (2 * math.pi * turns.frac()).to(x.dtype)
    cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Causal softmax attention, full or with a sliding window: RoPE, normalised queries and keys. The baseline.

    The window counts the token itself. `prefix` tokens have no position; every token sees them, however far behind.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        inner = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * inner, bias=False)
        self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)
        self.out = nn.Linear(inner, config.n_embd, bias=False)

    def project(self, x):
        """x (B, T, n_embd) -> q, k, v (B, H, T, D), before norm and rotation."""
        return (heads(a, self.config.n_head) for a in self.qkv(x).chunk(3, -1))

    def project_prefix(self, p, B):
        """Keys and values (B, H, P, D) of tokens p (P, n_embd) that stand before every sequence; without a position."""
        _, k, v = (a.expand(B, -1, -1, -1) for a in self.project(p[None]))
        return self.k_norm(k), v

    def forward(self, x, state=None, prefix=None):
        """x (B, T, n_embd), AttentionState or None, prefix (P, n_embd) -> (B, T, n_embd), AttentionState."""
        check_input(x, self.config.n_embd)
        w, pos = self.config.attn_window, state.pos if state else 0
        q, k, v = self.project(x)
        q, k = rope(self.q_norm(q), pos), rope(self.k_norm(k), pos)                              # choice 17
        if state:
            k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        y = attend(q, k, v, w, *(self.project_prefix(prefix, len(x)) if prefix is not None else ()))
        kept = [a[:, :, max(0, k.shape[2] - w + 1):].clone() if w else a for a in (k, v)]        # a view would hold all
        return self.out(y.transpose(1, 2).flatten(2)), AttentionState(*kept, pos + x.shape[1])


def attend(q, k, v, window, pk=None, pv=None):
    """Attention of the last T positions (B, H, T, D) to k, v (B, H, n >= T, D), and to all of pk, pv.

    Each sees its last `window` positions; 0: all. With a window it goes piece by piece: the cost is linear in T.
    """
    T, w, before = q.shape[2], window, k.shape[2] - q.shape[2]
    if not before and pk is None and (w == 0 or w >= T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ys, step = [], max(4 * w, 256) if w else T
    for a in range(0, T, step):
        b, first = min(a + step, T), max(0, before + a - w + 1) if w else 0
        i = torch.arange(before + a, before + b, device=q.device)[:, None]
        j = torch.arange(first, before + b, device=q.device)
        seen, mask = (k[:, :, first: before + b], v[:, :, first: before + b]), (j <= i) & (j > i - w) if w else j <= i
        if pk is not None:
            seen, mask = [torch.cat(pair, 2) for pair in zip((pk, pv), seen)], F.pad(mask, (pk.shape[2], 0), value=True)
        ys.append(F.scaled_dot_product_attention(q[:, :, a:b], *seen, attn_mask=mask))
    return torch.cat(ys, 2)


class WiringState(NamedTuple):
    """What a Wiring carries from call to call; None for what has not begun, or is not there."""
    memory: MemoryState | None
    attention: AttentionState | None      # of mac: the segment in progress
    frozen: tuple                         # of mac: fast weights and keys at the segment's start


def floor(config, done=1.0):
    """The least share of the memory in mag and mac once this share of the run is done (--gate-floor)."""
    floors = [float(f) for f in config.gate_floor.split(",")]
    return floors[-1] if done >= 1 / 3 else floors[:2][-1] if done >= 0.1 else floors[0]


class Wiring(nn.Module):
    """Memory and attention together, with persistent tokens p, after Titans (section 4, and its equation numbers).

    M(..) learns as it reads. M*(..) reads the memory as it was at the segment's start. SWA is attention with a sliding
    window, in which p is like any token. In SWA* every token sees p, however far behind.

        mag   y = SWA*(p | x),  o = norm(y) * sigmoid(norm(M(p | x)))                    Eq 26 - 28
        mal   o = SWA(norm(M(p | x)))                                                    Eq 29 - 31
        mac   h = M*(x),  y = Attn(p | h | x),  o = norm(y) * sigmoid(norm(M(y)))        Eq 21 - 25
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.memory = Memory(config)
        self.persistent = nn.Parameter(torch.zeros(config.persistent, config.n_embd)) if config.persistent else None
        self.y_norm = Norm(config.n_embd) if config.wiring != "mal" else None
        self.m_norm = Norm(config.n_embd)
        self.floor = floor(config)
        self.init()

    def init(self):
        """Starting values beyond those of its parts."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent)

    def forward(self, x, state=None):
        """x (B, T, n_embd), WiringState or None -> (B, T, n_embd), WiringState. ValueError as `check_input`."""
        check_input(x, self.config.n_embd)
        self.undecided = []
        return getattr(self, self.config.wiring)(x, state or WiringState(None, None, ()))

    def remember(self, x, state):
        """M(p | x): the persistent tokens come first, once -> what is read, the state, how many of them came now."""
        n = 0
        if state.memory is None and self.persistent is not None:
            n = len(self.persistent)
            x = torch.cat([self.persistent.to(x.dtype).expand(len(x), -1, -1), x], 1)
        m, memory_state = self.memory(x, state.memory)
        return m, state._replace(memory=memory_state), n

    def gated(self, y, m):
        m = self.m_norm(m)
        g = m.sigmoid()
        if self.config.polarise:
            self.undecided.append((1 - (2 * g - 1).abs()).mean())                # 0 where g is 0 or 1; for LM.loss
        o = self.y_norm(y) * g                                                                   # choice 13
        return (1 - self.floor) * o + self.floor * m if self.floor else o

    def mag(self, x, state):
        """Both read x; the memory gates what attention says (Eq 26 - 28)."""
        y, attention = self.attention(x, state.attention, self.persistent)
        m, state, n = self.remember(x, state)
        return self.gated(y, m[:, n:]), state._replace(attention=attention)

    def mal(self, x, state):
        """The memory reads x, attention what the memory says (Eq 29 - 31)."""
        m, state, n = self.remember(x, state)
        y, attention = self.attention(self.m_norm(m), state.attention)
        return y[:, n:], state._replace(attention=attention)

    def mac(self, x, state):
        """Segment by segment (they do not overlap): read with the memory as it was, attend, write what that says."""
        outs = []
        while x.shape[1]:
            room = self.config.attn_window - (state.attention.pos if state.attention else 0)
            o, state = self.segment(x[:, :room], state)
            outs.append(o)
            if x.shape[1] >= room:
                state = state._replace(attention=None, frozen=())
            x = x[:, room:]
        return torch.cat(outs, 1), state

    def segment(self, x, state):
        """A segment, or a part of one: token i sees p, and the h_j and x_j of its segment with j <= i (choice 18)."""
        a, T, pos = self.attention, x.shape[1], state.attention.pos if state.attention else 0
        inner = state.memory or self.memory.start(x)
        frozen = state.frozen or (omega.total(inner.rule), inner.rule.keys)
        projected = [tuple(a.project(h)) for h in (self.memory.retrieve(x, *frozen), x)]         # Titans Eq 21
        q = rope(a.q_norm(projected[-1][0]), pos)                                                # of x alone
        ks = torch.stack([rope(a.k_norm(k), pos) for _, k, _ in projected], 2)                   # (B, H, 2, T, D)
        vs = torch.stack([v for _, _, v in projected], 2)
        if state.attention:
            ks, vs = torch.cat([state.attention.k, ks], 3), torch.cat([state.attention.v, vs], 3)
        n, k, v = ks.shape[3], ks.flatten(2, 3), vs.flatten(2, 3)
        mask = torch.ones(T, n, dtype=torch.bool, device=x.device).tril(n - T).repeat(1, 2)
        if self.persistent is not None:
            pk, pv = a.project_prefix(self.persistent, len(x))
            k, v, mask = torch.cat([pk, k], 2), torch.cat([pv, v], 2), F.pad(mask, (pk.shape[2], 0), value=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)                              # Titans Eq 22, 23
        y = a.out(y.transpose(1, 2).flatten(2))
        m, inner = self.memory(y, inner)  # Titans Eq 24: write, read
        return self.gated(y, m), WiringState(inner, AttentionState(ks, vs, pos + T), frozen)     # Titans Eq 25


class SwiGLU(nn.Module):
    """silu(x Gate) * (x Up) Out, the second half of a block (Shazeer 2020): (.., n_embd) -> (.., n_embd)."""

    def __init__(self, config):
        super().__init__()
        hidden = config.mlp_hidden or -(-config.n_embd * 8 // 3 // 16) * 16
        self.gate = nn.Linear(config.n_embd, hidden, bias=False)
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.out = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = Norm(config.n_embd), Norm(config.n_embd)
        mixer = Attention if config.mixer == "attention" else Memory if config.wiring == "lmm" else Wiring
        self.mixer = mixer(config)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, state=None):
        y, state = self.mixer(self.norm1(x), state)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), state


# ---- the language model

class LM(nn.Module):
    """A language model: tokens (B, T) -> logits (B, T, vocab_size). Every layer's state comes out and can go in."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.remat = False                                    # train.py's --remat: backward computes each block again
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = Norm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init()

    def init(self):
        """Starting values."""
        if self.config.tie:
            self.head.weight = self.embed.weight
        for name, m in self.named_modules():
            if isinstance(m, nn.Linear):
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith(".out") else 1.0
                nn.init.normal_(m.weight, std=scale * m.in_features ** -0.5)
        nn.init.normal_(self.embed.weight, std=0.02 if self.config.tie else 1.0)
        for m in self.modules():
            if isinstance(m, (Memory, Wiring)):
                m.init()

    def forward(self, tokens, state=None):
        """tokens (B, T), state from an earlier call or None -> logits (B, T, vocab_size), state after the last token.

        Any split of a sequence over calls gives the logits of the whole. ValueError for tokens of another shape.
        """
        x = self.embed(tokens)
        if state and not tokens.numel():                      # an empty piece
            return self.head(x), state
        if self.config.tie:
            x = x * self.config.n_embd ** 0.5
        states, remat = [], self.remat and torch.is_grad_enabled()
        for block, s in zip(self.blocks, state or [None] * len(self.blocks), strict=True):
            x, s = checkpoint(block, x, s, use_reentrant=False) if remat else block(x, s)
            states.append(s)
        return self.head(self.norm(x)), tuple(states)

    def loss(self, tokens, targets):
        """Mean cross entropy in nats of targets (B, T) given tokens (B, T); targets of -100 do not count.

        With `polarise` it also holds that many times how undecided the mixing gates are.
        """
        logits = at_least_float32(self(tokens)[0])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        if self.config.polarise:
            loss = loss + self.config.polarise * torch.stack([g for b in self.blocks for g in b.mixer.undecided]).mean()
        return loss

    def compile_memory(self, **options):
        """Regional torch.compile: the chunk steps of the memory, for the whole process; attention blocks as a whole."""
        omega.compile_chunks(**options)
        for block in self.blocks:
            if isinstance(block.mixer, Attention):
                block.compile(dynamic=False, **options)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, state=None):
        """Yield max_new_tokens times the next token (B,), given tokens (B, T). With dropout call eval() first.

        temperature 0 takes the likeliest token; top_k 0 and top_p 1 are off. `state` is of a text before the tokens.
        Each token costs the same, as long as the state does not grow (`holds_all`).
        ValueError, at the first token, for an empty prompt, or a temperature, top_k or top_p below 0.
        """
        if not tokens.numel():
            raise ValueError("a prompt is (B, T >= 1); to begin with nothing, give the token of a newline")
        if min(temperature, top_k, top_p) < 0:
            raise ValueError(f"temperature, top_k and top_p are at least 0, not {temperature}, {top_k}, {top_p}")
        for _ in range(max_new_tokens):
            with torch.inference_mode(), torch.compiler.set_stance("force_eager"):  # single tokens: too many shapes
                for piece in tokens.split(1024, -1):  # a long prompt would have the logits of all its tokens at once
                    logits, state = self(piece, state)
                token = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
                tokens = token[:, None]
            yield token.clone()                               # out here it is a tensor like any other


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token for each row of logits (B, V): temperature, the top_k likeliest, the fewest of total mass top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / max(temperature, 1e-30)).sort(descending=True)
    if top_k:
        logits[:, top_k:] = -torch.inf
    probs = logits.softmax(-1)
    if top_p < 1:  # the token that crosses top_p stays, and the likeliest always
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= max(top_p, 1e-9), 0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def detach(state):
    """The state, cut off from the autograd graph of the tokens that made it: for streaming, and training on segments.

    M0, a parameter that it refers to, stays that parameter.
    """
    return tree_map(lambda a: a.detach() if isinstance(a, torch.Tensor) and not a.is_leaf else a, state)


def state_bytes(state):
    """Bytes of all tensors in a state. Parameters that it refers to (M0) do not count."""
    held = {id(a): a for a in tree_leaves(state) if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)}
    return sum(a.numel() * a.element_size() for a in held.values())


def holds_all(config):
    """Does the state hold every token, so that it grows with the text?"""
    return config.features == "exp" if config.mixer == "memory" else not config.attn_window


@torch.no_grad()
def probe(model, tokens):
    """What the memory does while the model reads tokens (B, T) from the start -> for each layer a dict of tensors.

        keep, step, momentum, gate   (B, H, T); gate is the mean over the window
        surprise    (B, H, T)        the inner loss of a pair at the memory before it: l(M(phi(k_t); W_{t-1}), v_t)
        untaught    (B, H, T)        the same of a memory that may not write
        written, S  (B, H)           |W - M0| and |S| after the last token; without momentum there is no S
        share       ()               |o - o'| / |o|: o is what the layer says, o' the same if its memory may not write
        mixing      (B, T, n_embd)   of mag and mac: the gate of the attention, sigmoid(norm(M(..)))
    """
    calls, found, T, writes = {}, [], tokens.shape[1], (model.config.max_step, model.config.keep)
    layers = [block.mixer for block in model.blocks]
    handles = [m.register_forward_hook(lambda m, args, out: calls.setdefault(m, []).append((args, out)))
               for layer in layers for m in (layer, *layer.children())]
    model(tokens)
    for handle in handles:
        handle.remove()
    for layer in layers:
        inside = getattr(layer, "memory", layer)              # of a Wiring; mac calls it once a segment
        (x, *_), (o, _) = calls[layer][0]
        seen, fresh = [inside.watch(*args) for args, _ in calls[inside]], inside.start(x).rule
        model.config.max_step, model.config.keep = 0.0, False
        share = (o - layer(x)[0]).norm() / o.norm()
        for at, ((x, state), _) in zip(seen, calls[inside]):
            at["untaught"] = inside.watch(x, state and state._replace(rule=fresh))["surprise"]
        model.config.max_step, model.config.keep = writes
        at = {name: torch.cat([a[name] for a in seen], -1)[..., -T:] for name in seen[0]}   # no persistent tokens
        last = calls[inside][-1][1][1].rule
        W = last.W if last.M0 else [a - b for a, b in zip(last.W, inside.M0)]
        for name, matrices in ("written", W), ("S", last.S):
            if matrices:
                at[name] = sum(w.square().sum((-2, -1)) for w in matrices).sqrt()
        if model.config.wiring in ("mag", "mac"):
            at["mixing"] = torch.cat([out for _, out in calls[layer.m_norm]], 1).sigmoid()
        found.append(at | dict(share=share))
    return found
