"""models.py - from tokens to logits: configuration, memory layer, language model, and the paper's models as data.

    block(x) = x + layer(norm(x)),  then  x + SwiGLU(norm(x))                           ATLAS Figure 3 (left)
    layer    = a memory that learns at test time (Figure 3, right), attention, or both (wiring.py)

There are two loops. The outer loop (train.py) learns every nn.Parameter here, among them M0, where each memory starts.
The inner loop (omega.py) runs inside forward. It starts from M0 at the beginning of every sequence, changes only the
fast weights W of that sequence, and never touches a parameter. The `state` that forward returns holds what it learned.
"""
import math
import re
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_with_path
from torch.utils.checkpoint import checkpoint

import memory
import omega
import poly
import shards
from common import UserError, check, opt
from memory import LOSSES, MEMORIES, at_least_float32, unit, without_autocast
from muon import COEFFICIENTS
from poly import FEATURES, Features, features_dim
from wiring import (WIRINGS, Attention, AttentionState, Norm, Wiring, WiringState, check_input, check_state, heads,
                    numbered)


# ---- configuration
@dataclass
class Config:
    """Everything that rebuilds the network. The fields are flags of train.py, and the checkpoint holds them."""
    vocab_size: int = opt(65, "number of tokens; set from the tokenizer", low=1)
    n_layer: int = opt(2, "number of blocks", low=1)
    n_head: int = opt(8, "number of heads; each has its own memory", low=1)
    n_embd: int = opt(192, "width of the residual stream", low=1)
    head_dim: int = opt(16, "width of a head; 0: n_embd / n_head")
    attention: bool = opt(False, "attention alone, without a memory")
    wiring: str = opt("lmm", "lmm: the memory alone; mag, mal, mac: with attention, as in Titans", WIRINGS)
    persistent: int = opt(4, "MAG, MAL and MAC only: learned tokens before the sequence")
    memory: str = opt("linear", "what the memory is: a matrix, an MLP (Eq 42) or a gated MLP (Eq 43)", MEMORIES)
    expansion: int = opt(1, "hidden width of an MLP memory, in multiples of --head-dim", low=1)
    memory_norm: bool = opt(False, "normalise (RMS) what an MLP memory adds to its residual")
    loss: str = opt("l2", "inner loss (attentional bias)", LOSSES)
    window: int = opt(8, "tokens that the Omega rule looks back on (the paper's c); 1: Titans", low=1)
    chunk: int = opt(64, "tokens that share one gradient point (the paper's b)", low=1)
    momentum: bool = opt(True, "momentum of the inner gradients, Eq 33")
    muon: bool = opt(True, "Newton-Schulz on the inner momentum, Eq 32")
    muon_every: int = opt(64, "tokens from one Newton-Schulz to the next, at most --chunk; 1: Eq 40", low=1)
    ns_steps: int = opt(5, "iterations of Newton-Schulz", low=1)
    ns_coefficients: str = opt("muon", "polynomial of Newton-Schulz", tuple(COEFFICIENTS))
    features: str = opt("monomial", "feature map phi of keys and queries", FEATURES)
    degree: int = opt(2, "polynomial degree of phi (the paper's p)", low=1)
    sketch_dim: int = opt(64, "with --features sketch: number of features of degree 2", low=1)
    keep: bool = opt(True, "learned forgetting (alpha); --no-keep never forgets")
    forget: str = opt("start", "what keep < 1 decays to: M0, or zero as the paper prints", ("start", "zero"))
    conv: bool = opt(True, "causal depthwise convolution of width 4 on q, k, v")
    lookback: int = opt(0, "the block, from 1, whose memory recalls what came next (choice 23); 0: none")
    window_gate: str = opt("token", "weights of a window (gamma): learned for each token, or uniform",
                           ("token", "uniform"))
    max_step: float = opt(2.0, "upper bound of a chunk's summed step sizes (eta): each is at most max_step / chunk")
    step_start: float = opt(0.0, "initial bias of the step size's gate; if lower, less is written at first", low=-20)
    max_norm: float = opt(50.0, "bound of |W - M0| (--forget zero: |W|) of each matrix where a chunk ends; 0: none")
    polarise: float = opt(0.0, "MAG and MAC only: adds this times mean(1 - |2g - 1|) to the loss, g the attention gate")
    memory_floor: str = opt("0", "MAG and MAC only: least weight of the memory's own output, for the first 10 % of "
                            "steps, up to 33 %, and after: 0.3,0.1,0.05")
    shard: int = opt(0, "tokens in a shard; each has a local memory beside the global one (shards.py); 0: off")
    attn_window: int = opt(64, "tokens that attention sees, or of a MAC segment; 0: full attention")
    mlp_hidden: int = opt(0, "hidden width of the SwiGLU; 0: 8/3 of n_embd")
    dropout: float = opt(0.0, "dropout on what each block adds to the residual stream, below 1")
    tie: bool = opt(False, "share the embedding with the output layer")

    def __post_init__(self):
        check(self)
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(f"--n-embd {self.n_embd} is no multiple of --n-head {self.n_head}; give --head-dim")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        alone, wired, E = self.attention, self.wiring != "lmm", features_dim(
            self.features, self.head_dim, self.degree, self.sketch_dim)
        for fault, message in (
            (self.dropout >= 1, f"--dropout must be below 1, not {self.dropout}"),
            (alone and wired, f"--wiring {self.wiring} needs a memory model, not attention alone"),
            ((alone or wired) and self.head_dim % 2, "rotary embedding needs an even --head-dim"),
            (not re.fullmatch(r"(0|0?\.\d+)(,(0|0?\.\d+)){0,2}", self.memory_floor), "--memory-floor takes 1 to 3 "
             f"numbers below 1, as 0.3,0.1,0.05, not {self.memory_floor!r}"),
            ((self.polarise or self.memory_floor != "0") and self.wiring not in ("mag", "mac"),
             "--memory-floor and --polarise need --wiring mag or mac"),
            (wired and not self.attn_window, f"--wiring {self.wiring} needs an --attn-window"),
            (not alone and E > 10**6, "more than a million features; lower --degree or --head-dim"),
            (self.shard and (alone or self.wiring == "mac" or self.features == "exp"),
             "--shard needs a memory with finite features, and another --wiring than mac"),
            (self.lookback > self.n_layer or self.lookback and (alone or not self.conv),
             "--lookback is at most --n-layer, and needs a memory and --conv"),
            (self.features == "sketch" and self.degree != 2, "--features sketch needs --degree 2"),
            (not alone and self.muon and self.features == "exp", "--features exp needs --no-muon: it is infinite"),
        ):
            if fault:
                raise UserError(message)

    def period(self):
        """Return the least number of tokens that whole chunks (or shards), and segments of MAC, take; attention: 1."""
        chunk = 1 if self.attention else self.shard or self.chunk
        return math.lcm(chunk, self.attn_window) if self.wiring == "mac" else chunk

    def rule(self):
        """Return the omega.Rule of these settings. Its muon_every is at most chunk, and 0 without Newton-Schulz."""
        return omega.Rule(
            memory=self.memory, loss=self.loss, window=self.window, chunk=self.chunk,
            muon_every=min(self.muon_every, self.chunk) if self.muon else 0, ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients, forget=self.forget, norm=self.memory_norm, ball=self.max_norm)


