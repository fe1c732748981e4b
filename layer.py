"""layer.py - the memory layer, which learns at test time (ATLAS Figure 3, right).

    x --+-- qkv -- short_conv, SiLU --+-- q, k -- unit length -- phi --+
        |                             +-- v ---------------------------+-- rule -- norm --+
        +-- gates -- keep, step, momentum, gate -----------------------+                  * -- out
        +-- out_gate -- SiLU -------------------------------------------------------------+

short_conv mixes each token with the three before it. The rule (omega.py, run by chunks.py) writes
the pairs (k, v) to the memory and reads it at q.

    layer = Memory(settings(n_embd=64, n_head=4))
    y, state = layer(x)                   # a new sequence: x (B, T, n_embd)
    y, state = layer(x, state)            # goes on with it

It needs memory.py, poly.py, muon.py, omega.py and chunks.py beside it.
"""
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import chunks
import memory
import omega
import poly
from memory import (LOSSES, MEMORIES, at_least_float32, unit, with_direction,
                    without_autocast)
from muon import COEFFICIENTS, MOST_STEPS


# ---- settings
class UserError(ValueError):
    """A user's mistake, told in one line that names the fault and the remedy. Programs then end
    with exit code 2."""


def opt(default, help, choices=None, low=0, high=2**31):
    """Return a field of a dataclass of settings, with its default, its help, and what it may be:
    one of choices, or a number with low <= number < high. common.add_flags makes a flag of it."""
    return field(default=default, metadata=dict(help=help, choices=choices, range=(low, high)))


@dataclass
class Settings:
    """What a memory layer is. The defaults are those of ATLAS in the size tiny."""
    n_head: int = opt(6, "number of heads; each has its own memory", low=1)
    n_embd: int = opt(192, "width of the residual stream", low=1)
    head_dim: int = opt(16, "width of a head; 0: n_embd / n_head")
    memory: str = opt(
        "linear", "what the memory is: a matrix, an MLP (Eq 42) or a gated MLP (Eq 43)",
        MEMORIES)
    expansion: int = opt(
        4, "hidden width of an MLP memory, in multiples of --head-dim", low=1)
    loss: str = opt(
        "l2", "inner loss (attentional bias); with dot, the output of an MLP is normalised (RMS)",
        LOSSES)
    window: int = opt(
        8, "tokens whose pairs each gradient is taken of (the paper's c); 1: Titans", low=1)
    error: str = opt(
        "chunk", "the memory at which an error is measured: that before the chunk (Eq 16), or that "
        "before the token (Eq 15), with a window of 1 and without Newton-Schulz",
        ("chunk", "token"))
    chunk: int = opt(16, "tokens that learn together (the paper's b)", low=1)
    momentum: bool = opt(True, "momentum of the inner gradients, Eq 33")
    muon: str = opt(
        "token", "Newton-Schulz on the inner momentum: none, at each token (Eq 32, 40; slow for an "
        "MLP), or once at the end of a chunk", ("none", "token", "chunk"))
    ns_steps: int = opt(5, "iterations of Newton-Schulz", low=1)
    ns_coefficients: str = opt("muon", "polynomial of Newton-Schulz", tuple(COEFFICIENTS))
    features: str = opt(
        "monomial", "feature map phi of keys and queries", (*poly.FEATURES, "exp"))
    degree: int = opt(2, "polynomial degree of phi (the paper's p)", low=1, high=13)
    keep: bool = opt(True, "learned forgetting (alpha); --no-keep never forgets")
    forget: str = opt(
        "start", "what forgetting leads to: start (M0), or zero as in the paper",
        ("start", "zero"))
    conv: bool = opt(True, "causal depthwise convolution of width 4 on q, k, v")
    lookback: int = opt(
        2, "number of the block (the first is 1) whose keys start as the query of the token before "
        "(choice 23); 0: none")
    max_step: float = opt(
        1.0, "largest step (eta), in units of 2 / chunk; with --error token, 1 learns a pair whole")
    max_norm: float = opt(
        50.0, "largest |W - M0| (--forget zero: |W|) of a matrix at a chunk's end; 0: no bound")


