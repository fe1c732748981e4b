"""wiring.py - attention, and Titans' three ways to wire it with a memory: MAC, MAG and MAL (arXiv 2501.00663v1).

    mag   y = SWA*(p | x),  o = norm(y) * sigmoid(norm(M(p | x)))                        Titans Eq 26 - 28
    mal   o = SWA(norm(M(p | x)))                                                        Titans Eq 29 - 31
    mac   h = M*(x),  y = Attn(p | h | x),  o = norm(y) * sigmoid(norm(M(y)))            Titans Eq 21 - 25

p are learned tokens that stand before every sequence (persistent tokens). M(..) learns while it reads. M*(..) reads the
memory as it was at the start of the segment (of attn_window tokens). SWA is attention with a sliding window. In SWA*
every token also sees all of p. sigmoid(norm(M(..))) is called the attention gate.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from layer import Norm, check_input, fits, heads, numbered
from memory import unit, without_autocast

WIRINGS = ("lmm", "mag", "mal", "mac")                        # lmm: the memory alone


# ---- attention
class AttentionState(NamedTuple):
    """What Attention carries from call to call, and MAC inside a segment."""
    k: torch.Tensor                       # (B, H, n, D), n < attn_window if there is one; in MAC (B, H, 2, n, D): h, x
    v: torch.Tensor                       # likewise
    pos: int                              # tokens so far; in MAC: of the segment
    fits: dict                            # as in layer.MemoryState
    seen: torch.Tensor | None = None      # (B, n) bool: which k later tokens may look at; None: all

    batch = property(lambda self: len(self.k))


def rope(pos, *xs):
    """Rotate pairs of coordinates of each x (B, H, T, D) by position (RoPE, Su et al. 2021). All x have one shape, and
    begin at `pos`."""
    x = xs[0]
    half, exact = x.shape[-1] // 2, torch.float32 if x.device.type == "mps" else torch.float64   # long streams need it
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    turns = torch.arange(pos, pos + x.shape[2], device=x.device, dtype=exact)[:, None] * (freq / (2 * math.pi))
    angle = (2 * math.pi * turns.frac()).to(torch.promote_types(x.dtype, torch.float32))
    cos, sin, halves = angle.cos(), angle.sin(), [(x[..., :half], x[..., half:]) for x in xs]
    return [torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype) for a, b in halves]


class Attention(nn.Module):
    """Causal softmax attention, full or with a sliding window, with RoPE and normalised queries and keys. The baseline.
    The window counts the token itself. Tokens of `prefix` have no position, and every token sees them."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        inner = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * inner, bias=False)
        self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)
        self.out = nn.Linear(inner, config.n_embd, bias=False)

    def project(self, x):
        """Return q, k, v (B, H, T, D) of x (B, T, n_embd), before norm and rotation."""
        return (heads(a, self.config.n_head) for a in self.qkv(x).chunk(3, -1))

    def project_prefix(self, p, B):
        """Return k, v (B, H, P, D) of tokens p (P, n_embd) that stand before every sequence, without a position."""
        _, k, v = (a.expand(B, -1, -1, -1) for a in self.project(p[None]))
        return self.k_norm(k), v

    def forward(self, x, state=None, mask=None, reset=None, prefix=None):
        """Read x (B, T, n_embd), AttentionState or None, prefix (P, n_embd) -> (B, T, n_embd), AttentionState. mask and
        reset: as in models.LM."""
        x = check_input(self, x, state, mask, reset)
        w, pos = self.config.attn_window, state.pos if state else 0
        q, k, v = self.project(x)
        q, k = rope(pos, self.q_norm(q), self.k_norm(k))                                         # choice 17
        doc, keys = numbered(x, mask, reset, state and state.seen, state.k.shape[2] if state else 0)
        if state:
            k, v = (torch.cat([old.to(a.dtype), a], 2) for old, a in ((state.k, k), (state.v, v)))
        prefix = self.project_prefix(prefix, len(x)) if prefix is not None else (None, None)
        y = attend(q, k, v, w, *prefix, doc, keys)
        kept = [a[:, :, max(0, k.shape[2] - w + 1):].clone() if w else a for a in (k, v)]   # a view holds all
        seen = None if doc is None else (keys == doc[:, -1:])[:, k.shape[2] - kept[0].shape[2]:]
        return self.out(y.transpose(1, 2).flatten(2)), AttentionState(*kept, pos + x.shape[1], fits(self.config), seen)