# Table 1: the paper's models as differences from Config's defaults. Where no memory is named, the size decides.
_simple = dict(momentum=False, muon=False)
_muon = dict(chunk=32, muon_every=8, ns_steps=3, ns_coefficients="cubic")     # chosen by measuring: results/README.md
_kernel = dict(memory="mlp", features="exp", keep=False, **_simple)
PRESETS = {
    "transformer":     dict(attention=True, head_dim=0, attn_window=0),
    "swa":             dict(attention=True, head_dim=0),
    #                       memory           loss        window
    "linear":          dict(memory="linear", loss="dot", window=1, features="none", keep=False, **_simple),  # Eq 45
    "deltanet":        dict(memory="linear", loss="l2",  window=1, features="none", keep=False, **_simple),  # Eq 47
    "titans":          dict(                 loss="l2",  window=1, features="none", muon=False),             # Eq 12, 13
    "dla":             dict(memory="mlp",    loss="dot", window=1, memory_norm=True, **_simple),             # Eq 19
    "swla":            dict(memory="linear", loss="dot", window=8, features="none", **_simple),  # Eq 55, D.2
    "deeptransformer": dict(_kernel,         loss="dot", window=1, memory_norm=True),                        # Eq 25
    "swdt":            dict(_kernel,         loss="dot", window=8, memory_norm=True),                        # Table 1
    "deepomega":       dict(_kernel,         loss="l2",  window=8),              # Eq 27, the paper's "Dot"
    "omeganet":        dict(                 loss="l2",  window=8, **_simple),                               # Eq 10
    "atlas":           dict(                 loss="l2",  window=8, **_muon),                                 # Eq 32, 33
    "atlas++":         dict(memory="gated",  loss="l2",  window=8, **_muon),                                 # Eq 43
}

