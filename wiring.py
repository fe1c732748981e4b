"""wiring.py - attention, and Titans' three ways to combine it with a memory (arXiv 2501.00663v1).

    mag   y = SWA*(p | x),  o = norm(y) * sigmoid(norm(M(p | x)))              Titans Eq 26 - 28
    mal   o = SWA(norm(M(p | x)))                                              Titans Eq 29 - 31
    mac   h = M*(x),  y = Attn(p | h | x),  o = norm(y) * sigmoid(norm(M(y)))  Titans Eq 21 - 25

p are learned tokens before every sequence (persistent tokens), and | joins two sequences. M(..) is
the memory layer, which learns while it reads. M*(..) does not learn. It reads the memory as it was
at the start of the segment; MAC cuts a text into segments of attn_window tokens. SWA is attention
in a sliding window. In SWA* every token also sees all of p. sigmoid(norm(M(..))) is called the
attention gate.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from layer import Norm, check_input, fits, heads, number
from memory import unit, without_autocast

WIRINGS = ("lmm", "mag", "mal", "mac")                        # lmm: the memory alone


# ---- attention
class AttentionState(NamedTuple):
    """What Attention carries from call to call; in MAC only within a segment."""
    k: torch.Tensor                       # (B, H, n, D), the keys that later tokens may see: below
                                          # attn_window of them, or all if it is 0; in MAC those of
                                          # h_1, x_1, h_2, x_2, .. of the segment
    v: torch.Tensor                       # likewise
    pos: int                              # number of positions so far
    fits: dict                            # as in layer.MemoryState
    docs: torch.Tensor | None = None      # (B, n), from layer.number; None: no marks


def rope(pos, *xs, each=1):
    """Return a list of all x (B, H, T, D), with pairs of coordinates rotated by position (RoPE, Su
    et al. 2021). All x have one shape and begin at position `pos`. Each position has `each`
    tokens."""
    x = xs[0]
    device = x.device
    half = x.shape[-1] // 2
    exact = torch.float32 if device.type == "mps" else torch.float64         # for long streams
    freq = 10000.0 ** (-torch.arange(half, device=device, dtype=exact) / half)
    at = pos + torch.arange(x.shape[2], device=device, dtype=exact) // each
    turns = at[:, None] * (freq / (2 * math.pi))
    angle = 2 * math.pi * turns.frac()                        # of the last turn alone
    angle = angle.to(torch.promote_types(x.dtype, torch.float32))
    cos = angle.cos()
    sin = angle.sin()

    rotated = []
    for x in xs:
        a, b = x[..., :half], x[..., half:]
        rotated.append(torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype))
    return rotated


def attend(q, k, v, window, prefix=None, docs=None):
    """Return what q (B, H, T, D), the last T of n positions, reads from k, v (B, H, n, D), in the
    shape of q. A position sees itself and the window - 1 positions before it, or all before it if
    window is 0. Of them it sees only those of its document, by docs (B, n) from layer.number. All
    positions see the prefix, a pair (k, v). Queries are cut into pieces that look only at the keys
    they see, so that with a window the work is linear in T."""
    T, n = q.shape[2], k.shape[2]
    window = window or n
    old = n - T
    if not old and prefix is None and docs is None and window >= n:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    piece = max(4 * window, 256)
    ys = []
    for begin in range(old, n, piece):
        end = min(begin + piece, n)
        first = max(0, begin - window + 1)                    # the first key that the piece sees
        i = torch.arange(begin, end, device=q.device)[:, None]
        j = torch.arange(first, end, device=q.device)
        sees = (j <= i) & (j > i - window)
        if docs is not None:
            same = docs[:, begin:end, None] == docs[:, None, first:end]
            sees = sees & same[:, None]                       # (B, 1, ..), for all heads
        keys, values = k[:, :, first:end], v[:, :, first:end]
        if prefix is not None:
            keys = torch.cat([prefix[0], keys], 2)
            values = torch.cat([prefix[1], values], 2)
            sees = F.pad(sees, (prefix[0].shape[2], 0), value=True)
        asks = q[:, :, begin - old:end - old]
        y = F.scaled_dot_product_attention(asks, keys, values, attn_mask=sees)
        ys.append(y)
    return torch.cat(ys, 2)


class Attention(nn.Module):
    """Causal softmax attention, full or in a sliding window that includes the token itself, with
    normalised queries and keys, and with RoPE unless config.rope is False. In MAC there is no
    window. There the tokens come in pairs (h_i, x_i) that share a position, and only x_i has an
    output."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        mac = config.wiring == "mac"
        self.window = 0 if mac else config.attn_window
        self.each = 2 if mac else 1
        inner = config.n_head * config.head_dim
        self.qkv = nn.Linear(config.n_embd, 3 * inner, bias=False)
        self.q_norm = Norm(config.head_dim)
        self.k_norm = Norm(config.head_dim)
        self.out = nn.Linear(inner, config.n_embd, bias=False)

    def project(self, x):
        """Return q, k, v (B, H, T, D) of x (B, T, n_embd), normalised and not yet rotated."""
        q, k, v = (heads(a, self.config.n_head) for a in self.qkv(x).chunk(3, -1))
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x, state=None, mask=None, reset=None, prefix=None):
        """Read x (B, T, n_embd), AttentionState or None -> (B, T, n_embd), AttentionState. In MAC
        there are half as many outputs. mask and reset: as in models.LM. prefix (P, n_embd): tokens
        without a position that all tokens see."""
        x = check_input(self, x, state, mask, reset)
        q, k, v = self.project(x)
        if state is None:
            state = AttentionState(k[:, :, :0], v[:, :, :0], 0, fits(self.config))
        if prefix is not None:
            _, *prefix = (a.expand(len(x), -1, -1, -1) for a in self.project(prefix[None]))
        if self.config.rope:
            q, k = rope(state.pos, q, k, each=self.each)                     # choice 17

        k = torch.cat([state.k.to(k.dtype), k], 2)
        v = torch.cat([state.v.to(v.dtype), v], 2)
        docs = number(x, mask, reset, state.docs, state.k.shape[2])
        y = attend(q, k, v, self.window, prefix, docs)
        y = y[:, :, self.each - 1::self.each]                 # in MAC those of x_1, x_2, ..
        pos = state.pos + y.shape[2]
        y = self.out(y.transpose(1, 2).flatten(2))

        if self.window:                                       # drop what no later token sees
            first = max(0, k.shape[2] - self.window + 1)
            k = k[:, :, first:].clone()                       # a view would keep all of k alive
            v = v[:, :, first:].clone()
            if docs is not None:
                docs = docs[:, first:].clone()
        return y, AttentionState(k, v, pos, fits(self.config), docs)


