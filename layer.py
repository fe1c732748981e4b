"""layer.py - the memory layer, which learns at test time (ATLAS Figure 3, right), and the states of layers.

    x --+-- qkv -- short_conv, SiLU --+-- q, k -- unit length -- phi --+
        |                             +-- v ---------------------------+-- rule: write (k, v), read q -- norm --+
        +-- gates -- keep, step, momentum, gate -----------------------+                                   * -- out
        +-- out_gate -- SiLU -----------------------------------------------------------------------------------+

    layer = Memory(settings(n_embd=64, n_head=4))
    y, state = layer(x)                   # x (B, T, n_embd), a new sequence; y, state = layer(x, state) goes on

It needs memory.py, poly.py, muon.py, omega.py and chunks.py beside it.
"""
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import chunks
import memory
import omega
import poly
from memory import at_least_float32, unit, without_autocast
from muon import COEFFICIENTS


SETTINGS = dict(                          # ATLAS with a matrix; models.Config explains each
    n_head=8, n_embd=192, head_dim=16, memory="linear", expansion=4, loss="l2", window=2, chunk=32,
    error="token", momentum=True, muon=True, muon_every=0, ns_steps=5, ns_coefficients="muon",
    features="monomial", degree=2, keep=True, forget="start", conv=True, lookback=2, max_step=1.0,
    max_norm=50.0)
CHOICES = dict(memory=memory.MEMORIES, loss=memory.LOSSES, error=("chunk", "token"),
               ns_coefficients=tuple(COEFFICIENTS), features=poly.FEATURES, forget=("start", "zero"))
MAY_BE_0 = "muon_every", "lookback", "max_step", "max_norm"


