"""models.py - from tokens to logits: configuration, layers, blocks, the language model, and the paper's models as data.

    block(x) = x + mixer(norm(x)),  then  x + SwiGLU(norm(x))                                   ATLAS Figure 3 (left)
    mixer    = a memory that learns at test time (Figure 3, right), attention, or both wired as in Titans Eq 21-31

There are two loops. The outer loop (train.py) learns every nn.Parameter here, M0 - where each memory starts - among them. The
inner loop (omega.py) runs inside forward: it starts from M0 at the beginning of every sequence, changes only the fast weights
W of that sequence, and never touches a parameter. What it has learned by token t is in the `state` that forward returns.
"""
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memory import LOSSES, MEMORIES, once_differentiable, shapes
import memory
import omega
from muon import COEFFICIENTS
from poly import FEATURES, Features, features_dim

WIRINGS = ("lmm", "mag", "mal", "mac")
LIMIT = 2**31                                                 # every integer setting is below it: torch takes some, as threads, in 32 bits


def opt(default, help, **more):
    """A field of Config or train.TrainConfig, with the help text of its flag, and of `check` its `low` and `choices`."""
    return field(default=default, metadata=dict(help=help, **more))


def flag(name):
    """The flag of a field: n_embd -> --n-embd"""
    return "--" + name.replace("_", "-")


def check(config):
    """ValueError for a value of another type, a number that is not finite or below its `low` (0 where none is given), a name that is no
    choice.
    """
    for f in fields(config):
        value, low, choices = getattr(config, f.name), f.metadata.get("low", 0), f.metadata.get("choices")
        right = isinstance(value, (int, float) if f.type is float else f.type)                   # a whole number does for a float
        if not right or isinstance(value, bool) != (f.type is bool):
            raise ValueError(f"{flag(f.name)} must be of type {f.type.__name__}, not {value!r}")
        high, below = (torch.finfo(torch.float32).max, "finite in float32") if isinstance(value, float) else (LIMIT, "below 2^31")
        if isinstance(value, (int, float)) and not low <= value < high:                          # false for nan, too
            raise ValueError(f"{flag(f.name)} must be at least {low} and {below}, not {value}{f.metadata.get('hint', '')}")
        if choices and value not in choices:
            raise ValueError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value!r}")


@dataclass
class Config:
    """All it takes to rebuild the network; train.py makes a flag of nearly each field and saves all in the checkpoint."""
    vocab_size: int = opt(65, "number of tokens; set from the tokenizer", low=1)
    n_layer: int = opt(2, "blocks", low=1)
    n_head: int = opt(8, "heads; each has its own memory", low=1)
    n_embd: int = opt(192, "width of the residual stream", low=1)
    head_dim: int = opt(16, "width of a head; 0 takes n_embd / n_head")
    mixer: str = opt("memory", "what mixes tokens", choices=("memory", "attention"))
    wiring: str = opt("lmm", "memory alone, or with attention after Titans: gate, layer, context", choices=WIRINGS)
    memory_branch: bool = opt(True, "--no-memory-branch: mag, mal and mac with only their attention; what does the memory bring?")
    persistent: int = opt(4, "learned tokens before the sequence, in mag, mal and mac")
    memory: str = opt("mlp", "the memory: a matrix, Eq 42, or Eq 43", choices=MEMORIES)
    expansion: int = opt(1, "hidden width of the memory, in head dims", low=1)
    memory_norm: bool = opt(False, "a norm (RMS) inside a deep memory, before its residual; a linear one has none")
    loss: str = opt("l2", "inner loss (attentional bias)", choices=LOSSES)
    window: int = opt(8, "tokens the Omega rule looks back on (the paper's c); 1 is Titans", low=1)
    chunk: int = opt(64, "tokens that share one gradient point (the paper's b)", low=1)
    momentum: bool = opt(True, "momentum of the inner gradients, Eq 33")
    muon: bool = opt(True, "Newton-Schulz on the momentum, Eq 32")
    muon_every: int = opt(64, "tokens from one Newton-Schulz to the next, which sees all of them; at most --chunk; 1 is the paper's Eq 40, several "
                          "times faster with --no-momentum and a short window", low=1, hint="; --no-muon for none")
    ns_steps: int = opt(5, "Newton-Schulz iterations", low=1)
    ns_coefficients: str = opt("muon", "polynomial of Newton-Schulz", choices=tuple(COEFFICIENTS))
    memory_dtype: str = opt("float32", "precision of the memory's products and of what they multiply; what is carried on stays float32; "
                            "bfloat16: for GPUs", choices=("float32", "bfloat16"))
    ns_dtype: str = opt("float32", "precision inside of Newton-Schulz; bfloat16: for GPUs", choices=("float32", "bfloat16"))
    ns_straight_through: bool = opt(False, "send the outer gradient past Newton-Schulz instead of through it")
    features: str = opt("monomial", "feature map phi of keys and queries", choices=FEATURES)
    degree: int = opt(2, "polynomial degree of phi (the paper's p)", low=1)
    sketch_dim: int = opt(64, "features of the sketch of degree 2, for --features sketch", low=1)
    keep: bool = opt(True, "learned forgetting (alpha); --no-keep never forgets")
    forget: str = opt("start", "what is forgotten: all that was written since M0, or (zero, as printed) M0 too",
                      choices=("start", "zero"))
    conv: bool = opt(True, "causal depthwise convolution of width 4 on q, k, v")
    gate: str = opt("token", "gamma: a learned weight for each token of the window, or all equal", choices=("token", "uniform"))
    max_step: float = opt(2.0, "upper bound of the sum of a chunk's inner step sizes eta: each is at most max_step / chunk")
    max_norm: float = opt(50.0, "largest norm of a fast weight matrix at a chunk boundary: no text can make it run away; 0: no bound")
    attn_window: int = opt(64, "sliding window of attention in tokens, the segment of mac; 0 is full attention")
    mlp_hidden: int = opt(0, "hidden width of the SwiGLU; 0 takes 8/3 of n_embd")
    dropout: float = opt(0.0, "dropout on what each block adds to the residual stream")
    tie: bool = opt(False, "share the embedding with the output layer")

    def __post_init__(self):
        check(self)
        if self.dropout >= 1:
            raise ValueError(f"--dropout must be below 1, not {self.dropout}")
        if 0 < self.max_norm < 1e-30:
            raise ValueError(f"--max-norm {self.max_norm} is too small to divide by; 0 is for no bound")
        if self.max_norm > 1e30:
            raise ValueError(f"--max-norm {self.max_norm} is too large to divide by; 0 is for no bound")
        if not self.head_dim:
            if self.n_embd % self.n_head:
                raise ValueError(f"--n-embd {self.n_embd} must be a multiple of --n-head {self.n_head}, or give --head-dim")
            self.head_dim = self.n_embd // self.n_head
        attention = self.mixer == "attention"
        if attention and self.wiring != "lmm":
            raise ValueError(f"--wiring {self.wiring} is of a memory and attention; take a --model with a memory")
        if self.wiring == "lmm" and not self.memory_branch:
            raise ValueError("--no-memory-branch is for --wiring mag, mal and mac, of which it leaves the attention; --model transformer has nothing else")
        if (attention or self.wiring != "lmm") and self.head_dim % 2:
            raise ValueError(f"attention turns pairs of numbers: --head-dim must be even, not {self.head_dim}")
        if self.wiring != "lmm" and not self.attn_window:
            raise ValueError(f"--wiring {self.wiring} needs an --attn-window of at least 1")
        if self.features in ("monomial", "elementwise") and not attention and self.degree > 56:
            raise ValueError(f"--degree must be at most 56, not {self.degree}: 1 / sqrt(57!), where the last scale of phi starts, is too small for float32")
        if self.features == "monomial" and not attention and features_dim("monomial", self.head_dim, self.degree) > 10**6:
            raise ValueError(f"--degree {self.degree} of --head-dim {self.head_dim} makes more than a million features; lower one of them")
        if self.features == "sketch" and not attention and self.degree != 2:
            raise ValueError(f"--features sketch is of degree 2, not {self.degree}; take --features monomial")
        if self.muon and self.features == "exp" and not attention:
            raise ValueError("--features exp has no finite weights for Newton-Schulz; add --no-muon")

    def rule(self):
        """The same for omega.py: `muon_every` is at most `chunk`, and 0 without Newton-Schulz."""
        return omega.Rule(
            memory=self.memory, loss=self.loss, window=self.window, chunk=self.chunk,
            muon_every=min(self.muon_every, self.chunk) if self.muon else 0, ns_steps=self.ns_steps,
            ns_coefficients=self.ns_coefficients, straight_through=self.ns_straight_through,
            ns_dtype=torch.bfloat16 if self.ns_dtype == "bfloat16" else None,
            dtype=torch.bfloat16 if self.memory_dtype == "bfloat16" else None,
            forget=self.forget, norm=self.memory_norm, ball=self.max_norm)