def settings(**given):
    """Return Settings changed by `given`. Raises UserError for a value that no memory can have."""
    made = Settings(**given)
    check(made)
    made.head_dim = made.head_dim or made.n_embd // made.n_head
    check_settings(made)
    return made


def check(config):
    """Raise UserError if a field of config has a value that its `opt` does not allow."""
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata["choices"]
        low, high = f.metadata["range"]
        if f.type is bool:
            choices = True, False
        if choices:
            good = value in choices
            wanted = f"one of {', '.join(map(str, choices))}"
        elif f.type is str:
            continue
        else:                                                 # nan is not in the range
            good = type(value) in (int, f.type) and low <= value < high
            wanted = f"of type {f.type.__name__}, at least {low} and below {high}"
        if not good:
            raise UserError(f"{f.name} is {wanted}, not {value!r}")


def check_settings(c):
    """Raise UserError, with the remedy, if settings do not go together."""
    most = MOST_STEPS[c.ns_coefficients]
    if c.muon == "token" and c.ns_steps > most:
        raise UserError(f"muon token takes up to {most} ns_steps {c.ns_coefficients}, because its "
                         "Gram matrices lose digits; or give muon chunk")
    if c.features == "sketch" and c.degree != 2:
        raise UserError("features sketch needs degree 2")
    if c.features == "exp" and c.muon != "none":
        raise UserError("features exp needs muon none: dot.py has no Newton-Schulz")
    if c.error == "token":
        if c.window > 1 or c.muon != "none":
            raise UserError("error token needs window 1 and muon none; or give error chunk")
        if c.loss not in ("l2", "dot"):
            raise UserError(f"error token needs loss l2 or dot, not {c.loss}; or give error chunk")


def rule(c):
    """Return the omega.Rule of the settings c."""
    norm = c.loss == "dot" and c.memory != "linear"                          # choice 11
    same = {name: getattr(c, name) for name in omega.Rule._fields if hasattr(c, name)}
    return omega.Rule(**same, norm=norm, ball=c.max_norm)


# ---- parts that attention uses, too
class Norm(nn.Module):
    """RMSNorm over the last dimension, with a learned scale of any shape."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def init(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return F.rms_norm(with_direction(x), x.shape[-1:], eps=2**-23) * self.weight


def heads(x, H):
    """Split the last dimension into heads: (B, T, H D) -> (B, H, T, D)."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


# ---- documents
# A row may hold several texts, and padding. So each token has a number: d in document d, and
# -1 - d if it is masked there. Through a window, a convolution or attention a token sees those
# tokens that have its own number. So masked tokens see masked ones, but nobody reads what they
# say. A state keeps the numbers of its last tokens.

def number(x, mask, reset, earlier, n):
    """Return the numbers (B, n + T) of n earlier tokens and of x (B, T, ..), or None if nothing
    marks a token: then all belong to one text.

    mask, reset (B, T) or None: as in `Memory.forward`. earlier (B, n): the numbers of the tokens
    before x, or None if all of them belong to the text that x continues."""
    if mask is None and reset is None and earlier is None:
        return None
    if earlier is None:
        earlier = torch.zeros(len(x), n, dtype=torch.long, device=x.device)

    last = F.pad(earlier, (1, 0))[:, -1:]                     # 0 if there are none
    docs = last.maximum(-1 - last).expand(x.shape[:2])        # d of both d and -1 - d
    if reset is not None:
        docs = docs + reset.cumsum(1)
    if mask is not None:
        docs = docs.where(mask, -1 - docs)
    return torch.cat([earlier, docs], 1)


def same_document(docs, T, n):
    """Return whether each of the last T tokens may see the n - 1 tokens before it and itself:
    (B, T, n). docs (B, at least n - 1 + T) from `number`."""
    windows = docs[:, 1 - T - n:].unfold(1, n, 1)             # (B, T, n)
    return windows == docs[:, -T:, None]