def settings(**given):
    """Return SETTINGS changed by `given`. Raises ValueError for unknown names and values."""
    if unknown := given.keys() - SETTINGS:
        raise ValueError(f"no setting {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    made = SimpleNamespace(**SETTINGS | given)
    if wrong := fault(made):
        raise ValueError(wrong)
    return made


def fault(c, features=poly.FEATURES):
    """Return what is wrong with the settings of a memory, and the remedy; "" if nothing is."""
    choices = CHOICES | dict(features=features)
    for name, usual in SETTINGS.items():
        value, kind = getattr(c, name), type(usual)
        if kind is str:
            good, says = value in choices[name], f"one of {', '.join(choices[name])}"
        elif kind is bool:
            good, says = type(value) is bool, "True or False"
        else:
            least = 0 if name in MAY_BE_0 else 1
            good = type(value) in (int, kind) and least <= value < math.inf
            says = f"a number of type {kind.__name__}, at least {least}"
        if not good:
            return f"{name} is {says}, not {value!r}"
    if c.features == "sketch" and c.degree != 2:
        return "features sketch needs degree 2"
    if c.features == "exp" and c.muon:
        return "features exp needs muon off (--no-muon): dot.py has no Newton-Schulz"
    if c.error == "token":
        if c.loss not in ("l2", "dot"):
            return f"error token needs loss l2 or dot, not {c.loss}; or give error chunk"
        if c.muon and 0 < c.muon_every < c.chunk:
            return (f"error token needs a muon_every of chunk, {c.chunk}, not {c.muon_every}; "
                    "or give error chunk")
    return ""


def rule(c):
    """Return the omega.Rule of settings. Its muon_every is 0 without Newton-Schulz."""
    block = min(c.muon_every or c.chunk, c.chunk) if c.muon else 0
    norm = c.loss == "dot" and c.memory != "linear"                                              # choice 11
    return omega.Rule(c.memory, c.loss, c.window, c.chunk, block, c.ns_steps, c.ns_coefficients, c.forget, norm,
                      c.max_norm, c.error)


# ---- parts that attention uses, too
class Norm(nn.Module):
    """RMSNorm over the last dimension, with a learned scale of any shape."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def init(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=2**-23) * self.weight


def heads(x, H):
    """Split the last dimension into heads: (B, T, H D) -> (B, H, T, D)."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def numbered(x, mask, reset, seen, n):
    """Number the documents of x (B, T, ..), for a mask and a reset (B, T) or None. A token may look at a key if both
    have the same number. seen (B, n): which of the n keys before x belong to the text that x continues; None: all.

    -> numbers of the tokens (B, T); of the keys (B, n + T), -1 where the mask is False. Without marks: (None, None)."""
    if mask is None and reset is None and seen is None:
        return None, None
    ones = torch.ones(x.shape[0], n + x.shape[1], dtype=torch.bool, device=x.device)
    doc = (~ones[:, n:] if reset is None else reset).cumsum(1)
    here = torch.cat([ones[:, :n] if seen is None else seen, ones[:, n:] if mask is None else mask], 1)
    return doc, F.pad(doc, (n, 0)).masked_fill(~here, -1)


# ---- the memory layer
class MemoryState(NamedTuple):
    """What a Memory carries from call to call."""
    fast: tuple                           # omega.State without M0, which is the layer's (or shards.Shards)
    conv: torch.Tensor                    # (B, 3, 3 H D), the last inputs of the convolution
    fits: dict                            # what it depends on: `fits` of the layer
    seen: torch.Tensor | None = None      # (B, window - 1) bool: the last pairs that windows look at; None: all

    batch = property(lambda self: len(self.conv))


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
    """The layer. config: `settings`, or a models.Config; layer: its number, from 0."""
    conv_width = 4
    engine = chunks                       # the module that runs the rule
    features = poly.FEATURES
    autocast_on = ("cuda",)               # devices on which autocast reaches the products of the memory, too

    def __init__(self, config, layer=0):
        super().__init__()
        if wrong := fault(config, self.features):
            raise ValueError(wrong)
        self.config = config
        c, d, H, inner = config, config.n_embd, config.n_head, config.n_head * config.head_dim
        self.looks_back = c.conv and c.lookback == layer + 1  # choice 23
        self.qkv = nn.Linear(d, 3 * inner, bias=False)
        self.conv = nn.Parameter(torch.zeros(self.conv_width, 3 * inner)) if c.conv else None
        self.n_gates = [1, 1, int(c.momentum), c.window]      # as in make_gates
        self.gates = nn.Linear(d, H * sum(self.n_gates))
        self.phi = poly.Features(c.features, c.head_dim, c.degree, seed=layer)
        shapes = memory.shapes(c.memory, self.phi.out_dim, c.expansion * c.head_dim, c.head_dim)
        self.M0 = nn.ParameterList(nn.Parameter(torch.zeros(H, *shape)) for shape in shapes)
        self.period = c.chunk                                 # tokens between two places where a text may begin
        self.norm = Norm(H, 1, c.head_dim)
        self.out_gate = nn.Linear(d, inner, bias=False)
        self.out = nn.Linear(inner, d, bias=False)
        self.init()

    def init(self):
        """Set the starting values that nn.Linear has not set. Call it after model.apply(your_init)."""
        H, c = self.config.n_head, self.config
        if self.conv is not None:                             # each channel begins with a random mixture of four tokens
            nn.init.normal_(self.conv, std=self.conv_width ** -0.5)
        for M0 in (self.M0, getattr(self, "global_M0", ())):  # x W is as long as 2 phi(k); it adds little (choice 10)
            for W in M0:
                last = 1.0 if rule(c).norm else 0.25
                std = 0.0 if c.memory == "linear" else last if W is M0[-1] else 2.0
                nn.init.normal_(W, std=std * M0[-1].shape[1] ** -0.5)
        if self.looks_back:                                   # k_t starts as q_{t-1}, so a query finds what came next
            n = H * c.head_dim                                # of each of q, k, v  (choice 23)
            with torch.no_grad():
                self.qkv.weight[n:2 * n], self.conv[0, :n] = self.qkv.weight[:n], 0
                self.conv[:-1, n:2 * n] = self.conv[1:, :n]
                self.conv[-1, n:2 * n] *= 0.1                 # not 0: the first key needs a direction
        nn.init.normal_(self.gates.weight, std=0.02)
        keep = torch.linspace(1, 6, H) if H > 1 else torch.full((1,), 3.5)       # 0.73 .. 0.998, by head  (choice 16)
        others = torch.zeros(H, sum(self.n_gates[1:]))        # a step of 1/4 of its bound; momentum and gate 1/2
        if c.error == "token":                                # a window begins as one of 1  (choice 6)
            others[:, -c.window:-1] = -3
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([keep[:, None], others], 1).flatten())

    def make_gates(self, x):
        """Return the omega.Gates of x: keep, step, momentum (B, H, T) and gate (B, H, T, window), token by token."""
        c = self.config
        raised = {n: p.float() for n, p in self.gates.named_parameters() if p.dtype in (torch.bfloat16, torch.half)}
        raw = heads(functional_call(self.gates, raised, at_least_float32(x)), c.n_head)      # it may have a LoRA by now
        keep, step, momentum, gate = raw.split(self.n_gates, -1)
        opened = step.squeeze(-1).sigmoid().square()          # squared, it closes well  (choice 16)
        forgets = opened * (-keep).squeeze(-1).sigmoid()
        keep = 1 - forgets if c.keep else torch.ones_like(opened)                                # alpha
        momentum = momentum.squeeze(-1).sigmoid() if c.momentum else None                        # theta
        step = opened * self.most(momentum)                                                      # eta
        return omega.Gates(keep, step, momentum, self.shared(gate.sigmoid()))                    # gamma: choice 6

    def shared(self, gate):
        """Divide gates (.., window) so that their sum is bounded: by 1, or with error = "token", where a
        token's own pair has a gate of its own, by 2."""
        w = self.config.window
        if self.config.error == "chunk" or w == 1:
            return gate / w
        return torch.cat([gate[..., :-1] / (w - 1), gate[..., -1:]], -1)

    def most(self, momentum):
        """Return the bound of the step. A chunk is one big step; else momentum repeats it 1 / (1 - momentum) times."""
        c = self.config
        return c.max_step * (2 / c.chunk if not rule(c).solves else 1 if momentum is None else 1 - momentum)

    def start(self, x):
        """Return the state before the first token, for a batch of len(x) sequences."""
        conv = x.new_zeros(len(x), self.conv_width - 1, 3 * self.config.n_head * self.config.head_dim)
        fast = omega.start(rule(self.config), self.phi, list(self.M0), len(x), momentum=self.config.momentum)
        return MemoryState(fast._replace(M0=()), conv, fits(self.config))

    def with_M0(self, fast):
        """Return the omega.State `fast` with M0, which belongs to the layer and not to its states."""
        return fast._replace(M0=tuple(self.M0) if self.config.forget == "start" else ())

    def learn(self, q, k, v, gates, fast):
        """Run the rule -> y (B, H, T, D), and the state of the fast weights after it."""
        fast = self.with_M0(fast)
        y, fast = self.engine.run(rule(self.config), self.phi, q, k, v, gates, fast)
        return y, fast._replace(M0=())

    def weights(self, state):
        """Return the memory now, as a query reads it: matrices (B, H, in, out); and its momentum."""
        return self.engine.weights(rule(self.config), self.phi, self.with_M0(state.fast))

    def forward(self, x, state=None, mask=None, reset=None):
        """Read x (B, T, n_embd), MemoryState or None -> (B, T, n_embd), MemoryState. mask (B, T) bool, False at tokens
        that write nothing, forget nothing, and that no token looks at; reset (B, T) bool, True where a text begins.
        Raises ValueError as `check_input`, and for a reset where no chunk (with shards: no shard) begins. A token of
        NaN or infinity spoils all outputs of its chunk, those before it, too, unless it is masked."""
        c, x = self.config, check_input(self, x, state, mask, reset)
        state = state or self.start(x)
        if reset is not None:
            inside = (torch.arange(x.shape[1], device=x.device) + state.fast.pos) % self.period > 0
            if c.forget == "zero" or (reset & inside).any():
                raise ValueError("reset needs forget='start', and stands where a chunk (with shards: a shard) begins")
        doc, pairs = numbered(x, mask, reset, state.seen, c.window - 1)
        q, k, v, gates, tail = self.project(x, state, doc, pairs)
        if doc is not None:                                   # shards add up k k^T, so masked k must be 0
            k, gates = k * (pairs[:, None, -x.shape[1]:, None] >= 0), masked(gates, doc, pairs, reset)
        with nullcontext() if x.device.type in self.autocast_on else without_autocast(x):
            y, fast = self.learn(q, k, v, gates, state.fast)
        seen = None if doc is None else (pairs == doc[:, -1:])[:, x.shape[1]:]
        return self.finish(x, y), MemoryState(fast, tail, fits(c), seen)

    def project(self, x, state, doc=None, pairs=None):
        """Return q, k, v (B, H, T, D), the gates, and what the convolution carries on. doc, pairs: from `numbered`."""
        qkv, n, same = self.qkv(x), self.conv_width - 1, None
        before = state.conv.to(qkv.dtype)
        if doc is not None:
            here, docs = pairs[:, -x.shape[1]:, None] >= 0, F.pad(doc, (n, 0))
            qkv, same = qkv * here, docs.unfold(1, n + 1, 1) == doc[..., None]
        inputs = torch.cat([before, qkv], 1)
        tail = inputs[:, -n:].clone() if doc is None else inputs[:, -n:] * (docs[:, -n:] == doc[:, -1:])[..., None]
        qkv = F.silu(qkv) if self.conv is None else short_conv(inputs, self.conv, same)
        q, k, v = (heads(a, self.config.n_head) for a in qkv.chunk(3, -1))
        with without_autocast(x):
            q, k = unit(q), unit(k)                                                              # choice 8
            return q, k, at_least_float32(v), self.make_gates(x), tail

    def finish(self, x, y):
        """Apply the norm of each head, the output gate and the projection: y (B, H, T, D) -> (B, T, n_embd)."""
        y = self.norm(y).transpose(1, 2).flatten(2).to(x.dtype)
        return self.out(y * F.silu(self.out_gate(x)))

    def frozen(self, state, reset=None):
        """Return what `recall` reads: the memory now, or where reset (B,) is True as it was at first."""
        W, _ = self.weights(state)
        if reset is None:
            return W
        M0 = [F.pad(m, (0, 0, 0, w.shape[-2] - m.shape[-2])) for m, w in zip(self.M0, W)]
        return tuple(torch.where(reset[:, None, None, None], m, w) for m, w in zip(M0, W))

    def recall(self, q, frozen):
        """Return M(phi(q); W) for q (B, H, T, D)."""
        return memory.apply(self.config.memory, frozen, self.phi(q), q, rule(self.config).norm)