# Sizes, which a preset overrides. `tiny` is Config itself: its memory is a matrix, which on a laptop learns more in the
# same time than the paper's MLP (results/README.md). From 170m on the shapes are the paper's Table 7. Wide
# heads have too many monomials, so phi is a sketch of 1 + D + 79 features there: GPUs like multiples of 16. Chunks are
# long there: with the preset's 32 and 8 tokens a step of 170m would keep 195 GiB a layer.
_large = dict(memory="mlp", head_dim=0, expansion=2, features="sketch", sketch_dim=79, chunk=512, muon_every=512)
SIZES = {
    "tiny": dict(),
    "baby": dict(memory="mlp", n_layer=6, n_head=12, n_embd=384, dropout=0.1, chunk=128, muon_every=128),
    "34m": dict(n_layer=6, n_head=6, n_embd=384, tie=True, **_large),
    "54m": dict(n_layer=6, n_head=8, n_embd=512, tie=True, **_large),
    "67m": dict(n_layer=8, n_head=8, n_embd=512, tie=True, **_large),
    "170m": dict(n_layer=12, n_head=16, n_embd=768, **_large),
    "195m": dict(n_layer=12, n_head=12, n_embd=768, **_large),
    "340m": dict(n_layer=24, n_head=16, n_embd=1024, **_large),
    "760m": dict(n_layer=24, n_head=16, n_embd=1536, **_large),
    "1.3b": dict(n_layer=18, n_head=8, n_embd=2048, **_large),
}


def sized(preset, size):
    """Return the fields of Config that a size and a preset set. The preset wins, except for the chunks that a size
    names: a GPU needs long ones."""
    chunks = {name: SIZES[size][name] for name in ("chunk", "muon_every") if name in SIZES[size]}
    return SIZES[size] | PRESETS[preset] | chunks


def configure(preset="atlas", size="tiny", **overrides):
    """Return the Config of a preset: Config's defaults < `sized` < `overrides` (fields of Config)."""
    for name, known in ((preset, PRESETS), (size, SIZES)):
        if name not in known:
            raise UserError(f"unknown model or size {name!r}; choose one of {', '.join(known)}")
    return Config(**sized(preset, size) | overrides)


def build(preset="atlas", size="tiny", **overrides):
    """Return a language model, LM(configure(preset, size, **overrides))."""
    return LM(configure(preset, size, **overrides))


def kept_bytes(config, batch, T, remat=False):
    """Return about how many bytes `LM.loss` keeps for backward, for (batch, T) tokens on a GPU, compiled, in bfloat16.
    Counted without a GPU, and checked in test_all.py. What a compiled function makes is computed again."""
    c, N = config, batch * T
    ends, inner = N * (4 * c.vocab_size + 12 * c.n_embd), c.n_head * c.head_dim        # the float32 logits, embedding
    layer = 4 * N * c.n_embd
    if not c.attention:
        exp, blocks = c.features == "exp", c.chunk / c.rule().muon_every if c.muon else 0
        E = c.head_dim + T if exp else features_dim(c.features, c.head_dim, c.degree, c.sketch_dim)
        sizes = memory.shapes(c.memory, E, c.expansion * c.head_dim, c.head_dim)
        rows = 12 * E if exp else 4 * E                       # of a token and head: phi(q), phi(k), with exp one-hot x
        rows += 4 * c.head_dim + sum(4 * out for _, out in sizes[:-1])                 # what was written: x, d
        rows += 0 if c.muon else 4 * (c.chunk + c.window)                              # P
        states = 4 * sum(map(math.prod, sizes)) * (1 + c.momentum + (1 + blocks) * c.muon) / c.chunk   # W, S, U, O
        layer = N * (17 * (c.n_embd + inner) + c.n_head * (rows + states)) * (1 + bool(c.shard))
    if c.wiring != "lmm":                                     # a guess, not counted
        layer += N * 4 * (4 * c.n_embd + 4 * inner)
    return int(ends + layer + (4 * N * c.n_embd if remat else layer) * (c.n_layer - 1))