NEWTON_SCHULZ = {"muon_every", "ns_steps", "ns_coefficients", "ns_dtype", "ns_straight_through"}
MEMORY = NEWTON_SCHULZ | {"memory", "expansion", "memory_norm", "loss", "window", "chunk", "momentum", "muon", "memory_dtype", "features", "degree",
                          "sketch_dim", "keep", "forget", "conv", "gate", "max_step", "max_norm"}


def idle(config):
    """The fields of a Config on which nothing depends, as the others are -> set of names."""
    c, names = config, set()
    if c.mixer == "attention" or not c.memory_branch:
        names |= MEMORY
    if c.wiring == "lmm":
        names |= {"persistent"} if c.mixer == "attention" else {"persistent", "attn_window"}
    if not c.muon:
        names |= NEWTON_SCHULZ
    if c.memory == "linear":
        names |= {"expansion", "memory_norm"}
    if c.features != "sketch":
        names.add("sketch_dim")
    if c.features in ("none", "exp"):
        names.add("degree")
    return names


# The paper's models as differences from Config's defaults, which are those of `atlas` but for its longer chunks. Where a column is
# blank the default holds (of phi: monomials).
_simple = dict(momentum=False, muon=False)
PRESETS = {
    "transformer":     dict(mixer="attention", head_dim=0, attn_window=0),
    "swa":             dict(mixer="attention", head_dim=0),
    #                       memory           loss        window    phi               alpha       algorithm
    "linear":          dict(memory="linear", loss="dot", window=1, features="none",  keep=False, **_simple),         # Eq 45
    "deltanet":        dict(memory="linear", loss="l2",  window=1, features="none",  keep=False, **_simple),         # Eq 47 if chunk = 1
    "titans":          dict(memory="mlp",    loss="l2",  window=1, features="none",              muon=False),        # Eq 12, 13, choice 4
    "dla":             dict(memory="mlp",    loss="dot", window=1, memory_norm=True,             **_simple),         # Eq 19
    "swla":            dict(memory="linear", loss="dot", window=8, features="none",              **_simple),         # Eq 55, D.2
    "deeptransformer": dict(memory="mlp",    loss="dot", window=1, features="exp",   keep=False, memory_norm=True, **_simple),  # Eq 25
    "swdt":            dict(memory="mlp",    loss="dot", window=8, features="exp",   keep=False, memory_norm=True, **_simple),  # Table 1
    "dot":             dict(memory="mlp",    loss="l2",  window=8, features="exp",   keep=False, **_simple),         # Eq 27
    "omeganet":        dict(memory="mlp",    loss="l2",  window=8,                               **_simple),         # Eq 10
    "atlas":           dict(memory="mlp",    loss="l2",  window=8,   chunk=128, muon_every=128),                     # Eq 32, 33
    "atlas++":         dict(memory="gated",  loss="l2",  window=8,   chunk=128, muon_every=128),                     # Eq 43
}

