"""omega.py - how the memory learns at test time: the Omega rule, momentum and Newton-Schulz.

`paper` is the rule as printed (ATLAS 3 - 5), for one sequence and head. `omega_ref` is the rule as
this project runs it: any loss, gradients at chunk boundaries, blocks that share a Newton-Schulz, a
state to go on from. chunks.py computes the same function fast. In both W is counted from M0 if
forget is "start", and M0 is added where the memory is applied (choice 21). Symbols: memory.py.
Choices: results/choices.md.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad

import memory
from memory import at_least_float32
from muon import newton_schulz_ref


def paper(kind, M0, phi, q, k, v, keep, step, momentum, gate):
    """Run ATLAS as printed: q, k, v (T, D), keep, step, momentum (T,), gate (T, window), matrices
    M0 -> y (T, D)."""
    window, ys = gate.shape[1], []
    xq, xk = phi(q), phi(k)
    W, S = M0, [torch.zeros_like(w) for w in M0]
    for t in range(len(q)):
        i = slice(max(0, t - window + 1), t + 1)              # the window of token t

        def loss(W):                                                     # Eq 9; 1/2: choice 2
            errors = memory.apply(kind, W, xk[i], k[i]) - v[i]
            return (gate[t, -len(errors):] * 0.5 * errors.square().sum(-1)).sum()

        S = [momentum[t] * s + g for s, g in zip(S, grad(loss)(W))]                        # Eq 33
        W = [keep[t] * w - step[t] * newton_schulz_ref(s) for w, s in zip(W, S)]           # Eq 32
        ys.append(memory.apply(kind, W, xq[t], q[t]))                   # read after write: choice 3
    return torch.stack(ys)


class Rule(NamedTuple):
    """What is learned and how: MIRAS' memory, loss and algorithm (keep is its retention)."""
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64                       # tokens between two boundaries; 1: token by token, Eq 15
    muon_every: int = 0                   # tokens of a block, which share a Newton-Schulz; 0: none
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    forget: str = "zero"                  # W decays to zero as printed, or "start": M0 (choice 21)
    norm: bool = False                    # divide the last output of a deep memory by its RMS
    ball: float = 0.0                     # largest norm of a matrix of W at a boundary; 0: no bound
    error: str = "chunk"                  # where an error is measured: at the boundary, Eq 16; or
                                          # with "token" by the last matrix after the token before
                                          # (Eq 15) and the others at the boundary (choice 24)

    @property
    def solves(self):
        """Whether chunks.py solves for errors, which it can with the l2 loss and without norm. The
        dot loss needs no solve: its error is -v."""
        return self.error == "token" and self.loss != "dot"

    def bound(self, W):
        """Return W, each matrix scaled back to the norm `ball`. The outer gradient takes the scale
        for a constant (choice 22)."""
        if not self.ball:
            return W
        norms = [torch.linalg.matrix_norm(w.detach(), keepdim=True) for w in W]
        return [w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms)]


class Gates(NamedTuple):
    """The numbers that the outer network gives the rule at each token."""
    keep: torch.Tensor                    # (B, H, T) in [0, 1]
    step: torch.Tensor                    # (B, H, T)
    momentum: torch.Tensor | None         # (B, H, T) in [0, 1); None: no momentum
    gate: torch.Tensor                    # (B, H, T, window); [..., -1] weighs the token itself
    reset: torch.Tensor | None = None     # (B, H, T) bool, True only at a chunk's first token, with
                                          # forget = "start": W - M0 and S become 0 before it. The
                                          # caller sets gates of older pairs to 0