def title(name):
    """Return a preset, changed or not, as atlas,memory=mlp, in the words of a picture."""
    words = dict(transformer="transformer (RoPE)", deltanet="DeltaNet", titans="Titans", omeganet="OmegaNet",
                 atlas="ATLAS")
    preset, *changes = name.split(",")
    return ", ".join([words.get(preset, preset), *changes])


# ---- the memory layer
class MemoryState(NamedTuple):
    """What a Memory carries from call to call."""
    fast: omega.State | shards.Shards     # the fast weights and what belongs to them
    conv: torch.Tensor                    # (B, 3, 3 H D), the last inputs of the convolution
    config: Config                        # of the layer that it fits
    seen: torch.Tensor | None = None      # (B, window - 1) bool: the last pairs that windows look at; None: all


def short_conv(x, taps, same=None):
    """Return silu(sum_j taps[j] * x_{t-n+j}) by channel: x (B, n + T, C), taps (n + 1, C) -> (B, T, C). same (B, T,
    n + 1): whether x_{t-n+j} belongs to the document of x_t."""
    rows = [x[:, j: j + x.shape[1] - len(taps) + 1] for j in range(len(taps))]
    rows = rows if same is None else [row * here for row, here in zip(rows, same.split(1, -1))]
    return F.silu(sum(tap * row for tap, row in zip(taps.to(x.dtype), rows)))


def masked(gates, doc, pairs, reset):
    """Return gates that write, forget and carry nothing at masked tokens, and whose windows hold pairs of the token's
    document alone. doc (B, T) and pairs (B, window - 1 + T): from `numbered`; reset (B, T) or None."""
    keep, step, momentum, gate, _ = gates
    here = pairs[:, None, -keep.shape[2]:] >= 0               # (B, 1, T), for all heads
    looks = (pairs.unfold(1, gate.shape[-1], 1) == doc[..., None])[:, None] & here[..., None]
    momentum = momentum if momentum is None else momentum.where(here, 1)
    reset = reset if reset is None else reset[:, None].expand_as(keep)
    return omega.Gates(keep.where(here, 1), step.where(here, 0), momentum, gate * looks, reset)


