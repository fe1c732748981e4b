"""omega.py - how the memory learns at test time: the Omega rule with decay, momentum and Newton-Schulz (ATLAS 3 - 5).

`paper` is the rule as printed, for one sequence and head. `omega_ref` is the rule as this project runs it: any loss,
gradients at chunk boundaries, blocks that share a Newton-Schulz, a state to go on from. chunks.py computes the same
function fast. With forget = "start" W is counted from M0 in all of this, and M0 is added where the memory is applied
(choice 21). Symbols: memory.py. Choices: results/choices.md.
"""
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import memory
from memory import at_least_float32
from muon import newton_schulz_ref


def paper(kind, M0, phi, q, k, v, keep, step, momentum, gate):
    """Run ATLAS as printed: q, k, v (T, D), keep, step, momentum (T,), gate (T, window), matrices M0 -> y (T, D)."""
    window, xq, xk, ys = gate.shape[1], phi(q), phi(k), []
    W, S = M0, [torch.zeros_like(w) for w in M0]
    for t in range(len(q)):
        i = slice(max(0, t - window + 1), t + 1)              # the window of token t

        def loss(W):                                                                       # Eq 9; 1/2: choice 2
            errors = memory.apply(kind, W, xk[i], k[i]) - v[i]
            return (gate[t, -len(errors):] * 0.5 * errors.square().sum(-1)).sum()
        S = [momentum[t] * s + g for s, g in zip(S, grad(loss)(W))]                        # Eq 33
        W = [keep[t] * w - step[t] * newton_schulz_ref(s) for w, s in zip(W, S)]           # Eq 32; signs: choice 5
        ys.append(memory.apply(kind, W, xq[t], q[t]))                                      # read after write: choice 3
    return torch.stack(ys)


class Rule(NamedTuple):
    """What is learned and how: MIRAS' memory, loss and algorithm (keep is its retention)."""
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64                       # tokens between two boundaries; 1 is the sequential rule, Eq 15
    muon_every: int = 0                   # tokens of a block, which share a Newton-Schulz; 0: none; 1: the paper
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    forget: str = "zero"                  # what W decays to: zero as printed, or M0 ("start", choice 21)
    norm: bool = False                    # divide what the last matrix of a deep memory produces by its RMS
    ball: float = 0.0                     # largest norm of a matrix of W at a boundary; 0: no bound
    error: str = "chunk"                  # where a pair's error is measured: "chunk", at the boundary, Eq 16; "token",
                                          # with the last matrix after the token before, Eq 15 (choice 24)

    def bound(self, W):
        """Return W, each matrix scaled back to the norm `ball`. The outer gradient takes the scale for a constant."""
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w.detach(), dim=(-2, -1), keepdim=True) for w in W)
        return [w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms)]

    @property
    def solves(self):
        """Whether chunks.py solves for errors. The dot loss needs no solve: its error is -v."""
        return self.error == "token" and self.loss != "dot"

    def fault(self):
        """Return why chunks.py cannot run this rule with error = "token", and the remedy; "" if it can."""
        if self.error == "token" and self.loss not in ("l2", "dot"):
            return f"error token needs loss l2 or dot, not {self.loss}; or give error chunk"
        if self.error == "token" and self.norm and self.memory != "linear":
            return "error token needs loss l2 for a deep memory; or give error chunk"
        if self.error == "token" and 0 < self.muon_every < self.chunk:
            return f"error token needs a muon_every of chunk, {self.chunk}, not {self.muon_every}; or give error chunk"
        return ""


class Gates(NamedTuple):
    """The numbers that the outer network gives the rule at each token."""
    keep: torch.Tensor                    # (B, H, T) in [0, 1]
    step: torch.Tensor                    # (B, H, T)
    momentum: torch.Tensor | None         # (B, H, T) in [0, 1); None: no momentum
    gate: torch.Tensor                    # (B, H, T, window); [..., -1] weighs the token itself
    reset: torch.Tensor | None = None     # (B, H, T) bool, True only at first tokens of chunks, with forget = "start":
                                          # before it W - M0 and S become 0. Gates of older pairs are to be 0