def short_conv(x, taps, docs=None):
    """Return silu(sum_j taps[j] * x_{t-n+j}) for each channel: x (B, n + T, C), taps (n + 1, C),
    docs (B, at least n + T) -> (B, T, C). Tokens of other documents than that of x_t count as 0."""
    total, T = 0, x.shape[1] - len(taps) + 1
    for j, tap in enumerate(taps.to(x.dtype)):
        row = x[:, j:j + T]
        if docs is not None:
            row = row * same_document(docs, T, len(taps))[..., j, None]
        total = total + tap * row
    return F.silu(total)


def limit(gates, docs):
    """Return gates that respect the numbers docs (B, at least window - 1 + T): at masked tokens the
    memory and its momentum stay as they are, and a token writes only pairs of its document."""
    keep, step, momentum, gate, _ = gates
    T, window = gate.shape[2:]
    real = docs[:, None, -T:] >= 0                            # (B, 1, T), for all heads
    looks = same_document(docs, T, window)[:, None] & real[..., None]
    if momentum is not None:
        momentum = momentum.where(real, 1)
    return omega.Gates(keep.where(real, 1), step.where(real, 0), momentum, gate * looks)


# ---- the memory layer
class MemoryState(NamedTuple):
    """What a Memory carries from call to call."""
    fast: tuple                           # omega.State, without M0: that belongs to the layer
    conv: torch.Tensor                    # (B, 3, 3 H D), the last inputs of the convolution
    fits: dict                            # the settings it depends on, from the function `fits`
    docs: torch.Tensor | None = None      # (B, layer.past), from `number`