class Memory(nn.Module):
    """The layer that learns at test time (Figure 3, right).

        x --+-- qkv -- short_conv, SiLU --+-- q, k -- unit length -- phi --+
            |                             +-- v ---------------------------+-- omega: write (k, v), read q -- norm --+
            +-- gates -- keep, step, momentum, gate -----------------------+                                    * -- out
            +-- out_gate -- SiLU ------------------------------------------------------------------------------------+

    With Newton-Schulz, `muon_every` tokens share one update; before it, queries read their plain steps (choice 15).
    """
    conv_width = 4
    autocast_on = ("cuda",)               # devices on which autocast reaches the products of the memory, too

    def __init__(self, config, layer=0):
        super().__init__()
        self.config = config
        c, d, H, inner = config, config.n_embd, config.n_head, config.n_head * config.head_dim
        self.back = c.lookback == layer + 1                   # then k_t is q_{t-1}, and hardly forgotten (choice 23)
        made = (2 if self.back else 3) * inner
        self.qkv = nn.Linear(d, made, bias=False)
        self.conv = nn.Parameter(torch.zeros(self.conv_width, made)) if c.conv else None
        self.n_gates = [1, 1, int(c.momentum), c.window if c.window_gate == "token" else 0]      # as in make_gates
        self.gates = nn.Linear(d, H * sum(self.n_gates))
        self.phi = Features(c.features, c.head_dim, c.degree, c.sketch_dim, seed=layer)
        sizes = memory.shapes(c.memory, self.phi.out_dim, c.expansion * c.head_dim, c.head_dim)
        make = lambda: nn.ParameterList(nn.Parameter(torch.zeros(H, *s)) for s in sizes)
        self.M0, self.global_M0 = make(), make() if c.shard else ()
        self.norm = Norm(H, 1, c.head_dim, eps=0.1 if self.back else 2**-23)           # 0.1: weak reads stay weak
        self.out_gate = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d, bias=False)
        self.init()

    def init(self):
        """Set the starting values that nn.Linear has not set. Call it after model.apply(your_init)."""
        H, c = self.config.n_head, self.config
        if self.conv is not None:                             # each channel begins with a random mixture of four tokens
            nn.init.normal_(self.conv, std=self.conv_width ** -0.5)
        for M0 in (self.M0, self.global_M0):                  # x W is as long as 2 phi(k); it adds little (choice 10)
            for W in M0:
                last = 1.0 if c.memory_norm else 0.25
                std = 0.0 if c.memory == "linear" else last if W is M0[-1] else 2.0
                nn.init.normal_(W, std=std * M0[-1].shape[1] ** -0.5)
        if self.back:
            with torch.no_grad():                             # what is recalled is the token itself
                self.conv[:, H * c.head_dim:] *= 0.2
                self.conv[-1, H * c.head_dim:] = 1
                for scale in (self.phi.scale[:-1] if hasattr(self.phi, "scale") else ()):
                    scale.zero_()                             # the highest degree alone tells keys apart
        nn.init.normal_(self.gates.weight, std=0.02)
        keep = torch.linspace(1, 6, H) if H > 1 else torch.full((1,), 3.5)       # 0.73 .. 0.998, by head  (choice 16)
        step, others = torch.full((H, 1), c.step_start), torch.zeros(H, sum(self.n_gates[2:]))   # 1/4 of its bound, 1/2
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([keep[:, None], step, others], 1).flatten())

    def make_gates(self, x):
        """Return the omega.Gates of x: keep, step, momentum (B, H, T) and gate (B, H, T, window), token by token."""
        c = self.config
        weight, bias = map(at_least_float32, self.gates.parameters())
        made = heads(F.linear(x.to(weight.dtype), weight, bias), c.n_head)
        keep, step, momentum, gate = made.split(self.n_gates, -1)
        opened = step.squeeze(-1).sigmoid().square()          # squared, it closes well  (choice 16)
        step = c.max_step / c.chunk * opened                                                     # eta
        forgets = opened * (-keep).squeeze(-1).sigmoid() / (1024 if self.back else 1)        # to recall is to keep
        keep = 1 - forgets if c.keep else torch.ones_like(opened)                                # alpha
        momentum = momentum.squeeze(-1).sigmoid() if c.momentum else None                        # theta
        gate = gate.sigmoid() if c.window_gate == "token" else gate.new_ones(*keep.shape, c.window)              # gamma
        return omega.Gates(keep, step, momentum, gate / c.window)                                # choice 6

    def start(self, x):
        """Return the state before the first token, for a batch of len(x) sequences."""
        c, B = self.config, len(x)
        fast = omega.start(c.rule(), self.phi, list(self.global_M0 or self.M0), B, momentum=c.momentum)
        if c.shard:
            kk = fast.W[0].new_zeros(B, c.n_head, c.head_dim, c.head_dim)
            fast = shards.Shards(tuple(self.M0), fast, None, kk, 0)
        return MemoryState(fast, x.new_zeros(B, self.conv_width - 1 + self.back, 3 * c.n_head * c.head_dim), c)

    def forward(self, x, state=None, mask=None, reset=None):
        """Read x (B, T, n_embd), MemoryState or None -> (B, T, n_embd), MemoryState. mask and reset: as in LM. Raises
        ValueError as `check_input`, and for a reset where no chunk (with shards: no shard) begins."""
        c = self.config
        check_input(self, x, state, mask, reset)
        state = state or self.start(x)
        if reset is not None:
            mid_chunk = (torch.arange(x.shape[1], device=x.device) + state.fast.pos) % (c.shard or c.chunk) > 0
            if c.forget == "zero" or (reset & mid_chunk).any():
                raise ValueError("reset needs forget='start', and stands where a chunk (with shards: a shard) begins")
        doc, pairs = numbered(x, mask, reset, state.seen, c.window - 1)
        q, k, v, gates, tail = self.project(x, state, doc, pairs)
        if doc is not None:                                   # shards add up k k^T, so masked k must be 0
            k, gates = k * (pairs[:, None, -x.shape[1]:, None] >= 0), masked(gates, doc, pairs, reset)
        with nullcontext() if x.device.type in self.autocast_on else without_autocast(x):
            learn = partial(shards.shards, c.shard) if c.shard else omega.omega
            y, fast = learn(c.rule(), self.phi, q, k, v, gates, state.fast)
        seen = None if doc is None else (pairs == doc[:, -1:])[:, x.shape[1]:]
        return self.finish(x, y), MemoryState(fast, tail, c, seen)

    def project(self, x, state, doc=None, pairs=None):
        """Return q, k, v (B, H, T, D), the gates, and what the convolution carries on. doc, pairs: from `numbered`."""
        qkv, n, same, taps = self.qkv(x), self.conv_width - 1 + self.back, None, self.conv
        if self.back:                                         # taps for x_{t-4} .. x_t; those of k are q's, a token ago
            (q, v), (own, taps_v) = qkv.chunk(2, -1), taps.chunk(2, -1)
            qkv, now = torch.cat([q, q, v], -1), lambda a: F.pad(a, (0, 0, 1, 0))
            taps = torch.cat([now(own), F.pad(own, (0, 0, 0, 1)), now(taps_v)], -1)
        before = state.conv.to(qkv.dtype)
        if doc is not None:
            here, docs = pairs[:, -x.shape[1]:, None] >= 0, F.pad(doc, (n, 0))
            qkv, same = qkv * here, docs.unfold(1, n + 1, 1) == doc[..., None]
        inputs = torch.cat([before, qkv], 1)
        tail = inputs[:, -n:].clone() if doc is None else inputs[:, -n:] * (docs[:, -n:] == doc[:, -1:])[..., None]
        qkv = F.silu(qkv) if self.conv is None else short_conv(inputs, taps, same)
        q, k, v = (heads(a, self.config.n_head) for a in qkv.chunk(3, -1))
        with without_autocast(x):
            return unit(q), unit(k), at_least_float32(v), self.make_gates(x), tail                # choice 8

    def finish(self, x, y):
        """Apply the norm of each head, the output gate and the projection: y (B, H, T, D) -> (B, T, n_embd)."""
        y = self.norm(y).transpose(1, 2).flatten(2).to(x.dtype)
        return self.out(y * F.silu(self.out_gate(x)))

    def retrieve(self, x, W, keys=None):
        """Return M*(q), Titans Eq 21: what fast weights W recall for x (B, T, n_embd) without writing."""
        q = F.silu(self.qkv(x).chunk(2 if self.back else 3, -1)[0])              # no convolution: choice 18
        with without_autocast(x):
            y = self.recall(unit(heads(q, self.config.n_head)), W, keys)
        return self.finish(x, y)

    def recall(self, q, W, keys=None):
        """Return M(phi(q); W) for q (B, H, T, D); keys: those that `exp` features keep."""
        rule, rows = self.config.rule(), self.phi(q) if keys is None else poly.kernel_rows(q, keys)
        return memory.apply(rule.memory, W, rows, q, rule.norm)

    def watch(self, x, state=None):
        """Return the gates and inner losses of each token of x (B, T, n_embd), as `probe` names them."""
        fresh = self.start(x)
        state, kind = state or fresh, self.config.loss
        asked = lambda k, fast: self.recall(k, omega.total(fast), fast.keys)
        _, k, v, gates, _ = self.project(x, state)
        with without_autocast(x):
            y = omega.omega(self.config.rule(), self.phi, k.roll(-1, 2), k, v, gates, state.fast)[0]     # W_t, k_t+1
            y = torch.cat([asked(k[:, :, :1], state.fast), y[:, :, :-1]], 2)
            losses = [torch.vmap(partial(memory.loss, kind))(a.flatten(0, 2), v.flatten(0, 2)).view(v.shape[:3])
                      for a in (y, asked(k, fresh.fast))]
        found = dict(gates._asdict(), gate=gates.gate.sum(-1), surprise=losses[0], untaught=losses[1])
        return {name: a for name, a in found.items() if a is not None}