class State(NamedTuple):
    """What the rule carries on: the memory at the last chunk boundary and the tokens since. Bounded, but for `exp`."""
    M0: tuple                             # matrices (H, in, out); () with forget = "zero"
    W: tuple                              # W - M0 (without M0: W), matrices (B, H, in, out)
    S: tuple                              # likewise; () without momentum
    k: torch.Tensor                       # (B, H, past + pos, D): keys since the boundary, and up to window - 1 before
    v: torch.Tensor                       # their values
    gates: Gates                          # of the tokens since the boundary; reset is None, for it has been applied
    keys: torch.Tensor | None             # (B, H, t, D) all keys so far; only with `exp` features

    @property
    def pos(self):
        """Tokens since the boundary."""
        return self.gates.keep.shape[2]


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token: W = M0, S = 0 (choice 10). M0: matrices (H, in, out), of any type."""
    raised, base = [at_least_float32(w) for w in M0], tuple(M0) if rule.forget == "start" else ()
    zeros = tuple(w.new_zeros(batch, *w.shape) for w in raised)
    W = zeros if base else tuple(w.expand(batch, *w.shape).clone() for w in raised)  # clone: AdamW steps in place
    empty = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    none = empty[..., 0]
    gates = Gates(none, none, none if momentum else None, none.new_zeros(*none.shape, rule.window))
    return State(base, W, zeros if momentum else (), empty, empty, gates, empty if phi.kind == "exp" else None)


def join(state, k, v, gates):
    """Return the keys and values of the state and those of new tokens in a row, and the gates likewise."""
    append = lambda old, new: torch.cat([old, new], 2) if new is not None and old.shape[2] else new
    reset = gates.reset if gates.reset is None else F.pad(gates.reset, (state.pos, 0))
    return append(state.k, k), append(state.v, v), Gates(*map(append, state.gates[:4], gates[:4]), reset)


def since(rule, state, W, S, ks, vs, gates):
    """Return the state after the tokens that `join` has put in a row; W and S: at the last boundary among them."""
    pos = gates.keep.shape[2] % rule.chunk
    last = lambda a, n: a if a is None else a[:, :, max(0, a.shape[2] - n):].clone()      # a view would keep all of it
    k, v = (last(a, pos + rule.window - 1) for a in (ks, vs))
    return state._replace(W=tuple(W), S=tuple(S), k=k, v=v, gates=Gates(*(last(a, pos) for a in gates[:4])))


def nearest(O, U):
    """Return O, each matrix scaled so that it comes nearest to U."""
    dot = lambda a, b: (a * b).sum((-2, -1), keepdim=True)
    return O * (dot(O, U) / dot(O, O).clamp_min(torch.finfo(O.dtype).tiny))


def omega_ref(rule, phi, q, k, v, gates, state):
    """Run the rule token by token from the last boundary on (slow), with gradients of the printed loss by autograd.

        at the first token of a block   U, due = 0
        g = sum over the pairs i of the window of gate[t, i] grad l(M(phi(k_i)), v_i)     at W of the boundary: Eq 9, 16
        S = momentum_t S + g                                                              Eq 33
        U = keep_t U + step_t S,   due = keep_t due + step_t                              the steps of the block wait
        W = keep_t W,   and at the last token of a block   W = W - due NS(U),  U = 0      Eq 32, 40 (choice 15)
        y_t = M(phi(q_t); W - U)                                                          read after write
    Without Newton-Schulz a chunk is one block, whose update is U itself: Eq 10, 12. error = "token" takes dl/dy with
    the last matrix of the token before, divides by |x|^2 of its input x, and gives NS(U) another length: choice 24.
    muon_every = chunk = 1 is `paper`. q, k, v (B, H, T >= 1, D), gates, state -> y (B, H, T, D), state. Raises
    ValueError for `exp` features."""
    pos, past, (ks, vs, gates) = state.pos, state.k.shape[2] - state.pos, join(state, k, v, gates)

    def one(M0, W, S, xq, q, xs, ks, vs, gates):
        """Run one sequence and head: phi(q) (T, E), q (T, D); phi(k), k, v (past + pos + T, ..)."""
        (keep, step, momentum, gate, reset), ys, block = gates, [], rule.muon_every or rule.chunk
        zeros, error = lambda matrices: tuple(map(torch.zeros_like, matrices)), partial(memory.error, rule.loss)
        NS = lambda U: newton_schulz_ref(U, rule.ns_steps, rule.ns_coefficients)
        update = lambda U, due: nearest(NS(U), U) if rule.solves else due * NS(U)
        with_M0 = lambda W: [a + b for a, b in zip(M0, W)] if M0 else W
        M = lambda W, x, r: memory.apply(rule.memory, with_M0(W), x, r, rule.norm)

        def loss(W, pairs, weights):
            return sum(w * memory.loss(rule.loss, M(W, xs[i], ks[i]), vs[i]) for i, w in zip(pairs, weights))

        def push(W, pairs, weights, errors):                  # has the loss' gradient with dl/dy fixed to `errors`
            return sum(w * (M(W, xs[i], ks[i]) * e).sum() for i, w, e in zip(pairs, weights, errors))

        for t in range(len(keep)):
            if t % rule.chunk == 0:                           # a boundary
                W, S = (tuple(a.where(~reset[t], 0) for a in m) if len(reset) else m for m in (W, S))
                anchor, boundary = W, (W, S)
            if t % rule.chunk % block == 0:
                U, due = zeros(W), 0.0
            pairs = range(max(0, past + t - rule.window + 1), past + t + 1)      # choice 12: windows cross chunks
            weights = gate[t, rule.window - len(pairs):]
            if rule.solves:                                   # choice 24: with the last matrix of now
                now = *anchor[:-1], W[-1] - U[-1]
                weights = weights / memory.size(rule.memory, with_M0(anchor), xs[list(pairs)])
                g = grad(push)(anchor, pairs, weights, [error(M(now, xs[i], ks[i]), vs[i]) for i in pairs])
            else:
                g = grad(loss)(anchor, pairs, weights)                                           # Eq 9, 16
            S = tuple(momentum[t] * s + d for s, d in zip(S, g)) if len(momentum) else g         # Eq 33
            U, due = tuple(keep[t] * u + step[t] * s for u, s in zip(U, S)), keep[t] * due + step[t]
            W = tuple(keep[t] * w for w in W)
            if (t + 1) % rule.chunk % block == 0:
                O = (update(u, due) if rule.muon_every else u for u in U)                        # Eq 32; Eq 10, 12
                W, U = tuple(w - o for w, o in zip(W, O)), zeros(U)
            if t >= pos:
                ys.append(M(tuple(w - u for w, u in zip(W, U)), xq[t - pos], q[t - pos]))        # choice 3
            if (t + 1) % rule.chunk == 0:                     # y has been read without the bound
                boundary = W, S = tuple(rule.bound(W)), S                                        # choice 22
        return torch.stack(ys), boundary[0], boundary[1] if len(momentum) else ()

    given = tuple(() if g is None else g for g in gates)      # vmap takes no None
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    y, W, S = vmap(vmap(one))(M0, state.W, state.S, phi(q), q, phi(ks), ks, vs, given)
    return y, since(rule, state, W, S, ks, vs, gates)