# Sizes, under the preset: `tiny` is Config itself; from 170m on the shapes are those of the paper's Table 7, whose head dims
# make exact monomials too many, so phi is their sketch.
_large = dict(head_dim=0, expansion=4, features="sketch", sketch_dim=255)    # 1 + D + 255: a multiple of 16, which GPUs like
SIZES = {
    "tiny": dict(),
    "baby": dict(n_layer=6, n_head=12, n_embd=384, dropout=0.1),
    "170m": dict(n_layer=12, n_head=16, n_embd=768, **_large),
    "340m": dict(n_layer=24, n_head=16, n_embd=1024, **_large),
    "760m": dict(n_layer=24, n_head=16, n_embd=1536, **_large),
    "1.3b": dict(n_layer=18, n_head=8, n_embd=2048, **_large),
}


class Norm(nn.Module):
    """RMSNorm over the last dimension with a learned scale."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def init(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=2**-23) * self.weight              # torch's own for float32, in every precision


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def init_apart(layer):
    """Starting values for a layer in a model of your own (zeros would never learn); torch's random numbers go on as if none had been drawn for them
    but one. An LM draws all again."""
    device = next(layer.parameters()).device
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        seed = int(torch.randint(2**31, (), device=device if cuda else "cpu"))   # else the program's next numbers would be these once more
        with torch.cuda.device(device) if cuda else nullcontext():                # the layer's GPU, which need not be the current one
            torch.cuda.manual_seed(seed) if cuda else torch.default_generator.manual_seed(seed)
        layer.init()


def check_batch(x, state, kind, least=0):
    """ValueError if x is not (B, T, n_embd), if B is below `least`, or if a state is not of this `kind` or of another number of sequences."""
    if x.dim() != 3:
        raise ValueError(f"a layer reads (batch, tokens, n_embd), not {tuple(x.shape)}; for one sequence: x[None]")
    if len(x) < least:
        raise ValueError("a memory needs at least one sequence: the batch is empty")
    if state is None:
        return
    if not isinstance(state, kind):
        raise ValueError(f"this layer carries on from {kind.__name__}, not {type(state).__name__}: the state is of another model, or of another part of it")
    if state.sequences not in (None, len(x)):
        raise ValueError(f"the state is of {state.sequences} sequences, the batch of {len(x)}")


class MemoryState(NamedTuple):
    """What a Memory carries from call to call."""
    rule: omega.State                                         # the memory itself
    conv: torch.Tensor                                        # (B, 3, 3 H D), the last inputs of the convolution

    @property
    def sequences(self):
        return len(self.conv)


class Memory(nn.Module):
    """The layer that learns at test time (Figure 3, right): projections, convolution, gates, the Omega rule, norm, output gate.

        x --+-- qkv -- short_conv, SiLU --+-- q, k -- unit length -- phi --+
            |                             +-- v ---------------------------+-- omega: write (k, v), read with q -- norm --+
            +-- gates -- keep, step, momentum, gate -----------------------+                                              * -- out -- y
            +-- out_gate -- SiLU -----------------------------------------------------------------------------------------+

    With `muon` and a `muon_every` above 1 (at most `chunk`) what a token writes is first read in the next block of `muon_every` tokens. A sequence of
    at most `muon_every` tokens reads M0 alone (with forget="zero" what keep leaves of it), and its keys, values and other gates get no gradient: for
    short sequences take muon=False, or a small muon_every.
    """
    conv_width = 4

    def __init__(self, config):
        super().__init__()
        c, d, H = config, config.n_embd, config.n_head
        self.config, inner = c, H * c.head_dim
        self.qkv = nn.Linear(d, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.zeros(self.conv_width, 3 * inner)) if c.conv else None
        self.n_gates = [1, 1, int(c.momentum), c.window if c.gate == "token" else 0]               # keep (idle without), step, momentum, gate
        self.gates = nn.Linear(d, H * sum(self.n_gates))
        self.phi = Features(c.features, c.head_dim, c.degree, c.sketch_dim)
        hidden = c.expansion * c.head_dim
        self.M0 = nn.ParameterList(
            nn.Parameter(torch.zeros(H, *s)) for s in shapes(c.memory, self.phi.out_dim, hidden, c.head_dim))
        self.norm = Norm(H, 1, c.head_dim)
        self.out_gate = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d, bias=False)
        init_apart(self)

    def init(self):
        """Starting values beyond those of LM.init."""
        H, c = self.config.n_head, self.config
        if self.conv is not None:                             # each channel begins with a mixture of four tokens of its own
            nn.init.normal_(self.conv, std=self.conv_width ** -0.5)
        for W in self.M0:
            if c.memory == "linear":
                nn.init.zeros_(W)
            else:                                             # x W as long as 2 phi(k), and little added to k, where no norm undoes it  (choice 10)
                times = 2.0 if W is not self.M0[-1] else 1.0 if c.memory_norm else 0.25
                nn.init.normal_(W, std=times * self.M0[-1].shape[1] ** -0.5)
        nn.init.normal_(self.gates.weight, std=0.02)
        keep = torch.linspace(1, 6, H) if H > 1 else torch.full((1,), 3.5)       # 0.73 .. 0.998: heads remember for different spans  (choice 16)
        step, others = torch.full((H, 1), -1.0), torch.zeros(H, sum(self.n_gates[2:]))           # 0.27 of its bound; momentum and gate 1/2
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([keep[:, None], step, others], 1).flatten())

    def heads(self, x):
        """(B, T, H D) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)

    def make_gates(self, x):
        """keep, step, momentum (B, H, T) and gate (B, H, T, window), each a function of its token.

        In the parameters' precision, as `forward` calls it: outside of autocast, in which they would be rounded (a keep of 0.999 to 1).
        """
        c = self.config
        # alpha, eta, theta, gamma of ATLAS
        keep, step, momentum, gate = self.heads(self.gates(x.to(self.M0[0].dtype))).split(self.n_gates, -1)
        keep = keep.sigmoid().squeeze(-1) if c.keep else torch.ones_like(keep).squeeze(-1)
        step = c.max_step / c.chunk * step.sigmoid().squeeze(-1)                                 # choice 16
        gate = (gate.sigmoid() if c.gate == "token" else gate.new_ones(*keep.shape, c.window)) / c.window              # choice 6
        return omega.Gates(keep, step, momentum.sigmoid().squeeze(-1) if c.momentum else None, gate)

    def short_conv(self, x, tail):
        """silu of sum_j conv[j] * x_{t-3+j}, channel by channel; `tail` holds the inputs before x."""
        if self.conv is None:
            return F.silu(x), tail
        seen = x if x.shape[1] >= tail.shape[1] else torch.cat([tail, x], 1)
        conv = convolved if torch.compiler.is_compiling() else ShortConv.apply
        last = seen[:, seen.shape[1] - tail.shape[1]:]
        return conv(tail, x, self.conv), last.to(tail.dtype, copy=x.shape[1] > 1)                # as omega.tail

    def start(self, x):
        """The state before the first token, for a batch of len(x) sequences. ValueError for a layer in half precision."""
        if self.M0[0].dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"a memory learns in float32 or float64, not {self.M0[0].dtype}; take torch.autocast, or memory_dtype, for its products")
        inner = omega.start(self.config.rule(), self.phi, list(self.M0), len(x), momentum=self.config.momentum)
        return MemoryState(inner, x.new_zeros(len(x), self.conv_width - 1, 3 * self.config.n_head * self.config.head_dim))

    def check_state(self, state):
        """ValueError if this memory's matrices are not those of an omega.State, its chunk ends before it, or its window is too short for it.

        Rows are not compared with `exp` features, whose first matrices have one for every key of a text.
        """
        step = 2 if self.config.features == "exp" else 1
        own, its = ([tuple(w.shape[-3::step]) for w in W] for W in (self.M0, state.W))
        if own != its:
            raise ValueError(f"the state is of another memory: the sizes of its matrices are {its}, not {own}")
        if state.pos >= self.config.chunk:
            raise ValueError(f"the state ends {state.pos} tokens into a chunk, which a chunk of {self.config.chunk} does not have")
        if state.k.shape[2] >= self.config.window:
            raise ValueError(f"the state holds {state.k.shape[2]} tokens for its window, of which a window of {self.config.window} has no use")

    def forward(self, x, state=None):
        """(B, T, n_embd), MemoryState or None -> (B, T, n_embd), MemoryState. ValueError as `check_batch` and `check_state`."""
        check_batch(x, state, MemoryState, least=1)
        if state:
            self.check_state(state.rule)
        state = state or self.start(x)
        q, k, v, tail = self.make_qkv(self.qkv(x), state.conv)
        with memory.autocast(x.device):                       # fast weights stay float32: in bfloat16 a keep of 0.999 is 1
            y, inner = omega.omega(self.config.rule(), self.phi, q, k, v, self.make_gates(x), state.rule)
        return self.finish(x, y), MemoryState(inner, tail)

    def make_qkv(self, qkv, before):
        """What is projected (B, T, 3 H D) -> q, k of unit length (choice 8), v (B, H, T, D); the last inputs of the convolution."""
        qkv, tail = self.short_conv(qkv, before)
        q, k, v = (at_least_float32(self.heads(a)) for a in qkv.chunk(3, -1))
        return *(memory.cast(a, self.config.rule().dtype) for a in (unit(q), unit(k), v)), tail

    def finish(self, x, y):
        """Norm of each head, output gate, projection: y (B, H, T, D) -> (B, T, n_embd)."""
        y = self.norm(y).transpose(1, 2).flatten(2).to(x.dtype)
        return self.out(y * F.silu(self.out_gate(x)))

    def retrieve(self, x, W, keys=None):
        """M*(q), Titans Eq 21: what the fast weights W recall for x, without writing: (B, T, n_embd) -> (B, T, n_embd)."""
        q = unit(at_least_float32(self.heads(F.silu(self.qkv(x).chunk(3, -1)[0]))))              # no convolution: choice 18
        with memory.autocast(x.device):
            rule = self.config.rule()._replace(dtype=None)
            rows = omega.features(rule, self.phi, q) if keys is None else omega.kernel_rows(q, keys)
            y = memory.apply(rule.memory, W, rows, q, rule.norm)
        return self.finish(x, y)