# ---- the language model
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
    """x + layer(norm(x)), then x + SwiGLU(norm(x)): Figure 3 (left)."""

    def __init__(self, config, layer=0):
        super().__init__()
        self.norm1, self.norm2 = Norm(config.n_embd), Norm(config.n_embd)
        self.layer = Attention(config) if config.attention else Memory(config, layer)
        if config.wiring != "lmm":
            self.layer = Wiring(config, self.layer)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, state=None, mask=None, reset=None):
        y, state = self.layer(self.norm1(x), state, mask, reset)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), state


class LM(nn.Module):
    """A language model: tokens (B, T) -> logits (B, T, vocab_size). Every layer's state comes out and can go in."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.remat = False                                    # train.py's --remat: backward computes each block again
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = Norm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init()

    def init(self):
        """Set the starting values."""
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

    def forward(self, tokens, state=None, mask=None, reset=None):
        """Read tokens (B, T), an earlier state or None -> logits (B, T, vocab_size), state after the last token.
        Any split of a sequence over calls gives the logits of the whole. ValueError if tokens or state do not fit.

        mask (B, T) bool, False at padding: such tokens write nothing, forget nothing, and no token looks at them.
        Chunks and blocks are those of the batch. One that ends in padding ends there, and a block then writes the steps
        of the real tokens before. reset (B, T) bool: True where a row begins a new text, with a new memory, at the
        first token of a chunk (`Memory.forward`)."""
        x = self.embed(tokens)
        if state and not tokens.numel():                      # an empty piece
            return self.head(x), state
        if self.config.tie:
            x = x * self.config.n_embd ** 0.5
        states, remat = [], self.remat and torch.is_grad_enabled()
        for block, s in self.with_blocks(state or [None] * len(self.blocks)):
            args = x, s, mask, reset
            x, s = checkpoint(block, *args, use_reentrant=False) if remat else block(*args)
            states.append(s)
        return self.head(self.norm(x)), tuple(states)

    def with_blocks(self, states):
        """Return pairs of a block and its state. Raises ValueError unless there is a state for each."""
        if hasattr(states, "_fields"):
            raise ValueError("a model takes a tuple of the states of its layers, not the state of one")
        if len(states) != len(self.blocks):
            raise ValueError(f"the state fits another model: its n_layer is {len(states)}, not {len(self.blocks)}")
        return zip(self.blocks, states)

    def loss(self, tokens, targets, mask=None, reset=None):
        """Return the mean cross entropy in nats of targets (B, T) given tokens (B, T). Targets of -100, and those of
        masked tokens, do not count; the last token before padding needs a -100. With `polarise` the loss also holds the
        attention gates' indecision, times that number. mask and reset: as in `forward`."""
        logits = at_least_float32(self(tokens, None, mask, reset)[0])
        targets = targets if mask is None else targets.masked_fill(~mask, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        if self.config.polarise:
            undecided = torch.stack([torch.cat(block.layer.undecided, 1) for block in self.blocks]).mean(0)     # (B, T)
            real = torch.ones_like(undecided) if mask is None else mask
            loss = loss + self.config.polarise * (undecided * real).sum() / real.sum()
        return loss

    def compile_memory(self, **options):
        """Compile the memory, SwiGLU and Norm, for the whole process, and attention blocks as a whole."""
        omega.compile_chunks(**options)
        for owner, name in ((Memory, "project"), (Memory, "finish"), (SwiGLU, "forward"), (Norm, "forward")):
            omega.compile_function(owner, name, **options)
        for block in self.blocks:
            if isinstance(block.layer, Attention):
                block.compile(dynamic=False, **options)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, state=None):
        """Yield the next token (B,) max_new_tokens times, given tokens (B, T), and return the state after the tokens
        and all drawn ones but the last, which is not read: state = yield from model.generate(..). `state` comes from a
        text before the tokens. With dropout call eval() first. temperature 0 takes the likeliest token; top_k 0 and
        top_p 1 are off. Each token costs the same, as long as the state does not grow (`holds_all`). Raises ValueError,
        at the first token, for an empty prompt, or a temperature, top_k or top_p below 0."""
        if not tokens.numel():
            raise ValueError("a prompt is (B, T >= 1); to begin with nothing, give the token of a newline")
        if min(temperature, top_k, top_p) < 0:
            raise ValueError(f"temperature, top_k and top_p are at least 0, not {temperature}, {top_k}, {top_p}")
        for _ in range(max(1, max_new_tokens)):              # 0 reads the tokens, too
            with torch.inference_mode(), torch.compiler.set_stance("force_eager"):  # single tokens: too many shapes
                for piece in tokens.split(1024, -1):          # the logits of a long prompt would fill the memory
                    logits, state = self(piece, state)
                token = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
                tokens = token[:, None]
            if max_new_tokens:
                yield token.clone()                           # outside of inference_mode: a tensor like any other
        return map_state(torch.clone, state)


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token for each row of logits (B, V), from the top_k likeliest and the fewest of total mass top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / max(temperature, 1e-30)).sort(descending=True)
    if top_k:
        logits[:, top_k:] = -torch.inf
    probs = logits.softmax(-1)
    if top_p < 1:                                             # the token that crosses top_p stays, and the likeliest
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= max(top_p, 1e-9), 0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