def attend(q, k, v, window, pk=None, pv=None, doc=None, keys=None):
    """Attend from q (B, H, T, D), the last T of n positions, to k, v (B, H, n, D) and to a prefix pk, pv. A position
    sees the last `window` positions; 0: all. With doc and keys, from `numbered`, it sees itself and the positions of
    its document. With a window the work goes in pieces, linear in T."""
    T, n = q.shape[2], k.shape[2]
    w, before, ys = window or n, n - T, []
    if not before and pk is None and doc is None and w >= T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    step = max(4 * w, 256)
    for a in range(0, T, step):
        b, first = min(a + step, T), max(0, before + a - w + 1)
        i = torch.arange(before + a, before + b, device=q.device)[:, None]
        j = torch.arange(first, before + b, device=q.device)
        kv, mask = (k[:, :, first: before + b], v[:, :, first: before + b]), (j <= i) & (j > i - w)
        if doc is not None:
            mask = mask & ((doc[:, a:b, None] == keys[:, None, first: before + b]) | (i == j))[:, None]
        if pk is not None:
            kv, mask = [torch.cat(pair, 2) for pair in zip((pk, pv), kv)], F.pad(mask, (pk.shape[2], 0), value=True)
        ys.append(F.scaled_dot_product_attention(q[:, :, a:b], *kv, attn_mask=mask))
    return torch.cat(ys, 2)


# ---- memory and attention together
class WiringState(NamedTuple):
    """What a Wiring carries from call to call; None for what has not begun."""
    memory: tuple | None                  # layer.MemoryState
    attention: AttentionState | None      # in MAC: the segment in progress
    frozen: tuple                         # in MAC: what the memory recalls from in this segment
    fits: dict                            # as in layer.MemoryState

    batch = property(lambda self: self.memory.batch)


def retrieve(memory, x, frozen):
    """Return M*(q), Titans Eq 21: what `frozen` recalls for x (B, T, n_embd) without writing."""
    q = F.silu(memory.qkv(x).chunk(3, -1)[0])                 # no convolution: choice 18
    with without_autocast(x):
        y = memory.recall(unit(heads(q, memory.config.n_head)), frozen)
    return memory.finish(x, y)