# What the layer does with all tokens at once, fast.

class ShortConv(torch.autograd.Function):
    """silu(z), z_t = sum over j = 0 .. n of taps[j] * x_{t-n+j}, channel by channel: (B, n, C) before x (B, T, C), taps (n + 1, C) -> (B, T, C).

    F.conv1d wants channels before tokens and takes twice as long on a CPU; autograd of these lines makes a padded copy for each tap,
    and keeps z, which is cheap to have again. A dozen passes over few tokens at a time stay in the cache; a GPU takes all at once.
    """

    @staticmethod
    def pieces(before, x, dtype):
        """Tokens as slices, and all that the convolution sees at them; in a precision of its own, should x come from autocast."""
        (B, T, C), n = x.shape, before.shape[1]
        step = max(1, n, 2**17 // (B * C)) if x.device.type == "cpu" else T
        for t in range(0, T, step):
            now = slice(t, min(t + step, T))
            yield now, (x[:, t - n: now.stop] if t else torch.cat([before, x[:, now]], 1)).to(dtype)

    @staticmethod
    def convolve(seen, taps, out=None):
        T = seen.shape[1] - len(taps) + 1
        z = torch.mul(seen[:, :T], taps[0], out=out)
        for j in range(1, len(taps)):
            z.addcmul_(seen[:, j: j + T], taps[j])
        return z

    @staticmethod
    def forward(ctx, before, x, taps):
        ctx.save_for_backward(before, x, taps)
        y = torch.empty_like(x, dtype=taps.dtype)
        for now, seen in ShortConv.pieces(before, x, y.dtype):
            F.silu(ShortConv.convolve(seen, taps, y[:, now]), inplace=True)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        before, x, taps = ctx.saved_tensors
        n, dtaps = before.shape[1], torch.zeros_like(taps)
        dx = dy.new_empty(x.shape[0], n + x.shape[1], x.shape[2])
        dx[:, :n] = 0
        for now, seen in ShortConv.pieces(before, x, dy.dtype):
            dz = torch.ops.aten.silu_backward(dy[:, now], ShortConv.convolve(seen, taps))
            torch.mul(dz, taps[n], out=dx[:, now.start + n: now.stop + n])       # no piece has been there before
            for j in range(n):
                dx[:, now.start + j: now.stop + j].addcmul_(dz, taps[j])
            for j in range(n + 1):
                dtaps[j] += (dz * seen[:, j: j + dz.shape[1]]).sum((0, 1))
        return dx[:, :n].to(before.dtype), dx[:, n:].to(x.dtype), dtaps


def convolved(before, x, taps):
    """ShortConv for torch.compile, which makes one kernel of these lines, and few of their gradient."""
    seen, T = torch.cat([before.to(x.dtype), x], 1), x.shape[1]                 # cast piece by piece, in the kernel that reads it
    return F.silu(sum(taps[j] * seen[:, j: j + T] for j in range(len(taps))))


class Unit(torch.autograd.Function):
    """F.normalize over the last dimension, with the gradient (g - y (y . g)) / |x|: half of the passes that autograd makes."""

    @staticmethod
    def forward(ctx, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = x / norm.clamp_min(1e-12)
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        y, norm = ctx.saved_tensors
        norm = norm.masked_fill(norm < 1e-12, torch.inf)      # zero, as of padding, has no direction and no gradient
        return torch.addcmul(g, y, (g * y).sum(-1, keepdim=True), value=-1).div_(norm)


unit = Unit.apply


omega.COMPILED += [(Memory, "make_qkv"), (omega, "features"), (Memory, "finish"), (Norm, "forward")]         # passes over all tokens, worth a kernel


class AttentionState(NamedTuple):
    """What Attention carries from call to call, and mac within a segment."""
    k: torch.Tensor                                           # (B, H, n, D), n < attn_window if that is set; in mac (B, H, 1 or 2, n, D), of h and x
    v: torch.Tensor
    pos: int                                                  # tokens so far; in mac of the segment

    @property
    def sequences(self):
        return len(self.k)


def rope(x, pos):
    """Rotary positions (Su et al. 2021): pairs of coordinates of x (B, H, T, D) turn by an angle that grows with the position."""
    half, exact = x.shape[-1] // 2, torch.float32 if x.device.type == "mps" else torch.float64   # a stream's angles outgrow float32
    ratio = 10000.0 ** (-1 / half)
    # turns a token, ratio^i / 2 pi: by cumprod, for powers would be compiled into the kernel that reads them, and taken for each number of x
    freq = torch.full((half,), ratio, device=x.device, dtype=exact).cumprod(0) / (ratio * 2 * math.pi)
    turns = torch.arange(pos, pos + x.shape[2], device=x.device, dtype=exact)[:, None] * freq
    angle = (2 * math.pi * turns.frac()).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Causal softmax attention, full or with a sliding window: RoPE, normalised queries and keys. The baseline.

    The window counts the token itself. `prefix` tokens are seen by every token, however far behind, and have no position.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        inner = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * inner, bias=False)
        self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)
        self.out = nn.Linear(inner, config.n_embd, bias=False)

    def init(self):
        pass

    def project(self, x):
        """x (B, T, n_embd) -> q, k, v (B, H, T, D), before norm and rotation."""
        return (a.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))

    def project_prefix(self, p, B):
        """Keys and values (B, H, P, D) of tokens p (P, n_embd) that stand before every sequence; without a position."""
        _, k, v = (a.expand(B, -1, -1, -1) for a in self.project(p[None]))
        return self.k_norm(k), v

    def forward(self, x, state=None, prefix=None):
        """(B, T, n_embd), AttentionState or None, prefix (P, n_embd) -> (B, T, n_embd), AttentionState. ValueError as `check_batch`,
        and for a state with other heads.
        """
        check_batch(x, state, AttentionState)
        T, w = x.shape[1], self.config.attn_window
        q, k, v = self.project(x)
        if state and state.k.shape[1::2] != k.shape[1::2]:
            raise ValueError(f"the state is of {state.k.shape[1]} heads of {state.k.shape[3]}, this attention has {k.shape[1]} of {k.shape[3]}")
        pos = state.pos if state else 0
        q, k = rope(self.q_norm(q), pos), rope(self.k_norm(k), pos)                              # choice 17
        if state:
            k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        pk, pv = (None, None) if prefix is None else self.project_prefix(prefix, len(x))
        y = attend(q, k, v, w, pk, pv)
        first = max(0, k.shape[2] - w + 1) if w else 0
        return self.out(y.transpose(1, 2).flatten(2)), AttentionState(omega.tail(k, first, T), omega.tail(v, first, T), pos + T)