class State(NamedTuple):
    """What the rule carries on: the memory at the last boundary and the tokens since. Its size does
    not grow with the text."""
    M0: tuple                             # matrices (H, in, out); () with forget = "zero"
    W: tuple                              # W - M0 (without M0: W), matrices (B, H, in, out)
    S: tuple                              # likewise; () without momentum
    k: torch.Tensor                       # (B, H, past + pos, D): keys since the boundary, and up
                                          # to window - 1 before it
    v: torch.Tensor                       # their values
    gates: Gates                          # of the tokens since the boundary; reset is None, for it
                                          # has been applied

    @property
    def pos(self):
        """Tokens since the boundary."""
        return self.gates.keep.shape[2]


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token: W = M0, S = 0 (choice 10). M0: (H, in, out) each."""
    # clone: AdamW steps in place
    W = tuple(at_least_float32(w).expand(batch, *w.shape).clone() for w in M0)
    zeros = tuple(torch.zeros_like(w) for w in W)
    S = zeros if momentum else ()
    no_pairs = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    none = no_pairs[..., 0]
    gate = none.new_zeros(*none.shape, rule.window)
    gates = Gates(none, none, none if momentum else None, gate)
    if rule.forget == "start":
        return State(tuple(M0), zeros, S, no_pairs, no_pairs, gates)
    return State((), W, S, no_pairs, no_pairs, gates)


def join(state, k, v, gates):
    """Return keys and values of the state and of new tokens in a row, the gates likewise."""
    def append(old, new):
        return torch.cat([old, new], 2) if new is not None and old.shape[2] else new

    reset = gates.reset if gates.reset is None else F.pad(gates.reset, (state.pos, 0))
    joined = Gates(*map(append, state.gates[:4], gates[:4]), reset)
    return append(state.k, k), append(state.v, v), joined


def since(rule, state, W, S, k, v, gates):
    """Return the state after the tokens that `join` put in a row; W and S: at the last boundary."""
    def tail(a, n):                                           # a view would keep all of a alive
        return a if a is None else a[:, :, max(0, a.shape[2] - n):].clone()

    pos = gates.keep.shape[2] % rule.chunk
    pairs = pos + rule.window - 1
    k, v = tail(k, pairs), tail(v, pairs)
    gates = Gates(*(tail(a, pos) for a in gates[:4]))
    return state._replace(W=tuple(W), S=tuple(S), k=k, v=v, gates=gates)


def plus(M0, W):
    """Return the memory itself, M0 + W, or W where it is not counted from M0 (choice 21)."""
    return [m + w for m, w in zip(M0, W)] if M0 else list(W)


def nearest(O, U):
    """Return O, each matrix scaled so that it comes nearest to U (choice 24)."""
    OU = (O * U).sum((-2, -1), keepdim=True)
    OO = (O * O).sum((-2, -1), keepdim=True)
    return O * (OU / OO.clamp_min(torch.finfo(O.dtype).tiny))


def update(rule, U, due):
    """Return what is subtracted from a matrix of W at a block's end; U: its steps' sum (Eq 32)."""
    if not rule.muon_every:
        return U                                                                         # Eq 10, 12
    O = newton_schulz_ref(U, rule.ns_steps, rule.ns_coefficients)
    return nearest(O, U) if rule.solves else due * O


def omega_ref(rule, phi, q, k, v, gates, state):
    """Run the rule token by token from the last boundary on (slow), with gradients by autograd.

    It is `paper` for all sequences and heads at once. Three things are new. Chunk: gradients are
    taken at the memory before it, the anchor (Eq 16). Block: the steps of muon_every tokens wait in
    U until one Newton-Schulz writes them, and until then queries read W - U (choice 15); without
    Newton-Schulz a chunk is a block. error = "token": a pair's error is measured with the last
    matrix of now, and its gradients are divided by |x|^2, x being what enters that matrix (choice
    24). With muon_every = chunk = 1 and the other defaults of Rule it is `paper`. An unfinished
    chunk is computed again.
    q, k, v (B, H, T >= 1, D), gates, state -> y (B, H, T, D), state."""
    ks, vs, gates = join(state, k, v, gates)
    T, pos = gates.keep.shape[2], state.pos
    past = ks.shape[2] - T
    block = rule.muon_every or rule.chunk
    xs, xq, ys = phi(ks), phi(q), []
    W, S = state.W, state.S or [torch.zeros_like(w) for w in state.W]

    def M(W, x, r):
        return memory.apply(rule.memory, plus(state.M0, W), x, r, rule.norm)

    for t in range(T):
        keep, step, momentum, gate, reset = (a if a is None else a[:, :, t, None] for a in gates)
        keep, step = keep[..., None], step[..., None]         # (B, H, 1, 1)
        momentum = 0 if momentum is None else momentum[..., None]
        if t % rule.chunk == 0:                               # a boundary
            if reset is not None:
                W, S = ([a.where(~reset[..., None], 0) for a in m] for m in (W, S))
            anchor, boundary = W, (W, S)
        if t % rule.chunk % block == 0:                       # blocks count from the chunk's start
            U, due = [torch.zeros_like(w) for w in W], 0
        i = slice(max(0, past + t - rule.window + 1), past + t + 1)      # across chunks: choice 12
        x, r, target = xs[:, :, i], ks[:, :, i], vs[:, :, i]
        weight = gate[:, :, 0, rule.window - x.shape[2]:]
        if rule.solves:
            measured = [*anchor[:-1], W[-1] - U[-1]]
            errors = memory.error(rule.loss, M(measured, x, r), target)
            weight = weight / memory.size(rule.memory, plus(state.M0, anchor), x)

        def loss(W):
            y = M(W, x, r)
            pairs = (y * errors).sum(-1) if rule.solves else memory.loss(rule.loss, y, target)
            return (weight * pairs).sum()

        g = grad(loss)(anchor)                                                     # Eq 9, 16
        S = [momentum * s + d for s, d in zip(S, g)]                                     # Eq 33
        U, due = [keep * u + step * s for u, s in zip(U, S)], keep * due + step
        W = [keep * w for w in W]
        if (t + 1) % rule.chunk % block == 0:                 # the end of a block
            W = [w - update(rule, u, due) for w, u in zip(W, U)]                          # Eq 32
            U = [torch.zeros_like(u) for u in U]
        if t >= pos:                                          # read after write: choice 3
            now = [w - u for w, u in zip(W, U)]
            new = slice(t - pos, t - pos + 1)
            ys.append(M(now, xq[:, :, new], q[:, :, new]))
        if (t + 1) % rule.chunk == 0:
            boundary = W, S = rule.bound(W), S
    W, S = boundary
    return torch.cat(ys, 2), since(rule, state, W, S if state.S else (), ks, vs, gates)