# ---- memory and attention together
class WiringState(NamedTuple):
    """What a Wiring carries from call to call. Before the first token, memory and attention are
    None."""
    memory: tuple | None                  # layer.MemoryState
    attention: AttentionState | None      # in MAC: of the segment in progress, None between two
    frozen: tuple                         # in MAC: the memory that M* reads in this segment, or ()
    fits: dict                            # as in layer.MemoryState


def retrieve(memory, x, frozen):
    """Return M*(x), Titans Eq 21, of x (B, T, n_embd). memory is a layer.Memory, and frozen the
    matrices that its method of this name returned."""
    q = F.silu(memory.qkv(x).chunk(3, -1)[0])                 # no convolution: choice 18
    with without_autocast(x):
        y = memory.recall(unit(heads(q, memory.config.n_head)), frozen)
    return memory.finish(x, y)


class Wiring(nn.Module):
    """Attention combined with a layer.Memory as config.wiring says; the formulas are above."""

    def __init__(self, config, memory):
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.memory = memory
        self.persistent = None
        if config.persistent:
            self.persistent = nn.Parameter(torch.zeros(config.persistent, config.n_embd))
        self.y_norm = Norm(config.n_embd) if config.wiring != "mal" else None
        self.m_norm = Norm(config.n_embd)
        self.set_floor(1.0)
        self.init()

    def set_floor(self, done):
        """Set the least weight of the memory's own output, --memory-floor, for the share of the
        training that is done."""
        floors = [float(floor) for floor in self.config.memory_floor.split(",")]
        self.floor = floors[0]
        for begins, floor in zip((0.1, 1 / 3), floors[1:]):
            if done >= begins:
                self.floor = floor

    def init(self):
        """Set the starting values of the persistent tokens; the parts have set theirs."""
        if self.persistent is not None:
            nn.init.normal_(self.persistent)

    def __getstate__(self):
        """Return the attributes that deepcopy and pickle copy: all but `undecided`, which holds the
        autograd graph of the last call, for LM.loss."""
        return self.__dict__ | dict(undecided=[])

    def forward(self, x, state=None, mask=None, reset=None):
        """Read x (B, T, n_embd), WiringState or None -> (B, T, n_embd), WiringState. mask and
        reset: as in models.LM. Raises ValueError as `check_input` does, and for a reset if there
        are persistent tokens, or if it is inside of a MAC segment."""
        x = check_input(self, x, state, mask, reset)
        if reset is not None and self.persistent is not None:
            raise ValueError("reset needs persistent=0: only the first text of a row has learned "
                             "tokens before it")
        self.undecided = []
        state = state or WiringState(None, None, (), fits(self.config))
        read = getattr(self, self.config.wiring)              # mag, mal or mac, below
        return read(x, state, mask, reset)

    def remember(self, x, state, mask, reset):
        """Let the memory read x, or p | x at the start of a sequence. Return what it says to all
        that it has read, its state, and the mask of all that it has read."""
        if state is None and self.persistent is not None:
            x = torch.cat([self.persistent.to(x.dtype).expand(len(x), -1, -1), x], 1)
            if mask is not None:
                mask = F.pad(mask, (len(self.persistent), 0), value=True)
        m, state = self.memory(x, state, mask, reset)
        return m, state, mask

    def gated(self, y, m):
        """Return norm(y) * sigmoid(norm(m)): attention's y, gated by the memory's m (Titans Eq 25,
        28). With a floor f it is (1 - f) of that plus f norm(m) (choice 13)."""
        m = self.m_norm(m)
        g = m.sigmoid()
        if self.config.polarise:                              # per token; 0 if all g are 0 or 1
            self.undecided.append((1 - (2 * g - 1).abs()).mean(-1))
        o = self.y_norm(y) * g
        if self.floor:
            o = (1 - self.floor) * o + self.floor * m
        return o

    def mag(self, x, state, mask, reset):
        """Let both read x, and let the memory gate attention's output (Titans Eq 26 - 28)."""
        y, attention = self.attention(x, state.attention, mask, reset, self.persistent)
        m, memory, _ = self.remember(x, state.memory, mask, reset)
        state = state._replace(memory=memory, attention=attention)
        return self.gated(y, m[:, -x.shape[1]:]), state

    def mal(self, x, state, mask, reset):
        """Let the memory read x, and attention read the memory's output (Titans Eq 29 - 31)."""
        m, memory, mask = self.remember(x, state.memory, mask, reset)
        y, attention = self.attention(self.m_norm(m), state.attention, mask, reset)
        return y[:, -x.shape[1]:], state._replace(memory=memory, attention=attention)

    def mac(self, x, state, mask, reset):
        """Go segment by segment (Titans Eq 21 - 25)."""
        outs = []
        begin = 0
        while begin < x.shape[1]:
            done = state.attention.pos if state.attention else 0             # of this segment
            end = begin + self.config.attn_window - done
            part = [a if a is None else a[:, begin:end] for a in (x, mask, reset)]
            o, state = self.segment(state, *part)
            outs.append(o)
            begin = end
            if state.attention.pos == self.config.attn_window:
                state = state._replace(attention=None, frozen=())
        return torch.cat(outs, 1), state

    def segment(self, state, x, mask, reset):
        """Run a segment, or the next part of it: read the memory as it was, attend, and write what
        attention says. Token i sees p and the h_j, x_j of its segment with j <= i (choice 18)."""
        first = None
        if reset is not None:
            first = reset[:, 0]
            # only the first token of a segment may begin a text
            if reset[:, 0 if state.attention else 1:].any():
                raise ValueError("a reset is inside of a MAC segment; put it where one begins")
        memory = state.memory or self.memory.start(x)
        frozen = state.frozen or self.memory.frozen(memory, first)
        h = retrieve(self.memory, x, frozen)                                 # Titans Eq 21

        both = torch.stack([h.to(x.dtype), x], 2).flatten(1, 2)              # h_1, x_1, h_2, ..
        both_mask = None if mask is None else mask.repeat_interleave(2, 1)
        y, attention = self.attention(both, state.attention, both_mask, None, self.persistent)
        m, memory = self.memory(y, memory, mask, reset)                      # Titans Eq 24
        state = WiringState(memory, attention, frozen, fits(self.config))
        return self.gated(y, m), state                                       # Titans Eq 25


torch.serialization.add_safe_globals([AttentionState, WiringState])