def attend(q, k, v, window, pk=None, pv=None):
    """Attention of the last T positions (B, H, T, D) to k, v (B, H, n >= T, D), each to its last `window` (0: all), and to pk, pv."""
    T, n, w = q.shape[2], k.shape[2], window
    if n == T and pk is None and (w == 0 or w >= T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if w and n > 4 * w:                                       # block by block, each with the w - 1 keys before it: linear in T
        blocks, pad = -(-T // w), -T % w
        q = F.pad(q, (0, 0, 0, pad)).unflatten(2, (blocks, w)).transpose(1, 2).flatten(0, 1)      # (B blocks, H, w, D)
        front = w - 1 - (n - T)                               # keys before the sequence, which the first block alone would see
        k, v = (F.pad(a, (0, 0, front, pad)).unfold(2, 2 * w - 1, w).permute(0, 2, 1, 4, 3).flatten(0, 1) for a in (k, v))
        first = F.pad(torch.full((1,), front, device=q.device), (0, blocks - 1)).repeat(len(q) // blocks)
    else:
        blocks, first = 1, None
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    mask = (j <= i) & (j > i - w) if w else j <= i
    if first is not None:
        mask = mask & (j >= first[:, None, None, None])
    if pk is not None:
        k, v = (torch.cat([p.repeat_interleave(blocks, 0), a], 2) for p, a in ((pk, k), (pv, v)))
        mask = F.pad(mask, (pk.shape[2], 0), value=True)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y if first is None else y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class WiringState(NamedTuple):
    """What a Wiring carries from call to call; None for what has not begun, or is not there."""
    memory: MemoryState | None
    attention: AttentionState | None                          # of mac: the segment in progress
    frozen: tuple                                             # of mac: the fast weights, and keys, at the start of the segment

    @property
    def sequences(self):
        """None between two segments of mac without a memory, where nothing is held."""
        held = self.memory or self.attention
        return held and held.sequences


class Wiring(nn.Module):
    """Memory and attention together, with persistent tokens p, after Titans (section 4, and its equation numbers).

    M(..) learns as it reads; M*(..) only reads, the memory at the segment's start. SWA is attention with a sliding window, in which p is like any
    token; in SWA* every token sees p, however far behind.

        mag   y = SWA*(p | x),  o = norm(y) * sigmoid(norm(M(p | x)))                    Eq 26 - 28
        mal   o = SWA(norm(M(p | x)))                       without the memory SWA*(p | x)   Eq 29 - 31
        mac   h = M*(x),  y = Attn(p | h | x),  o = norm(y) * sigmoid(norm(M(y)))        Eq 21 - 25

    Each M(..) and M*(..) is a Memory layer, its norm, output gate and projection included.
    """

    def __init__(self, config):
        super().__init__()
        self.config, d = config, config.n_embd
        self.attention = Attention(config)
        self.memory = Memory(config) if config.memory_branch else None
        self.persistent = nn.Parameter(torch.zeros(config.persistent, d)) if config.persistent else None
        self.y_norm = Norm(d) if config.wiring != "mal" else None
        self.m_norm = Norm(d) if config.memory_branch else None
        init_apart(self)

    def init(self):
        if self.memory:
            self.memory.init()
        if self.persistent is not None:
            nn.init.normal_(self.persistent)

    def forward(self, x, state=None):
        """(B, T, n_embd), WiringState or None -> (B, T, n_embd), WiringState. ValueError as `check_batch`."""
        check_batch(x, state, WiringState, least=1 if self.memory else 0)
        return getattr(self, self.config.wiring)(x, state or WiringState(None, None, ()))

    def remember(self, x, state):
        """M(p | x): the persistent tokens come first, once -> what is read, the state, how many persistent tokens it begins with."""
        n = 0
        if state.memory is None and self.persistent is not None:
            n = len(self.persistent)
            x = torch.cat([self.persistent.to(x.dtype).expand(len(x), -1, -1), x], 1)
        m, memory_state = self.memory(x, state.memory)
        return m, state._replace(memory=memory_state), n

    def gated(self, y, m):
        """norm(y) * sigmoid(norm(m)), or norm(y) where there is no memory."""
        y = self.y_norm(y)
        return y if m is None else y * self.m_norm(m).sigmoid()                                  # choice 13

    def mag(self, x, state):
        """Both read x; the memory gates what attention says (Eq 26 - 28)."""
        y, attention = self.attention(x, state.attention, self.persistent)
        m = None
        if self.memory:
            m, state, n = self.remember(x, state)
            m = m[:, n:]
        return self.gated(y, m), state._replace(attention=attention)

    def mal(self, x, state):
        """The memory reads x, attention what the memory says (Eq 29 - 31)."""
        n = 0
        if self.memory:
            x, state, n = self.remember(x, state)
            x = self.m_norm(x)
        y, attention = self.attention(x, state.attention, None if self.memory else self.persistent)
        return y[:, n:], state._replace(attention=attention)

    def mac(self, x, state):
        """Segment by segment (they do not overlap): read with the memory as it was, attend, then write what was attended to."""
        outs, t = [], 0
        while t < x.shape[1]:
            into = state.attention.pos if state.attention else 0
            n = min(x.shape[1] - t, self.config.attn_window - into)
            o, state = self.segment(x[:, t: t + n], state)
            if into + n == self.config.attn_window:
                state = state._replace(attention=None, frozen=())
            outs.append(o)
            t += n
        return torch.cat(outs, 1) if outs else x, state

    def segment(self, x, state):
        """A segment, or a part of one: token i sees p, and the h_j and x_j of its segment with j <= i, no later one (choice 18)."""
        a, T = self.attention, x.shape[1]
        pos = state.attention.pos if state.attention else 0
        context = [x]
        if self.memory:
            if state.memory is None:
                state = state._replace(memory=self.memory.start(x))
            if not state.frozen:
                state = state._replace(frozen=(omega.total(state.memory.rule), state.memory.rule.keys))
            context.insert(0, self.memory.retrieve(x, *state.frozen))                            # Titans Eq 21
        projected = [tuple(a.project(h)) for h in context]
        q = rope(a.q_norm(projected[-1][0]), pos)                                                # of x alone
        ks, vs = zip(*[(rope(a.k_norm(k), pos), v) for _, k, v in projected])
        ks, vs = (torch.stack(s, 2) for s in (ks, vs))                                           # (B, H, 1 or 2, T, D)
        if state.attention:
            ks, vs = torch.cat([state.attention.k, ks], 3), torch.cat([state.attention.v, vs], 3)
        n = ks.shape[3]
        k, v = ks.flatten(2, 3), vs.flatten(2, 3)
        mask = torch.ones(T, n, dtype=torch.bool, device=x.device).tril(n - T).repeat(1, len(context))
        if self.persistent is not None:
            pk, pv = a.project_prefix(self.persistent, len(x))
            k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
            mask = F.pad(mask, (pk.shape[2], 0), value=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)                              # Titans Eq 22, 23
        y = a.out(y.transpose(1, 2).flatten(2))
        m = None
        if self.memory:
            m, memory_state = self.memory(y, state.memory)                                       # Titans Eq 24: write y, then read it
            state = state._replace(memory=memory_state)
        return self.gated(y, m), state._replace(attention=AttentionState(ks, vs, pos + T))        # Titans Eq 25


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
        return self.after(x, y), state

    def after(self, x, y):
        """What follows the mixer, whose answer to norm(x) is y."""
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x)))


