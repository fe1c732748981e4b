"""omega.py - how the memory learns at test time: the Omega rule, momentum and Newton-Schulz.

`paper` is the rule as printed (ATLAS 3 - 5), for one sequence and head. `omega_ref` is the rule as
this project runs it, for all sequences and heads at once. It goes on from a state, and has more to
choose from (class Rule):

    chunk              All gradients of a chunk are taken at the memory before it, the anchor (Eq
                       16). The places where chunks begin are called boundaries.
    muon = "chunk"     One Newton-Schulz, at the end of a chunk, takes the sum U of all its steps.
                       Until then queries read plain steps (choice 15).
    error = "token"    A pair's error is measured at the token before, with the last matrix as it is
                       then. Its gradient is divided by |x|^2 (at least 0.5), where x is what
                       enters that matrix (choice 24).

`omega_ref` is `paper` if muon = "token", chunk = 1, and all other fields of Rule but window have
their defaults. chunks.py computes the same function fast.

With forget = "start", what `omega_ref` and chunks.py call W is the difference W - M0, so that
keep * W decays toward M0; `plus` adds M0 where the memory is applied (choice 21). memory.py lists
the symbols, and results/choices.md the choices. phi is a feature map of poly.py.
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
            errors = memory.apply(kind, W, xk[i], k[i]) - v[i]           # fewer at the beginning
            return (gate[t, -len(errors):] * 0.5 * errors.square().sum(-1)).sum()

        S = [momentum[t] * s + g for s, g in zip(S, grad(loss)(W))]                        # Eq 33
        W = [keep[t] * w - step[t] * newton_schulz_ref(s) for w, s in zip(W, S)]           # Eq 32
        ys.append(memory.apply(kind, W, xq[t], q[t]))                   # read after write: choice 3
    return torch.stack(ys)


class Rule(NamedTuple):
    """What is learned, and how. These are three of MIRAS' four choices: memory, attentional bias
    (the loss) and algorithm. The fourth, retention, is keep."""
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64                       # tokens whose gradients are taken at one memory (Eq 16);
                                          # 1: at the memory before each token (Eq 15)
    muon: str = "none"                    # Newton-Schulz: "none", at each "token" (Eq 32, 40), or
                                          # at the end of a "chunk" (choice 15)
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    forget: str = "zero"                  # W decays to zero as printed, or "start": M0 (choice 21)
    norm: bool = False                    # divide the last output of a deep memory by its RMS
    ball: float = 0.0                     # largest norm of a matrix of W at a boundary; 0: no bound
    error: str = "chunk"                  # "chunk": errors are those of the boundary's memory (Eq
                                          # 16). "token": the last matrix is that of the token
                                          # before (Eq 15), the others the boundary's; window 1, no
                                          # Newton-Schulz (choice 24)

    @property
    def solves(self):
        """Return whether chunks.py solves a system for the errors. It can for the l2 loss. The dot
        loss has the error -v at any memory."""
        return self.error == "token" and self.loss != "dot"

    def bound(self, W):
        """Return W, with each matrix whose norm is above `ball` scaled back to it. The outer
        gradient takes the scale for a constant (choice 22)."""
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
    reset: torch.Tensor | None = None     # (B, H, T) bool: where it is True, W - M0 and S become 0
                                          # before the token. It needs forget = "start" and the
                                          # first token of a chunk. The caller closes the gates that
                                          # look at pairs before it


class State(NamedTuple):
    """What the rule carries on: the memory at the last boundary and the tokens since. Its size does
    not grow with the text."""
    M0: tuple                             # matrices (H, in, out); () with forget = "zero"
    W: tuple                              # matrices (B, H, in, out): W - M0, or W if M0 is ()
    S: tuple                              # likewise; () without momentum
    k: torch.Tensor                       # (B, H, past + pos, D): the pos keys since the boundary,
                                          # after the last `past` <= window - 1 keys before it
    v: torch.Tensor                       # their values
    gates: Gates                          # of the tokens since the boundary. reset is None, because
                                          # W and S have been reset

    @property
    def pos(self):
        """Return the number of tokens since the boundary."""
        return self.gates.keep.shape[2]


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token: W = M0, S = 0 (choice 10). M0: (H, in, out) each."""
    # a copy, because AdamW changes M0 in place
    W = tuple(at_least_float32(w).expand(batch, *w.shape).clone() for w in M0)
    zeros = tuple(torch.zeros_like(w) for w in W)
    S = zeros if momentum else ()

    no_pairs = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)              # (B, H, 0, D)
    none = no_pairs[..., 0]                                                  # (B, H, 0)
    gate = none.new_zeros(*none.shape, rule.window)
    gates = Gates(none, none, none if momentum else None, gate)
    if rule.forget == "start":
        return State(tuple(M0), zeros, S, no_pairs, no_pairs, gates)
    return State((), W, S, no_pairs, no_pairs, gates)