# ---- states: that of an LM is a tuple of one for each layer
torch.serialization.add_safe_globals([Config, omega.State, shards.Shards, MemoryState, AttentionState, WiringState])


def map_state(f, state, of_M0=lambda a, names, i: a):
    """Return the state with f(a) in place of each tensor a. M0 has no batch axis and belongs to the model: it stays, or
    of_M0(a, the names on the way to it, i) takes the place of its i-th matrix."""
    def each(path, a):
        names = [getattr(key, "name", None) for key in path]
        return of_M0(a, names, path[-1].idx) if "M0" in names else f(a) if isinstance(a, torch.Tensor) else a
    f = cache(f)                                              # at a chunk boundary anchor and W are the same tensors
    return tree_map_with_path(each, state)


def detach(state):
    """Return the state cut off from the autograd graph, for streams and for training on segments."""
    return map_state(torch.Tensor.detach, state)


def select(state, rows):
    """Return the state of these sequences of the batch (a list or tensor of indices): reordered, repeated, dropped."""
    rows = torch.as_tensor(rows)
    if rows.dim() != 1 or rows.numel() and rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows is a list of indices, not {rows.tolist()}")
    rows = rows.long()                                        # an empty list comes as float32
    return map_state(lambda a: a[rows], state)


def pack(state):
    """Return the state without M0, for torch.save. `unpack` takes it back from torch.load(.., weights_only=True)."""
    return map_state(torch.Tensor.detach, state, lambda *_: None)