omega.COMPILED += [(Block, "after")]


def cross_entropy(logits, targets):
    """Mean cross entropy of targets (B, T) under logits (B, T, V) in nats, and in float32 at least; targets of -100 do not count."""
    return F.cross_entropy(at_least_float32(logits.flatten(0, 1)), targets.flatten(), ignore_index=-100)


omega.COMPILED += [(sys.modules[__name__], "cross_entropy")]   # eager, it has four tensors of all logits' size in float32


class LM(nn.Module):
    """A language model: tokens (B, T) -> logits (B, T, vocab_size). Every layer's state comes out and can go back in."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.remat = False                                    # train.py's --remat: a block's backward begins with its forward once more
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = Norm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init()

    def init(self):
        """Starting values of all parameters and buffers: also of a model made on the meta device, after to_empty."""
        if self.config.tie:
            self.head.weight = self.embed.weight
        for name, m in self.named_modules():
            if isinstance(m, nn.Linear):
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith(".out") else 1.0
                nn.init.normal_(m.weight, std=scale * m.in_features ** -0.5)
            elif isinstance(m, (Norm, Features)):
                m.init()
        nn.init.normal_(self.embed.weight, std=0.02 if self.config.tie else 1.0)
        for block in self.blocks:
            block.mixer.init()

    def forward(self, tokens, state=None):
        """tokens (B, T) integers, state from an earlier call or None -> logits (B, T, vocab_size), state after the last token.

        Any split of a sequence over calls gives the logits of the whole, to rounding. ValueError for tokens of another shape, and for a state that
        another model has left, as far as its shapes tell.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens are (B, T), not {tuple(tokens.shape)}; for one sequence: tokens[None]")
        x = self.embed(tokens)
        if self.config.tie:
            x = x * self.config.n_embd ** 0.5
        state = state or [None] * len(self.blocks)
        if len(state) != len(self.blocks):
            raise ValueError(f"the state is of {len(state)} layers, the model has {len(self.blocks)}")
        states, remat = [], self.remat and torch.is_grad_enabled()
        for block, s in zip(self.blocks, state):
            # the random state is for dropout alone; a GPU that records (train.Recorded) could not tell it
            x, s = checkpoint(block, x, s, use_reentrant=False, preserve_rng_state=self.config.dropout > 0) if remat else block(x, s)
            states.append(s)
        return self.head(self.norm(x)), tuple(states)

    def loss(self, tokens, targets):
        """Mean cross entropy in nats of targets (B, T) given tokens (B, T); targets of -100 do not count. ValueError for other shapes."""
        if targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} are not of the shape of tokens {tuple(tokens.shape)}")
        return cross_entropy(self(tokens)[0], targets)

    def compile_memory(self, **options):
        """Regional torch.compile: the chunk steps of the memory, what a block does with all tokens at once, and the loss (omega.COMPILED), for the
        whole process; of a transformer, each block as a whole.

        Eager is the CPU's default.
        """
        device = self.embed.weight.device.type
        omega.compile_chunks(device, **options)
        for block in self.blocks:
            if isinstance(block.mixer, Attention):
                block.compile(**omega.compiler(device, options))

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, state=None):
        """Yield max_new_tokens times the next token (B,), given tokens (B, T); every one costs the same, as long as the state does
        not grow (it does with full attention, and with exp features). Call eval() first where there is dropout.

        temperature 0 takes the most likely token; top_k 0 and top_p 1 are off. state: of a text before the tokens, from forward; it is not
        changed, so many prompts can follow one text that was read once. ValueError, when the first token is asked for, for an empty prompt and for
        a temperature, top_k or top_p below 0.
        """
        if not (temperature >= 0 and top_k >= 0 and top_p >= 0):
            raise ValueError(f"temperature, top_k and top_p are at least 0, not {temperature}, {top_k}, {top_p}")
        if not tokens.numel():
            raise ValueError("a prompt has at least one token; to begin with nothing, give that of a newline, or any other")
        for _ in range(max_new_tokens):
            # inference mode is a fifth faster than no_grad; eager, as single tokens, at every place in a chunk, are too many shapes to compile
            with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
                for piece in tokens.split(1024, -1):          # a long prompt would have the logits of all its tokens at once
                    logits, state = self(piece, state)
                token = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
                tokens = token[:, None]
            yield token.clone()                               # out here it is a tensor like any other


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token for each row of logits (B, V): temperature, then the top_k most likely, then the fewest of total mass top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / max(temperature, 1e-30)).sort(descending=True)     # finite
    if top_k:
        logits[:, top_k:] = -torch.inf
    probs = logits.softmax(-1)
    if top_p < 1:                                             # else rounding of the sum would leave out the unlikeliest tokens
        # the token that crosses top_p stays, and the likeliest always
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= max(top_p, 1e-9), 0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def configure(preset="atlas", size="tiny", **overrides):
    """Config's defaults < a size < a preset < `overrides` (fields of Config) -> Config.

    Raises ValueError for an unknown preset, size, field or value.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown model {preset!r}; choose one of {', '.join(PRESETS)}")
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; choose one of {', '.join(SIZES)}")
    unknown = set(overrides) - {f.name for f in fields(Config)}
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}; Config has {', '.join(f.name for f in fields(Config))}")
    return Config(**{**SIZES[size], **PRESETS[preset], **overrides})


def build(preset="atlas", size="tiny", **overrides):
    """A language model: LM(configure(preset, size, **overrides))."""
    return LM(configure(preset, size, **overrides))


def mapped(state, f, of_M0):
    """The state, or a list or dict of states, with f(t) for each tensor (B, ..) and of_M0(t) for each M0 (H, ..), one for all sequences."""
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, omega.State) and state.M0:
        return mapped(state._replace(M0=()), f, of_M0)._replace(M0=tuple(map(of_M0, state.M0)))
    if isinstance(state, (tuple, list)):
        parts = [mapped(s, f, of_M0) for s in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    if isinstance(state, dict):
        return {name: mapped(s, f, of_M0) for name, s in state.items()}
    return state


def detach(state):
    """The state, or a list or dict of states, cut off from the autograd graph of the tokens that made it, for streaming and for training on
    segments.

    A parameter that it refers to (M0) stays that parameter: an optimizer's step moves it for the state as well, and it goes on learning. An M0
    that is computed, as by a parametrization, is cut off, too, and learns from the first segment alone.
    """
    cut = lambda t: t.detach().clone() if t.is_inference() else t.detach()
    return mapped(state, cut, lambda m: m if m.is_leaf else m.detach())          # or a plain tensor, as in torch.func.functional_call


def select(state, rows):
    """The state, or a list or dict of states, of some sequences of a batch: a copy. rows is a slice, or a list, tuple or tensor of row numbers,
    each as often as you like. ValueError for a single number.

    select(state, [0] * 5) is for five prompts after one text, select(state, best) for a beam search.
    """
    rows = [*rows] if isinstance(rows, tuple) else rows

    def chosen(t):                                            # a slice of t would keep (and torch.save) the others' memories, too
        which = torch.arange(len(t), device=t.device)[rows]
        if which.dim() != 1 or isinstance(rows, list) and any(isinstance(row, float) for row in rows):           # of which torch drops the fraction
            raise ValueError(f"rows are a slice, or a list, tuple or tensor of row numbers, not {rows!r}")
        return t[which]
    return mapped(state, chosen, lambda m: m)


def load_state(file, device="cpu"):
    """A state that torch.save has written -> the state, without a gradient; nothing in the file is run. Its M0 is a copy, as it was when it was
    saved: what follows teaches the model's own M0 nothing.
    """
    with torch.serialization.safe_globals([omega.State, MemoryState, AttentionState, WiringState]):
        state = torch.load(file, map_location=device, weights_only=True)
    return mapped(state, torch.Tensor.detach, lambda m: m.requires_grad_(False))


def properties(config):
    """The five columns of the paper's Table 1: dynamic decay, deep memory, non-linear capacity, locally optimal, flexible context.

    They tell what a model here does. The paper ticks decay for deeptransformer, swdt and dot, whose equations have no alpha, and does not
    tick non-linear capacity for dla, whose Eq 19 has phi.
    """
    c = config
    if c.mixer == "attention":
        return [False, False, True, True, c.attn_window > 0]
    phi = c.features in ("sketch", "exp") or c.features == "monomial" and c.degree > 1
    return [c.keep, c.memory != "linear", phi, c.muon, c.window > 1]


def state_bytes(state):
    """Bytes of all tensors in a state, or a list or dict of states; parameters that a state refers to (M0) do not count."""
    if isinstance(state, torch.Tensor):
        return 0 if isinstance(state, nn.Parameter) else state.numel() * state.element_size()
    if isinstance(state, omega.State) and not state.pos:
        state = state._replace(anchor=())                     # the same tensors as W
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    return sum(map(state_bytes, inner))


def main(argv=()):
    """Lists the models, and which columns of the paper's Table 1 they have."""
    if argv in (["-h"], ["--help"]):
        print("usage: models.py\n\n" + main.__doc__)
        return 0
    if argv:
        print(f"error: models.py takes no arguments, not {' '.join(argv)}; it lists the models", file=sys.stderr)
        return 2
    lines = [f"{'model':16}{'decay':>7}{'deep':>6}{'phi':>5}{'2nd':>5}{'window':>8}{'parameters':>12}{'state bytes at 256, 1024 tokens':>34}"]
    for name in PRESETS:
        model = build(name)
        marks = ["x" if p else "-" for p in properties(model.config)]
        with torch.no_grad():
            a, b = (f"{state_bytes(model(torch.zeros(1, T, dtype=torch.long))[1]):,}" for T in (256, 1024))
        lines.append(f"{name:16}{marks[0]:>7}{marks[1]:>6}{marks[2]:>5}{marks[3]:>5}{marks[4]:>8}{model.num_params():>12,}{a:>18}{b:>16}")
    print("\n".join([*lines, ""]), end="")                     # in one write: no later line finds that `| head` is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