class Memory(nn.Module):
    """The layer. config: `settings`, or a models.Config; layer: its number, from 0."""
    conv_width = 4
    engine = chunks                       # the module that runs the rule; DotMemory has another
    autocast_on = ("cuda",)               # devices where the rule's products are autocast, too

    def __init__(self, config, layer=0):
        super().__init__()
        check_settings(config)
        if config.features == "exp" and self.engine is chunks:
            raise UserError("features exp needs dot.DotMemory, as models.build takes")
        c = self.config = config
        H, d, inner = c.n_head, c.n_embd, c.n_head * c.head_dim
        self.rule, self.inner = rule(c), inner
        self.period = c.chunk             # tokens between two places where a text may begin
        self.past = max(self.conv_width, c.window) - 1        # tokens before x that x looks at
        self.looks_back = c.conv and c.lookback == layer + 1  # keys start late: choice 23

        self.qkv = nn.Linear(d, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.zeros(self.conv_width, 3 * inner)) if c.conv else None
        self.n_gates = [1, 1, int(c.momentum), c.window]      # keep, step, momentum, gate of a head
        self.gates = nn.Linear(d, H * sum(self.n_gates))
        self.phi = poly.Features(c.features, c.head_dim, c.degree, seed=layer)
        shapes = memory.shapes(c.memory, self.phi.out_dim, c.expansion * c.head_dim, c.head_dim)
        self.M0 = nn.ParameterList(nn.Parameter(torch.zeros(H, *shape)) for shape in shapes)
        self.norm = Norm(H, 1, c.head_dim)
        self.out_gate = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d, bias=False)
        self.init()

    def init(self):
        """Set the starting values that nn.Linear has not set. What draws the Linear layers anew, as
        models.LM does, must call this afterwards."""
        if self.conv is not None:         # each channel begins with a random mixture of tokens
            nn.init.normal_(self.conv, std=self.conv_width ** -0.5)
        self.init_M0(self.M0)
        if hasattr(self, "global_M0"):    # of shards.py
            self.init_M0(self.global_M0)
        if self.looks_back:
            self.init_lookback()
        self.init_gates()

    @torch.no_grad()
    def init_M0(self, M0):
        """Draw M0. A memory starts at 0 (choice 10), a deep one if its expansion is 2 or more, and
        a gated one if its first feature is 1. With a norm inside it starts near M = r. The first
        matrices of a deep memory make x W about twice as long as x = phi(k)."""
        c, *firsts, last = self.config, *M0
        width = last.shape[1]             # the hidden units, or E for a matrix
        for W in firsts:
            nn.init.normal_(W, std=2 * width ** -0.5)
        nn.init.zeros_(last)
        if self.rule.norm:
            nn.init.normal_(last, std=width ** -0.5)
        if self.rule.norm or not firsts:
            return

        # take the residual k away. gelu(z) - gelu(-z) = z, so hidden units come in pairs of z = x A
        # and -z. Q, with orthonormal columns, undoes the rows of A that read k, and no others
        m, one = width // 2, int(c.features in ("monomial", "sketch"))       # where k begins in x
        n = min(m, c.head_dim)
        Q = torch.linalg.qr(torch.randn(len(last), m, n, device=last.device)).Q
        A = firsts[0][..., :m]
        A = A - A @ Q @ Q.mT
        A[:, one:one + n] = 2 ** 0.5 * Q.mT
        firsts[0][..., :2 * m] = torch.cat([A, -A], 2)
        last[:, :2 * m, :n] = torch.cat([-Q, Q], 1) / 2 ** 0.5
        if c.memory == "gated":
            firsts[1].zero_()
            firsts[1][:, 0] = 1           # z times the first feature

    @torch.no_grad()
    def init_lookback(self):
        """Let k_t start as q_{t-1}, so that a query finds what came next (choice 23)."""
        n = self.inner                                        # q has the first n channels, then k
        self.qkv.weight[n:2 * n] = self.qkv.weight[:n]
        # the last tap is that of t. Those of k_t are those of q_t, one token earlier
        self.conv[0, :n] = 0
        self.conv[:-1, n:2 * n] = self.conv[1:, :n]
        self.conv[-1, n:2 * n] *= 0.1                         # the first key needs a direction

    @torch.no_grad()
    def init_gates(self):
        """Set where the gates start. Where a step is at its bound, the first head keeps 0.73 of its
        memory and the last 0.998 (choice 16). Steps start at 1/4 of the bound, momentum and gates
        at 1/2."""
        H = self.config.n_head
        nn.init.normal_(self.gates.weight, std=0.02)
        bias = torch.zeros(H, sum(self.n_gates))
        bias[:, 0] = torch.linspace(1, 6, H) if H > 1 else 3.5
        self.gates.bias.copy_(bias.flatten())

    def make_gates(self, x):
        """Return the omega.Gates of x, token by token: keep, step, momentum (B, H, T) and gate
        (B, H, T, window)."""
        c = self.config
        if type(self.gates) is nn.Linear:
            raw = F.linear(*map(at_least_float32, (x, self.gates.weight, self.gates.bias)))
        else:                             # what may stand in its place, as a LoRA
            raw = at_least_float32(self.gates(x.to(self.norm.weight.dtype)))
        keep, step, momentum, gate = heads(raw, c.n_head).split(self.n_gates, -1)

        opened = step.squeeze(-1).sigmoid().square()          # o of choice 16; a square closes well
        forgets = opened * (-keep).squeeze(-1).sigmoid()      # o (1 - a)
        keep = 1 - forgets if c.keep else torch.ones_like(opened)            # alpha
        momentum = momentum.squeeze(-1).sigmoid() if c.momentum else None    # theta
        step = opened * self.most(momentum)                                  # eta
        gate = gate.sigmoid() / c.window                                     # gamma: choice 6
        return omega.Gates(keep, step, momentum, gate)

    def most(self, momentum):
        """Return the bound of the step, given the momentum (choice 16)."""
        c = self.config
        if not self.rule.solves:                              # a chunk is one big step
            return c.max_step * (2 / c.chunk)
        if momentum is None:
            return c.max_step
        return c.max_step * (1 - momentum)                    # momentum repeats a step 1 / (1 - ..)

    def start(self, x):
        """Return the state before the first token, for a batch of len(x) sequences."""
        conv = x.new_zeros(len(x), self.conv_width - 1, 3 * self.inner)
        fast = omega.start(self.rule, self.phi, list(self.M0), len(x), self.config.momentum)
        return MemoryState(fast._replace(M0=()), conv, fits(self.config))

    def with_M0(self, fast, M0):
        """Return the omega.State `fast`, completed by the layer's M0 where W is counted from it.
        Raises ValueError if it has another type than the layer's states."""
        here, there = at_least_float32(self.norm.weight).dtype, fast.W[0].dtype
        if there != here:
            raise ValueError(f"the state's fast weights are {there}, not {here}; "
                             "with FSDP give cast_forward_inputs=False")
        if self.config.forget == "zero":
            return fast
        return fast._replace(M0=tuple(M0))

    def learn(self, q, k, v, gates, fast):
        """Run the rule from the state `fast` -> y (B, H, T, D), and the state after the last token.
        Both states are without M0."""
        fast = self.with_M0(fast, self.M0)
        y, fast = self.engine.run(self.rule, self.phi, q, k, v, gates, fast)
        return y, fast._replace(M0=())

    def weights(self, state):
        """Return the memory as a query would read it now, and its momentum: two tuples of matrices
        (B, H, in, out)."""
        return self.engine.weights(self.rule, self.phi, self.with_M0(state.fast, self.M0))

    def forward(self, x, state=None, mask=None, reset=None):
        """Read x (B, T, n_embd), MemoryState or None -> (B, T, n_embd), MemoryState.

        mask (B, T) bool is False at padding: such tokens write nothing and forget nothing, and no
        other token looks at them. reset (B, T) bool is True where a text begins; this must be where
        a chunk begins (with shards: a shard). Raises ValueError if it is not, and as `check_input`.
        A token of NaN or infinity spoils all outputs of its chunk, even those before it; if it is
        masked it spoils none."""
        x = check_input(self, x, state, mask, reset)
        if state is None:
            state = self.start(x)
        docs = number(x, mask, reset, state.docs, self.past)

        q, k, v, gates, tail = self.project(x, state, docs)
        if docs is not None:
            gates = limit(gates, docs)
        if reset is not None:
            at = torch.arange(x.shape[1], device=x.device) + state.fast.pos
            if self.config.forget == "zero" or (reset & (at % self.period > 0)).any():
                raise ValueError("reset needs forget='start', and stands where a chunk (with "
                                 "shards: a shard) begins")
            gates = gates._replace(reset=reset[:, None].expand_as(gates.keep))

        exact = torch.get_float32_matmul_precision() == "highest"            # no TF32
        if x.is_cuda and self.rule.muon == "token" and not exact:
            raise ValueError("muon token needs torch.set_float32_matmul_precision('highest')")
        autocast = nullcontext() if x.device.type in self.autocast_on else without_autocast(x)
        with autocast:
            y, fast = self.learn(q, k, v, gates, state.fast)
        if docs is not None:
            docs = docs[:, -self.past:].clone()
        return self.finish(x, y), MemoryState(fast, tail, fits(self.config), docs)

    def project(self, x, state, docs=None):
        """Return q, k, v (B, H, T, D), which are 0 at masked tokens; the gates; and the last inputs
        of the convolution, for the state. docs (B, past + T): from `number`."""
        qkv, n = self.qkv(x), self.conv_width - 1
        inputs = torch.cat([state.conv.to(qkv.dtype), qkv], 1)
        tail = inputs[:, -n:].clone()                         # a view would keep all inputs alive
        qkv = F.silu(qkv) if self.conv is None else short_conv(inputs, self.conv, docs)
        if docs is not None:
            qkv = qkv * (docs[:, -x.shape[1]:, None] >= 0)

        q, k, v = (heads(a, self.config.n_head) for a in qkv.chunk(3, -1))
        with without_autocast(x):                                            # unit: choice 8
            return unit(q), unit(k), at_least_float32(v), self.make_gates(x), tail

    def finish(self, x, y):
        """Apply the norm of each head, the output gate and the projection: y (B, H, T, D) ->
        (B, T, n_embd)."""
        y = self.norm(y).transpose(1, 2).flatten(2).to(x.dtype)
        return self.out(y * F.silu(self.out_gate(x)))

    def frozen(self, state, reset=None):
        """Return the memory that `recall` reads: that of now, or M0 where reset (B,) is True."""
        if reset is not None:             # at a chunk's start: W is the whole state, and 0 is M0
            W = tuple(w.where(~reset[:, None, None, None], 0) for w in state.fast.W)
            state = state._replace(fast=state.fast._replace(W=W))
        return self.weights(state)[0]

    def recall(self, q, frozen):
        """Return M(phi(q); W) for q (B, H, T, D)."""
        return memory.apply(self.config.memory, frozen, self.phi(q), q, self.rule.norm)