# ---- states. That of an LM is a tuple of one for each layer; these functions take both
torch.serialization.add_safe_globals([omega.State, omega.Gates, MemoryState])


def map_state(f, state):
    """Return the state with f(a) in place of each tensor a."""
    return tree_map(lambda a: f(a) if isinstance(a, torch.Tensor) else a, state)


def detach(state):
    """Return the state cut off from the autograd graph: for streams, training on segments, and torch.save."""
    return map_state(torch.Tensor.detach, state)


def select(state, rows):
    """Return the state of these sequences of the batch (a list or tensor of indices): reordered, repeated, dropped."""
    rows = torch.as_tensor(rows)
    if rows.dim() != 1 or rows.numel() and rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"rows is a list of indices, not {rows.tolist()}")
    return map_state(lambda a: a[rows.long()], state)         # an empty list comes as float32


def fits(config):
    """Return the settings on which the state of a layer depends, those that it has."""
    names = ("attention attn_window chunk degree expansion features forget head_dim memory momentum muon "
             "muon_every n_head shard window wiring").split()
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def check_state(layer, state, batch=None):
    """Raise ValueError if the state does not fit the layer, or a batch of another size; say what differs."""
    if not hasattr(state, "fits"):
        raise ValueError(f"a layer takes a state of its own, not a {type(state).__name__}")
    fast = getattr(getattr(state, "memory", state), "fast", None)                # of a wiring; of attention None
    if fast and getattr(fast, "whole", fast).W[0].element_size() < 4:
        raise ValueError("the state's fast weights were cast to 16 bits; with FSDP give cast_forward_inputs=False")
    here, there = fits(layer.config) | dict(batch=batch), state.fits | dict(batch=batch and state.batch)
    differ = [f"its {name} is {there.get(name)}, not {a}" for name, a in here.items() if there.get(name) != a]
    if differ:
        raise ValueError("the state fits another layer or input: " + ", ".join(differ))


def check_input(layer, x, state, mask, reset):
    """Return a layer's x, 0 where its mask is False, whatever stands there. Raise ValueError if x is not (B >= 1, T >=
    1, n_embd), if mask or reset is not (B, T) bool, or if a state does not fit the layer and x."""
    if x.dim() != 3 or not x.numel() or x.shape[2] != layer.config.n_embd:
        raise ValueError(f"a layer reads (B, T >= 1, {layer.config.n_embd}), not {tuple(x.shape)}; one text is x[None]")
    for a in (mask, reset):
        if a is not None and (a.shape != x.shape[:2] or a.dtype != torch.bool):
            raise ValueError(f"mask and reset are bool {tuple(x.shape[:2])}, not {a.dtype} {tuple(a.shape)}")
    if state:
        check_state(layer, state, len(x))
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