def join(state, k, v, gates):
    """Return keys, values and gates of the state's tokens and of new tokens, joined along T."""
    def append(old, new):
        return torch.cat([old, new], 2) if new is not None and old.shape[2] else new

    reset = gates.reset if gates.reset is None else F.pad(gates.reset, (state.pos, 0))
    joined = Gates(*map(append, state.gates[:4], gates[:4]), reset)
    return append(state.k, k), append(state.v, v), joined


def since(rule, state, W, S, k, v, gates):
    """Return the state after the tokens that `join` returned. W and S are those of the last
    boundary."""
    def tail(a, n):                                           # a view would keep all of a in memory
        return a if a is None else a[:, :, max(0, a.shape[2] - n):].clone()

    pos = gates.keep.shape[2] % rule.chunk
    pairs = pos + rule.window - 1
    k, v = tail(k, pairs), tail(v, pairs)
    gates = Gates(*(tail(a, pos) for a in gates[:4]))
    return state._replace(W=tuple(W), S=tuple(S), k=k, v=v, gates=gates)


def plus(M0, W):
    """Return the memory itself: M0 + W, or W if there is no M0 (choice 21)."""
    return [m + w for m, w in zip(M0, W)] if M0 else list(W)


def omega_ref(rule, phi, q, k, v, gates, state):
    """Run the rule token by token, with gradients by autograd: slow. It begins at the last
    boundary, so it computes the tokens of an unfinished chunk again.
    q, k, v (B, H, T >= 1, D), gates, state -> y (B, H, T, D), state."""
    ks, vs, gates = join(state, k, v, gates)
    T, pos = gates.keep.shape[2], state.pos                   # of T tokens the first pos are old
    past = ks.shape[2] - T                                    # pairs before the boundary
    xs, xq, ys = phi(ks), phi(q), []
    W, S = state.W, state.S or [torch.zeros_like(w) for w in state.W]

    def M(W, x, r):
        return memory.apply(rule.memory, plus(state.M0, W), x, r, rule.norm)

    def NS(S):                                                                           # Eq 40
        return [newton_schulz_ref(s, rule.ns_steps, rule.ns_coefficients) for s in S]

    for t in range(T):
        keep, step, momentum, gate, reset = (a if a is None else a[:, :, t, None] for a in gates)
        keep, step = keep[..., None], step[..., None]         # (B, H, 1, 1)
        momentum = 0 if momentum is None else momentum[..., None]

        if t % rule.chunk == 0:                               # a boundary
            if reset is not None:
                W = [w.where(~reset[..., None], 0) for w in W]
                S = [s.where(~reset[..., None], 0) for s in S]
            anchor, boundary = W, (W, S)
            # the steps so far, what they leave of the anchor, and the sum of `step` alone
            U, left, due = [torch.zeros_like(w) for w in W], 1, 0

        # the window's pairs, also those before the boundary (choice 12), and their weights
        i = slice(max(0, past + t - rule.window + 1), past + t + 1)
        x, r, target = xs[:, :, i], ks[:, :, i], vs[:, :, i]
        weight = gate[:, :, 0, rule.window - x.shape[2]:]
        if rule.solves:                                       # errors at the token
            errors = memory.error(rule.loss, M([*anchor[:-1], W[-1]], x, r), target)
            a, _ = memory.enter(rule.memory, plus(state.M0, anchor), x)
            weight = weight / a.square().sum(-1).clamp_min(0.5)

        def loss(W):
            y = M(W, x, r)
            # with errors held fixed, (y * errors).sum() has their gradient
            pairs = (y * errors).sum(-1) if rule.solves else memory.loss(rule.loss, y, target)
            return (weight * pairs).sum()

        g = grad(loss)(anchor)                                                     # Eq 9, 16
        S = [momentum * s + d for s, d in zip(S, g)]                                     # Eq 33
        O = NS(S) if rule.muon == "token" else S
        U = [keep * u + step * o for u, o in zip(U, O)]
        left, due = keep * left, keep * due + step
        if rule.muon == "chunk" and (t + 1) % rule.chunk == 0:
            U = [due * o for o in NS(U)]                                              # choice 15
        W = [left * w - u for w, u in zip(anchor, U)]                          # Eq 10, 16, 32

        if t >= pos:                                          # read after write: choice 3
            new = slice(t - pos, t - pos + 1)
            ys.append(M(W, xq[:, :, new], q[:, :, new]))
        if (t + 1) % rule.chunk == 0:
            W = rule.bound(W)
            boundary = W, S
    W, S = boundary
    return torch.cat(ys, 2), since(rule, state, W, S if state.S else (), ks, vs, gates)