# ---- states. These functions take that of a layer, or that of a models.LM: a tuple of one for each
# of its layers
torch.serialization.add_safe_globals([omega.State, omega.Gates, MemoryState])


def map_state(f, state):
    """Return the state with f(a) in place of each tensor a."""
    def change(a):
        return f(a) if isinstance(a, torch.Tensor) else a
    return tree_map(change, state)


def detach(state):
    """Return the state without its autograd graph, so that later gradients end here. Streams,
    training in segments, and torch.save need this."""
    return map_state(torch.Tensor.detach, state)


def select(state, rows):
    """Return the state of some sequences of the batch. rows is a list or tensor of their indices,
    in any order, also repeated. Raises ValueError if it is something else."""
    rows = torch.as_tensor(rows)
    if rows.dim() != 1 or rows.numel() and rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows is a list of indices, not {rows.tolist()}")
    return map_state(lambda a: a[rows.long()], state)         # an empty list became float32


# ---- checks of what a layer is given
DEPENDS = ("attention attn_window chunk degree expansion features forget head_dim memory momentum "
           "muon n_head rope shard window wiring").split()


def fits(config):
    """Return the settings on which the state of a layer depends."""
    return {name: getattr(config, name, None) for name in DEPENDS}


def check_state(layer, state, batch=None):
    """Raise ValueError if the state does not fit the layer, or does not have `batch` sequences."""
    if not hasattr(state, "fits"):
        raise ValueError(f"a layer takes a state of its own, not a {type(state).__name__}")
    for name, here in fits(layer.config).items():
        there = state.fits.get(name)
        if there != here:
            raise ValueError(f"the state fits another layer: its {name} is {there}, not {here}")
    tensors = [a for a in tree_leaves(state) if isinstance(a, torch.Tensor)]
    if batch and len(tensors[0]) != batch:
        raise ValueError(f"the state's batch is {len(tensors[0])}, not {batch}")


def check_input(layer, x, state, mask, reset):
    """Return x with 0 where the mask is False, even where x is NaN. Raise ValueError if x is not
    (B >= 1, T >= 1, n_embd), if mask or reset is not (B, T) bool, or if the state does not fit."""
    width = layer.config.n_embd
    if x.dim() != 3 or not x.numel() or x.shape[2] != width:
        raise ValueError(f"a layer reads (B, T >= 1, {width}), not {tuple(x.shape)}; "
                         "one text is x[None]")
    for marks in (mask, reset):
        if marks is not None and (marks.shape != x.shape[:2] or marks.dtype != torch.bool):
            raise ValueError(f"mask and reset are bool {tuple(x.shape[:2])}, not {marks.dtype} "
                             f"{tuple(marks.shape)}")
    if state is not None:
        check_state(layer, state, len(x))
    if mask is None:
        return x
    return x.masked_fill(~mask[..., None], 0)