def unpack(model, packed):
    """Return a packed state as one of this LM or layer, on its device. Raises ValueError if it does not fit."""
    if isinstance(model, LM):
        return tuple(unpack(block.layer, state) for block, state in model.with_blocks(packed))
    check_state(model, packed)
    inside, device = getattr(model, "memory", model), next(model.parameters()).device
    M0 = lambda _, names, i: (inside.global_M0 if "whole" in names else inside.M0)[i]
    return map_state(lambda a: a.to(device), packed, M0)


def state_bytes(state):
    """Return the bytes of all tensors in a state, without the parameters that it refers to (M0)."""
    own = {id(a): a for a in tree_leaves(state) if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)}
    return sum(a.numel() * a.element_size() for a in own.values())


def holds_all(config):
    """Tell whether the state holds every token, so that it grows with the text."""
    return not config.attn_window if config.attention else config.features == "exp"


# ---- a memory at work
@torch.no_grad()
def probe(model, tokens):
    """Watch the memories while the model reads tokens (B, T) from the start -> for each layer a dict of tensors.

        keep, step, momentum, gate   (B, H, T); gate is the sum over the window
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
        seen = [inside.watch(*args[:2]) for args, _ in calls[inside]]
        with ExitStack() as undo:
            undo.callback(vars(model.config).update, vars(model.config).copy())
            model.config.max_step, model.config.keep = 0.0, False
            share = (o - layer(x)[0]).norm() / o.norm().clamp_min(torch.finfo(o.dtype).tiny)     # 0 where o is 0
        at = {name: torch.cat([a[name] for a in seen], -1)[..., -T:] for name in seen[0]}   # no persistent tokens
        last = calls[inside][-1][1][1].fast
        M0 = omega.grown(inside.M0, [w.shape[-2] for w in last.W])
        W = [a - b for a, b in zip(omega.total(last), M0)]
        for name, matrices in ("written", W), ("S", last.S):
            if matrices:
                at[name] = sum(w.square().sum((-2, -1)) for w in matrices).sqrt()
        if model.config.wiring in ("mag", "mac"):
            at["attn_gate"] = torch.cat([out for _, out in calls[layer.m_norm]], 1).sigmoid()
        found.append(at | dict(share=share))
    return found