class Wiring(nn.Module):
    """Attention wired with `memory`, a layer.Memory, by config.wiring (formulas: the module docstring)."""

    def __init__(self, config, memory):
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.memory = memory
        self.persistent = nn.Parameter(torch.zeros(config.persistent, config.n_embd)) if config.persistent else None
        self.y_norm = Norm(config.n_embd) if config.wiring != "mal" else None
        self.m_norm = Norm(config.n_embd)
        self.set_floor(1.0)
        self.init()

    def set_floor(self, done):
        """Set the least weight of the memory's own output (--memory-floor) for a run of which this share is done."""
        floors = [float(f) for f in self.config.memory_floor.split(",")]
        self.floor = floors[-1] if done >= 1 / 3 else floors[:2][-1] if done >= 0.1 else floors[0]

    def init(self):
        """Set the starting values that its parts have not set."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent)

    def __getstate__(self):
        """Return what deepcopy and pickle take: all but the graph that the last call has left for LM.loss."""
        return self.__dict__ | dict(undecided=[])

    def forward(self, x, state=None, mask=None, reset=None):
        """Read x (B, T, n_embd), WiringState or None -> (B, T, n_embd), WiringState. mask and reset: as in models.LM.
        Raises ValueError as `check_input`, and for a reset where p stand before a text or inside of a MAC segment."""
        x = check_input(self, x, state, mask, reset)
        if reset is not None and self.persistent is not None:
            raise ValueError("reset needs persistent=0: learned tokens stand before the first text of a row alone")
        self.undecided = []
        state = state or WiringState(None, None, (), fits(self.config))
        return getattr(self, self.config.wiring)(x, state, mask, reset)

    def remember(self, x, state, mask, reset):
        """Read x with the memory, after p at the start of a sequence -> M(p | x), state, the number of p in it."""
        n = 0
        if state.memory is None and self.persistent is not None:
            n, mask = len(self.persistent), mask if mask is None else F.pad(mask, (len(self.persistent), 0), value=True)
            x = torch.cat([self.persistent.to(x.dtype).expand(len(x), -1, -1), x], 1)
        m, memory_state = self.memory(x, state.memory, mask, reset)
        return m, state._replace(memory=memory_state), n

    def gated(self, y, m):
        """Return norm(y) * sigmoid(norm(m)): attention's y, gated by the memory's m (Titans Eq 25, 28; choice 13)."""
        m = self.m_norm(m)
        g = m.sigmoid()
        if self.config.polarise:                              # of each token, 0 where all g are 0 or 1; for LM.loss
            self.undecided.append((1 - (2 * g - 1).abs()).mean(-1))
        o = self.y_norm(y) * g
        return (1 - self.floor) * o + self.floor * m if self.floor else o

    def mag(self, x, state, mask, reset):
        """Let both read x, and the memory gate what attention says (Titans Eq 26 - 28)."""
        y, attention = self.attention(x, state.attention, mask, reset, self.persistent)
        m, state, n = self.remember(x, state, mask, reset)
        return self.gated(y, m[:, n:]), state._replace(attention=attention)

    def mal(self, x, state, mask, reset):
        """Let the memory read x, and attention what the memory says (Titans Eq 29 - 31)."""
        m, state, n = self.remember(x, state, mask, reset)
        mask = mask if mask is None else F.pad(mask, (n, 0), value=True)
        y, attention = self.attention(self.m_norm(m), state.attention, mask, reset)
        return y[:, n:], state._replace(attention=attention)

    def mac(self, x, state, *marks):
        """Go segment by segment: read the memory as it was, attend, write what attention says (Titans Eq 21 - 25)."""
        outs = []
        while x.shape[1]:
            room = self.config.attn_window - (state.attention.pos if state.attention else 0)
            o, state = self.segment(x[:, :room], state, *(a if a is None else a[:, :room] for a in marks))
            outs.append(o)
            if x.shape[1] >= room:
                state = state._replace(attention=None, frozen=())
            x, marks = x[:, room:], [a if a is None else a[:, room:] for a in marks]
        return torch.cat(outs, 1), state

    def segment(self, x, state, mask, reset):
        """Run a segment or a part of it: token i sees p, and h_j, x_j of its segment with j <= i (choice 18)."""
        a, T, pos = self.attention, x.shape[1], state.attention.pos if state.attention else 0
        inner = state.memory or self.memory.start(x)
        if reset is not None and reset[:, 0 if pos else 1:].any():
            raise ValueError("a reset stands inside of a segment of MAC; put it where one begins")
        frozen = state.frozen or self.memory.frozen(inner, reset if reset is None else reset[:, 0])
        projected = [tuple(a.project(h)) for h in (retrieve(self.memory, x, frozen), x)]        # Titans Eq 21
        q, *ks = rope(pos, a.q_norm(projected[-1][0]), *(a.k_norm(k) for _, k, _ in projected))  # q: of x alone
        ks = torch.stack(ks, 2)                                                                  # (B, H, 2, T, D)
        vs = torch.stack([v for _, _, v in projected], 2)
        doc, keys = numbered(x, mask, reset, *((old.seen, old.k.shape[3]) if (old := state.attention) else (None, 0)))
        if old:
            ks, vs = (torch.cat([b.to(a.dtype), a], 3) for b, a in ((old.k, ks), (old.v, vs)))
        n, k, v = ks.shape[3], ks.flatten(2, 3), vs.flatten(2, 3)
        sees = torch.ones(T, n, dtype=torch.bool, device=x.device).tril(n - T)
        if doc is not None:
            sees = sees & ((doc[..., None] == keys[:, None]) | ~sees.tril(n - T - 1))[:, None]
        sees = torch.cat([sees, sees], -1)                    # of h and of x
        if self.persistent is not None:
            pk, pv = a.project_prefix(self.persistent, len(x))
            k, v, sees = torch.cat([pk, k], 2), torch.cat([pv, v], 2), F.pad(sees, (pk.shape[2], 0), value=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)                              # Titans Eq 22, 23
        y = a.out(y.transpose(1, 2).flatten(2))
        m, inner = self.memory(y, inner, mask, reset)                                            # Titans Eq 24
        seen = None if doc is None else keys == doc[:, -1:]
        attention = AttentionState(ks, vs, pos + T, fits(self.config), seen)
        return self.gated(y, m), WiringState(inner, attention, frozen, fits(self.config))              # Titans Eq 25


torch.serialization.add_safe_globals([AttentionState, WiringState])
