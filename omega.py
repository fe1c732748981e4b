"""omega.py - how the memory learns at test time: the Omega rule with decay, momentum and Newton-Schulz (ATLAS 3 - 5).

Every weight matrix W of the memory follows this rule (Eq 9, 16, 32, 33; README, choices 3 - 6 and 12, has open points):

    g_t = sum over i in (t - window, t] of gate[t, i] * grad_W l(M(phi(k_i)), v_i)      at the anchor
    S_t = momentum_t * S_{t-1} + g_t
    W_t = keep_t * W_{t-1} - step_t * NS(S_t)                 NS in ATLAS only; elsewhere NS(S) = S
    y_t = M(phi(q_t); W_t)                                    read after write

The anchor is W at the last chunk boundary. `omega_ref` is the definition: it runs this text token by token, with
gradients by autograd. `omega` computes the same function chunk by chunk. At a fixed anchor the gradient of pair i is
the outer product x_i^T d_i: x_i enters the matrix, and d_i is dl/d(what leaves it). So inside a chunk

    S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i                                             Eq 33, 39
    W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i                                  Eq 16

W_0 and S_0 are those before the chunk. G, P and the other coefficients depend on the gates alone: `mixing` finds them
by running the rule on coefficients. momprod_t and keepprod_t are the products of momentum and keep up to t, and u_t is
the weight of S_0 in W_t. Reading needs no W_t. Let r_t be the row that token t multiplies by W, and let R, X and D hold
the rows r_t, x_i and d_i. All tokens are read at once, by attention whose weights are P o R X^T (o: elementwise):

    r_t W_t = keepprod_t (r_t W_0) + u_t (r_t S_0) + ((P o R X^T) D)_t

With Newton-Schulz, each block of m = muon_every tokens makes one update of W, at its last token; the end of a chunk
ends a block, too. Until then plain steps wait in U, and queries read them there (choice 15; m = 1 is the paper):

    U_t = keep_t U_{t-1} + step_t S_t,   due_t = keep_t due_{t-1} + step_t          both begin at 0 in each block
    W_t = keep_t W_{t-1},   and at the last token of a block W_t = keep_t W_{t-1} - due_t NS(U_t)        Eq 32
    y_t = M(phi(q_t); W_t - U_t)                              after a block's update U_t and due_t become 0

Then r_t W_t = keepprod_t (r_t W_0) + sum_j C[t, j] (r_t O_j). O_j is NS(U) of block j, and C[t, j] is -due of block j
times the keeps since. -U_t is the W_t of the rule without Newton-Schulz, begun from 0 in each block: `pending`.

With forget = "zero" keep decays W, as printed; with "start" it decays W - M0 (choice 21). Then the code stores W - M0,
as the anchor, too, and adds M0 where W is used. Symbols: memory.py.
"""
import sys
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import memory
from memory import at_least_float32, without_autocast
from muon import newton_schulz, newton_schulz_ref
from poly import kernel_rows


class Rule(NamedTuple):
    """What is learned and how: MIRAS' memory, loss and algorithm (the gates are its retention)."""
    memory: str = "mlp"
    loss: str = "l2"
    window: int = 1
    chunk: int = 64                       # 1 is the sequential rule, Eq 15; more is Eq 16
    muon_every: int = 0                   # 0: no Newton-Schulz; 1: the paper; more: choice 15
    ns_steps: int = 5
    ns_coefficients: str = "muon"
    forget: str = "zero"                  # what keep < 1 leads back to: zero as printed, or M0 ("start")
    norm: bool = False                    # divide what the last matrix of a deep memory produces by its RMS
    ball: float = 0.0                     # largest norm of a matrix of W at a chunk boundary; 0: no bound

    def bound(self, W):
        """Return W with each matrix scaled back to the norm `ball`. The outer gradient takes the factor as constant."""
        if not self.ball:
            return W
        norms = (torch.linalg.vector_norm(w.detach(), dim=(-2, -1), keepdim=True) for w in W)
        return [w * (self.ball / n.clamp_min(self.ball)) for w, n in zip(W, norms)]


class Gates(NamedTuple):
    """The numbers that the outer network gives the rule at each token."""
    keep: torch.Tensor                    # (B, H, T) in [0, 1]
    step: torch.Tensor                    # (B, H, T)
    momentum: torch.Tensor | None         # (B, H, T) in [0, 1); None: no momentum
    gate: torch.Tensor                    # (B, H, T, window); [..., -1] weighs the token itself
    reset: torch.Tensor | None = None     # (B, H, T) bool, True only at first tokens of chunks: W - M0 and S become
                                          # 0 before it. The gates must hide the pairs before (models.masked)


class State(NamedTuple):
    """Everything that the rule carries from token t to t + 1. Its size is bounded, except with `exp` features."""
    M0: tuple                             # matrices (H, in, out); () with forget = "zero"
    W: tuple                              # W_t - M0 (`total` adds M0; without M0 W_t), matrices (B, H, in, out)
    S: tuple                              # S_t; () without momentum
    anchor: tuple                         # W at the last chunk boundary
    U: tuple                              # U_t of the block in progress; () without Newton-Schulz
    due: torch.Tensor                     # (B, H) due_t of that block
    k: torch.Tensor                       # (B, H, min(t, window - 1), D), the keys that a window looks back on
    v: torch.Tensor                       # and their values
    keys: torch.Tensor | None             # (B, H, t, D) all keys so far; only with `exp` features
    pos: int                              # tokens since the chunk boundary, t mod chunk


def start(rule, phi, M0, batch, momentum=True):
    """Return the state before the first token: W = M0, S = 0 (choice 10). M0: matrices (H, in, out), of any type."""
    raised, base = [at_least_float32(w) for w in M0], tuple(M0) if rule.forget == "start" else ()
    zeros = tuple(w.new_zeros(batch, *w.shape) for w in raised)
    W = zeros if base else tuple(w.expand(batch, *w.shape).clone() for w in raised)  # clone: AdamW steps in place
    empty = W[0].new_zeros(batch, W[0].shape[1], 0, phi.dim)
    keys, due = empty if phi.kind == "exp" else None, empty.new_zeros(empty.shape[:2])
    return State(base, W, zeros if momentum else (), W, zeros if rule.muon_every else (), due, empty, empty, keys, 0)


def total(state):
    """Return the weights that a query reads: W - U, plus M0 with forget = "start"."""
    M0 = grown(state.M0, [w.shape[-2] for w in state.W])
    W = tuple(w - u for w, u in zip(state.W, state.U)) if state.U else state.W
    return tuple(a + b for a, b in zip(M0, W)) if M0 else W


# ---- the definition
def omega_ref(rule, phi, q, k, v, gates, state):
    """Run the rule of the module docstring token by token (slow), with gradients of the printed loss by autograd.
    q, k, v (B, H, T >= 1, D), gates and state as in their classes -> y (B, H, T, D), state. Raises ValueError for
    `exp` features, for which phi(x) cannot be written out."""
    pos, n_past = state.pos, state.k.shape[2]                 # n_past pairs come from before these tokens

    def one(M0, before, xq, q, xs, ks, vs, gates):
        """Run one sequence and head: phi(q) (T, E), q (T, D); phi(k), k, v (n_past + T, ..)."""
        (W, S, anchor, U, due), (keep, step, momentum, gate, reset) = before, gates

        def window_loss(W, recent, weights):
            return sum(w * memory.loss(rule.loss, M(W, xs[i], ks[i]), vs[i]) for w, i in zip(weights, recent))

        def M(W, x, r):
            W = [a + b for a, b in zip(M0, W)] if M0 else W                      # choice 21: W is counted from M0
            return memory.apply(rule.memory, W, x, r, rule.norm)

        NS = lambda S: newton_schulz_ref(S, rule.ns_steps, rule.ns_coefficients)
        ys = []
        for t in range(len(q)):
            if len(reset):
                W, S = (tuple(a.where(~reset[t], 0) for a in these) for these in (W, S))
            if (pos + t) % rule.chunk == 0:
                anchor = W                                                       # Eq 16; Eq 15 where chunk = 1
            recent = range(max(0, n_past + t - rule.window + 1), n_past + t + 1)  # the last `window` pairs
            g = grad(window_loss)(anchor, recent, gate[t, rule.window - len(recent):])           # Eq 9
            S = tuple(momentum[t] * s + d for s, d in zip(S, g)) if len(momentum) else g         # Eq 33
            if not rule.muon_every:
                W = tuple(keep[t] * w - step[t] * s for w, s in zip(W, S))       # Eq 10, 12; choices 4, 5
            else:                                                                # choice 15
                W, due = tuple(keep[t] * w for w in W), keep[t] * due + step[t]
                U = tuple(keep[t] * u + step[t] * s for u, s in zip(U, S))
                if (pos + t + 1) % rule.chunk % rule.muon_every == 0:            # the block ends
                    W = tuple(w - due * NS(u) for w, u in zip(W, U))             # Eq 32, 40, if muon_every = 1
                    U, due = tuple(torch.zeros_like(u) for u in U), 0 * due
            current = tuple(w - u for w, u in zip(W, U)) if rule.muon_every else W               # choice 15
            ys.append(M(current, xq[t], q[t]))                                   # choice 3: read after write
            if (pos + t + 1) % rule.chunk == 0:
                W = tuple(rule.bound(W))                                         # choice 22
        return torch.stack(ys), W, S if len(momentum) else (), anchor, U, due

    gates = tuple(() if g is None else g for g in gates)      # vmap takes no None
    M0 = tuple(m.expand(len(q), *m.shape) for m in state.M0)
    ks, vs = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
    before = state.W, state.S, state.anchor, state.U, state.due
    y, W, S, anchor, U, due = vmap(vmap(one))(M0, before, phi(q), q, phi(ks), ks, vs, gates)
    pos, first = (pos + q.shape[2]) % rule.chunk, max(0, n_past + q.shape[2] - rule.window + 1)
    return y, State(state.M0, W, S, anchor if pos else W, U, due, ks[:, :, first:], vs[:, :, first:], None, pos)


# ---- what depends on the gates alone, for all chunks at once
def in_products(a):
    """Tell whether long recurrences of `a` are products: on a GPU, or compiled. A CPU runs a loop over tokens."""
    return a.device.type != "cpu" or torch.compiler.is_compiling()


def recur(decay, rows=None, times=None):
    """Return y_t = decay_t * y_{t-1} + times_t * rows_t, with y_0 = 0, and the last y: decay, times (.., c), rows, y
    (.., c, k). Without rows they are the identity, without times 1. Many columns take one product, or a loop over
    tokens, whose rows stay in a CPU's cache. Few columns take one kernel, or passes that double what is summed."""
    wide = rows is None or rows.shape[-1] > 4
    if in_products(decay) and (wide or decay.shape[-1] <= 128):       # longer, the backward would hold (c, c) numbers
        y = decays(decay) if times is None else decays(decay) * times[..., None, :]
        if rows is not None:
            y = y @ rows if wide else (y[..., None] * rows[..., None, :, :]).sum(-2)
        return y, y[..., -1:, :]
    rows = rows if times is None else times[..., None] * rows
    decay, s = decay[..., None], 1
    if wide:
        y = [rows[..., :1, :]]
        for factor, row in zip(decay.split(1, -2)[1:], rows.split(1, -2)[1:]):
            y.append(torch.addcmul(row, factor, y[-1]))
        return torch.cat(y, -2), y[-1]
    while s < rows.shape[-2]:
        more = torch.addcmul(rows[..., s:, :], decay[..., s:, :], rows[..., :-s, :])
        rows = torch.cat([rows[..., :s, :], more], -2)
        decay, s = torch.cat([decay[..., :s, :], decay[..., s:, :] * decay[..., :-s, :]], -2), 2 * s
    return rows, rows[..., -1:, :]


def log_products(decay):
    """Return the logarithms of the products decay_1 .. decay_t, (.., c). A decay of 0 counts as the smallest normal
    number, and in float32 long sums leave the products with a relative error of 1e-5."""
    return decay.clamp_min(torch.finfo(decay.dtype).tiny).log().cumsum(-1)


def decays(decay):
    """Return the products decay_{s+1} .. decay_t, (.., c) -> (.., c, c), 1 where s = t and 0 where s > t."""
    sums = log_products(decay)
    causal = torch.ones(*sums.shape[-1:] * 2, dtype=torch.bool, device=decay.device).tril()
    return (sums[..., None] - sums[..., None, :]).where(causal, -torch.inf).exp()


def recur_back(decay, rows):
    """Return y_t = decay_{t+1} * y_{t+1} + rows_t, from the last token to the first; shapes as in `recur`."""
    return recur(decay.roll(-1, -1).flip(-1), rows.flip(-2))[0].flip(-2)         # recur ignores the first decay


def products(decay):
    """Return the products decay_1 .. decay_t: (.., c) -> (.., c, 1). The backward of torch.cumprod divides by the
    factors, and first asks the GPU whether one of them is 0."""
    if in_products(decay):
        return log_products(decay).exp()[..., None]
    return recur(decay, F.pad(decay[..., :1, None], (0, 0, 0, decay.shape[-1] - 1)))[0]


def band(gate):
    """Return the weighted window mask of section 3.3, (.., c, w) -> (.., c, w - 1 + c): gate[t] from column t on."""
    *lead, c, w = gate.shape                                  # rows of w + c, joined, then cut into rows of one less
    return F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)


def through_windows(rows, gate):
    """Return rows @ band(gate), rows (.., r, c), without making the band: the weight of token t goes to its w pairs."""
    w = gate.shape[-1]
    return sum(F.pad(rows * weigh[..., None, :], (i, w - 1 - i)) for i, weigh in enumerate(gate.unbind(-1)))


def mixing(gates):
    """Run the rule on the coefficients of each x_i^T d_i, of W_0 and of S_0 instead of on matrices.

        G_t = momentum_t * G_{t-1} + Gate_t,       momprod_t = momentum_t * momprod_{t-1}            S_t: Eq 33, 39
        P_t = keep_t * P_{t-1} - step_t * G_t,     u_t = keep_t * u_{t-1} - step_t * momprod_t       W_t: Eq 16

    Four tokens; no momentum, window = 1, gate = 1 (a is keep, e is step):

                  x1^T d1       x2^T d2    x3^T d3   x4^T d4             W_0
        W_1         -e1                                                  a1
        W_2        -a2 e1         -e2                                   a2 a1
        W_3       -a3 a2 e1      -a3 e2      -e3                       a3 a2 a1
        W_4      -a4 a3 a2 e1   -a4 a3 e2   -a4 e3     -e4            a4 a3 a2 a1
                                         P                             keepprod

    gates (.., c) and (.., c, window) -> P (.., c, n); [keepprod, u] (.., c, 1) each; the last rows of P and G
    (.., 2, n); the last keepprod, u and momprod (.., 3, 1). Without momentum S_t is g_t, and
    u, momprod and the row of G are left out. The n pairs begin with the gate.shape[-1] - 1 from before the chunk.
    """
    late = in_products(gates.keep) and gates.gate.shape[-1] <= 16        # windows come last: fewer products
    rows = None if late else band(gates.gate)
    spread = (lambda a: through_windows(a, gates.gate)) if late else (lambda a: a)
    coef, step = [products(gates.keep)], -gates.step
    if gates.momentum is None:
        P, last = recur(gates.keep, rows, step)                                  # Eq 16
        return spread(P), coef, spread(last), coef[0][..., -1:, :]
    momprod, (G, G_last) = products(gates.momentum), recur(gates.momentum, rows)             # Eq 39
    P, P_last = recur(gates.keep, G, step)
    coef.append(recur(gates.keep, momprod, step)[0])
    ends = torch.cat([a[..., -1:, :] for a in (*coef, momprod)], -2)
    return spread(P), coef, spread(torch.cat([P_last, G_last], -2)), ends


def muon_mixing(gates, m, begun, closes, due):
    """Run the rule on coefficients with Newton-Schulz between S and W, in blocks of m tokens.

    Four tokens in two blocks of 2; no momentum, window = 1, gate = 1 (a is keep, e is step):

              x1^T d1   x2^T d2   x3^T d3   x4^T d4                   W_0            O_1        O_2
        U_1    a2 e1      e2                               W_1        a1
        U_2                        a4 e3      e4           W_2       a2 a1         -due_1
                         in_U                              W_3      a3 a2 a1      -a3 due_1
                                                           W_4     a4 a3 a2 a1   -a4 a3 due_1  -due_2
        due_1 = a2 e1 + e2,  due_2 = a4 e3 + e4                               coef      U_j, due_j, O_j: of block j

    `begun` tokens of the first block came in an earlier call, and left `due` (.., 1, 1). `closes`: the chunk ends here,
    and so does its last block, whatever its length. -> in_U (.., blocks, n), the coefficients of each x_i^T d_i in U_j
    at the end of block j; the coefficient (.., 1, 1) of the old U in U_1; coef (.., c, 1 + ended), keepprod and C for
    the blocks that end here; due (.., 1, 1) of the last block. With momentum U_2 holds pairs of block 1, too, and in_U
    has one row more, for the last S_t, and one column more, for S_0.
    """
    keep, step, momentum, gate, _ = gates
    c, token = keep.shape[-1], torch.arange(begun, begun + keep.shape[-1], device=keep.device)
    blocks = -(-(begun + c) // m)
    ended = blocks if closes else (begun + c) // m
    inside = token[:, None] // m == torch.arange(blocks, device=keep.device)     # (c, blocks): token t is in block j
    is_last = inside & ((token % m == m - 1) | (token == begun + c - 1))[:, None]       # and it is the last of j here
    kept = recur_back(keep, is_last.to(keep).expand(*keep.shape, blocks)) * inside  # keep_{t+1} .. keep_{end of j}
    S_in_U = step[..., None] * kept                           # (.., c, blocks): the coefficient of S_t in U_j
    old_in_U = keep[..., :1, None] * kept[..., :1, :]         # of the old U in U_j: 0 in all blocks but the first
    dues = S_in_U.sum(-2, keepdim=True) + old_in_U * due
    coef = torch.cat([products(keep), recur(keep, -(dues * is_last)[..., :ended])[0]], -1)
    if momentum is None:
        return through_windows(S_in_U.mT, gate), old_in_U[..., :1], coef, dues[..., -1:]
    last_S = F.pad(keep.new_ones(1, 1), (0, 0, c - 1, 0)).expand(*keep.shape, 1)
    g_in_U = recur_back(momentum, torch.cat([S_in_U, last_S], -1))               # g_t is in S_t, S_t+1, ..
    in_U = torch.cat([through_windows(g_in_U.mT, gate), (momentum[..., :1, None] * g_in_U[..., :1, :]).mT], -1)
    return in_U, old_in_U[..., :1], coef, dues[..., -1:]


def pending(gates, m, begun, closes):
    """Return -U_t, what waits in a block of m tokens, as coefficients: P of each x_i^T d_i, then of the old U and of
    S_0, (.., c, 1) each. All are 0 where a block ends. begun and closes as in muon_mixing."""
    c = gates.keep.shape[-1]
    token = torch.arange(begun, begun + c, device=gates.keep.device)
    inside = ((token % m < m - 1) & (token < begun + c - closes))[:, None]       # before its block's last token
    P, (old, *S), *_ = mixing(gates._replace(keep=gates.keep * (token % m > 0)))
    return P * inside, [a * inside for a in (-old, *S)]


# ---- one chunk learns; then all tokens are read
class Chunks(NamedTuple):
    """The tokens of one or more chunks, ready for products: c tokens and n pairs in each, for N = B H sequences."""
    q: torch.Tensor                       # (N, chunks, c, D)
    k: torch.Tensor                       # (N, chunks, n, D)
    xq: torch.Tensor                      # (N, chunks, c, E) phi(q)
    xk: torch.Tensor                      # (N, chunks, n, E) phi(k), the memory's input at the anchor
    x: torch.Tensor | None                # (N, chunks, n, E) with `exp` features: what is written in place of phi(k)
    v: torch.Tensor                       # (N, chunks, n, D) what the last matrix should produce

    def each(self):
        """Iterate over the chunks: a Chunks of tensors (N, ..) for each."""
        return (Chunks(*one) for one in zip(*(repeat(None) if a is None else a.unbind(1) for a in self)))


class Fast(NamedTuple):
    """The fast weights of N = B H sequences, named as in State: lists of matrices (N, in, out)."""
    M0: list                              # [] for zero
    W: list
    S: list                               # [] without momentum
    anchor: list                          # [] where a chunk begins: then it is W
    U: list                               # [] where a block begins
    due: torch.Tensor                     # (N, 1, 1, 1)

    def renew(self, reset):
        """Return the fast weights with W and S 0 for the sequences whose reset (N,) is True; None: for none."""
        zero = lambda these: [a.where(~reset[:, None, None], 0) for a in these]
        return self if reset is None else self._replace(W=zero(self.W), S=zero(self.S))


def prepare(rule, phi, count, q, k, v, gates, state):
    """Cut what `advance` takes into chunks -> a Chunks, gates (N, count, c, ..), the last k and v to carry on."""
    device, c, cast = q.device.type, q.shape[2] // count, lambda x: x
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        cast = lambda x: x.to(torch.get_autocast_dtype(device))
    ks, vs, gate, past = with_past(rule, state, k, v, gates.gate)
    tokens = lambda a: a.flatten(0, 1).unflatten(1, (count, c))                  # (B, H, T, ..) -> (N, count, c, ..)
    n = c + ks.shape[2] - k.shape[2]                          # pairs: n rows every c tokens
    pairs = lambda a: a.flatten(0, 1).unfold(1, n, c).movedim(-1, 2).contiguous()
    cq, ck, cv = tokens(q), pairs(ks), pairs(memory.target(rule.memory, rule.loss, ks, vs))
    if phi.kind == "exp":
        xq, xk, x = tokens(kernel_rows(q, state.keys)), pairs(kernel_rows(ks, state.keys)), pairs(one_hot(state, k, ks))
    else:
        xq, xk, x = cast(phi(cq)), cast(phi(ck)), None
    gates = Gates(*(None if a is None else tokens(a) for a in (*gates[:3], gate, gates.reset)))
    return Chunks(cq, ck, xq, xk, x, cv), gates, past


def gradients(rule, chunk, fast):
    """Return x_i (N, n, in) and d_i (N, n, out) of each matrix at the anchor (Eq 16)."""
    anchor = fast.anchor or fast.W
    anchor = [m + w for m, w in zip(fast.M0, anchor)] if fast.M0 else anchor
    found = memory.gradients(rule.memory, rule.loss, anchor, chunk.xk, chunk.v, rule.norm)
    if chunk.x is not None:
        found[: memory.firsts(rule.memory)] = [(chunk.x, d) for _, d in found[: memory.firsts(rule.memory)]]
    return found


def write(x, d, rows):
    """Return the sums of rows[r, i] x_i^T d_i over i: x (N, n, in), d (N, n, out), rows (N, r, n) -> r (N, in, out)."""
    made = torch.bmm(x.mT, (rows.mT[..., None] * d[:, :, None]).flatten(2))
    return made.to(rows.dtype).chunk(rows.shape[1], -1)       # under autocast made is bfloat16


def learn(rule, chunk, rows, ends, fast):
    """Learn from one chunk, or a part of it, without Newton-Schulz -> its last W_t and S_t; x and d of each matrix.
    rows (N, 1 or 2, n) and ends (N, 1 or 3, 1), from `mixing`: the last rows of P and G, the last coefficients."""
    found, (keepprod, *more) = gradients(rule, chunk, fast), ends.split(1, -2)
    new, S = [write(x, d, rows) for x, d in found], fast.S
    W = [torch.addcmul(add[0], keepprod, w) for add, w in zip(new, fast.W)]      # Eq 16
    if S:
        u, momprod = more
        W = [torch.addcmul(w, u, s) for w, s in zip(W, S)]
        S = [torch.addcmul(add[1], momprod, s) for add, s in zip(new, S)]        # Eq 39
    return rule.bound(W), S, found


def muon_learn(rule, chunk, in_U, old_in_U, coef, fast):
    """Learn with Newton-Schulz, from what muon_mixing returns -> last W_t, S_t and U_t; O of each block that ends; x
    and d of each matrix."""
    keepprod, *C = coef[:, -1:].split(1, -1)
    n, ended, S, found = chunk.v.shape[1], coef.shape[-1] - 1, fast.S, gradients(rule, chunk, fast)
    new = [write(x, d, in_U[..., :n]) for x, d in found]      # of each matrix: each U, last S
    if S:                                                                        # Eq 33
        new = [[torch.addcmul(a, in_U[:, r, n:, None], s) for r, a in enumerate(made)] for made, s in zip(new, S)]
        S, new = [made[-1] for made in new], [made[:-1] for made in new]
    if fast.U:
        new = [[torch.addcmul(made[0], old_in_U, u), *made[1:]] for made, u in zip(new, fast.U)]
    O = [[] for _ in fast.W]
    if ended:                                                 # the outer gradient goes through it (choice 14)
        with without_autocast(keepprod):
            O = newton_schulz([torch.cat(made[:ended]) for made in new], rule.ns_steps, rule.ns_coefficients)   # Eq 40
        O = [o.chunk(ended) for o in O]
    W = [keepprod * w for w in fast.W]
    for j, c in enumerate(C):                                                    # Eq 32
        W = [torch.addcmul(w, c, o[j]) for w, o in zip(W, O)]
    return rule.bound(W), S, [made[-1] for made in new], O, found


def read(rule, phi, chunks, M0, bases, coef, P, found):
    """Read all tokens of K = N chunks, each at its own W_t, layer by layer -> y (K, c, D).

        r_t (W_t - U_t) = r_t M0 + sum_j coef[j]_t (r_t bases[j]) + ((P o R X^T) D)_t

    bases: of each chunk, for each matrix, W_0 and S_0, or with Newton-Schulz W_0, O_1, O_2, .. and, if there are any,
    U_0 and S_0, (N, in, out) each. coef: (K, c, 1) each. P (K, c, n); None where no pair is read directly. found: of
    each chunk and matrix x (None where phi(k) enters) and d.
    """
    xq, bases = flat(chunks.xq), by_matrix(bases)
    if P is not None:                                         # once for all matrices that phi(k) enters
        scores = P * flat(phi.inner(chunks.q, chunks.k, chunks.xq, chunks.xk))
        found = by_matrix(found)

    def of_matrix(i, rows):
        """Return what rows (K, c, in) read of the i-th matrix."""
        W, apart = list(bases[i]), M0 and rows.is_contiguous()
        if M0 and not apart:                                  # monomials lie transposed (poly.py): M0 joins the product
            W += [M0[i][:, None].expand(-1, len(rows) // len(M0[i]), -1, -1).flatten(0, 1)]
        reads = torch.bmm(rows, torch.cat(W, -1) if len(W) > 1 else W[0]).chunk(len(W), -1)
        y = reads[-1] if M0 else 0
        if apart:                                             # all chunks of a sequence share M0: one long product
            y = torch.bmm(rows.view(len(M0[i]), -1, rows.shape[2]), M0[i]).view(*rows.shape[:2], -1)
        for c, r in zip(coef, reads):
            y = torch.addcmul(y, c, r) if M0 or c is not coef[0] else c * r
        if P is not None:
            x, d = found[i]
            y = torch.baddbmm(y, scores if x is None else P * torch.bmm(rows, x.mT), d)          # Eq 16
        return y
    f = memory.through(rule.memory, xq, of_matrix)
    return memory.output(rule.memory, f, flat(chunks.q), rule.norm)


def muon_read(rule, phi, chunks, gates, begun, closes, M0, bases, coef, found):
    """Call `read`, and let it read what waits in blocks, too. begun and closes as in muon_mixing."""
    P, waits = None, []
    if rule.muon_every > 1:
        P, (old, *waits) = pending(gates, rule.muon_every, begun, closes)
        P, waits = flat(P), [flat(a) for a in ([old] if begun else []) + waits]
    return read(rule, phi, chunks, M0, bases, coef + waits, P, found)


def by_matrix(chunks):
    """Regroup [chunk][matrix] tuples of (N, ..) or None -> [matrix] tuples of (N chunks, ..)."""
    stacked = lambda group: None if group[0] is None else torch.stack(group, 1).flatten(0, 1)
    return [[stacked(group) for group in zip(*tuples)] for tuples in zip(*chunks)]


def flat(a):
    """Join the first two dimensions: (N, chunks, ..) -> (N chunks, ..)."""
    return a.flatten(0, 1)


def resets(reset):
    """Return for each chunk which sequences (N,) begin anew with it, or None: reset (N, chunks, c) or None."""
    return repeat(None) if reset is None else iter(reset[..., 0].unbind(1))


def without_keys(rule, found):
    """Return x and d of each matrix, without the x of the first ones: their products with phi(q) are Chunks.qk."""
    return [(None if i < memory.firsts(rule.memory) else x, d) for i, (x, d) in enumerate(found)]


def plain_run(rule, phi, chunks, gates, fast):
    """Learn from chunks without Newton-Schulz, one after the other, and read -> (K, c, D), fast, the last W_0."""
    bases, learned, M0 = [], [], fast.M0
    P, coef, rows, ends = mixing(gates)
    for chunk, reset, *last in zip(chunks.each(), resets(gates.reset), rows.unbind(1), ends.unbind(1)):
        fast = fast.renew(reset)
        bases.append([*zip(fast.W, fast.S)] if fast.S else [*zip(fast.W)])
        W, S, found = learn(rule, chunk, *last, fast)
        before, fast = fast.W, fast._replace(W=W, S=S)
        learned.append(without_keys(rule, found))
    return read(rule, phi, chunks, M0, bases, [flat(a) for a in coef], flat(P), learned), fast, before


def muon_run(rule, phi, chunks, gates, fast, begun, closes):
    """Learn with Newton-Schulz; results as in plain_run, begun and closes as in muon_mixing (begun > 0: one chunk)."""
    bases, learned, M0, m = [], [], fast.M0, rule.muon_every
    with without_autocast(gates.keep):
        in_U, old_in_U, coef, due = muon_mixing(gates, m, begun, closes, fast.due)
    parts = in_U.unbind(1), old_in_U.unbind(1), coef.unbind(1)
    for chunk, reset, *made in zip(chunks.each(), resets(gates.reset), *parts):
        fast = fast.renew(reset)
        more = [old for old in (fast.U, fast.S) if old and m > 1]
        W, S, U, O, found = muon_learn(rule, chunk, *made, fast)
        bases.append([(w, *o, *us) for w, o, *us in zip(fast.W, O, *more)])
        learned.append(without_keys(rule, found))
        before, fast = fast.W, fast._replace(W=W, S=S)
    due, coef = due[:, -1:], [*flat(coef).split(1, -1)]
    if closes or not (begun + gates.keep.shape[-1]) % m:      # the next block begins from 0
        U, due = [torch.zeros_like(u) for u in U], torch.zeros_like(due)
    y = muon_read(rule, phi, chunks, gates, begun, closes, M0, bases, coef, learned)
    return y, fast._replace(U=U, due=due), before


def compile_chunks(**options):
    """Compile the functions of the chunk form by torch.compile. The rest stays eager. The two settings of torch below
    hold for all that this process compiles."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # shapes, rules, parts
    torch._functorch.config.backward_pass_autocast = "off"    # backward takes the types that forward took
    torch._functorch.config.activation_memory_budget = 0.0    # and computes again what forward would have kept
    for name in ("prepare", "mixing", "muon_mixing", "learn", "muon_learn", "read", "muon_read"):
        compile_function(sys.modules[__name__], name, **options)


def compile_function(owner, name, **options):
    """Compile a function of a module or class, unless it is compiled."""
    if not hasattr(f := getattr(owner, name), "_torchdynamo_orig_callable"):
        setattr(owner, name, torch.compile(f, dynamic=False, **options))


# ---- from tokens to chunks and back
AT_ONCE = 12_000_000, 4_000_000_000   # numbers of phi(q) in a call of `advance`, on a CPU (its cache) and on a GPU


def omega(rule, phi, q, k, v, gates, state):
    """Run the rule chunk by chunk (Eq 16, 39, 40). Arguments and results as in `omega_ref`; it knows `exp`, too."""
    E = phi.out_dim if phi.kind != "exp" else phi.dim + state.keys.shape[2] + q.shape[2]
    at_once = max(1, AT_ONCE[q.device.type == "cuda"] // max(1, q.shape[:2].numel() * E * rule.chunk))
    pieces, ys = cuts(q.shape[2], state.pos, rule.chunk, at_once), []
    split = lambda a: a.split([c * n for c, n in pieces], 2) if len(pieces) > 1 else [a]
    parts = (repeat(None) if a is None else split(a) for a in (q, k, v, *gates))
    for (_, count), q, k, v, *gates in zip(pieces, *parts):
        y, state = advance(rule, phi, count, q, k, v, Gates(*gates), state)
        ys.append(y)
    return torch.cat(ys, 2) if len(ys) > 1 else ys[0], state


def cuts(T, pos, chunk, at_once):
    """Cut T tokens, the first one `pos` tokens into a chunk, into pieces of `count` times c tokens -> [(c, count), ..].
    First comes the rest of a chunk in progress, then whole chunks, at most `at_once` in a piece, then a part of one."""
    pieces = []
    while T:
        c, count = (min(T, chunk - pos), 1) if pos or T < chunk else (chunk, min(T // chunk, at_once))
        pieces.append((c, count))
        T, pos = T - c * count, (pos + c * count) % chunk
    return pieces


def advance(rule, phi, count, q, k, v, gates, state):
    """Run one of the pieces of `cuts`: q, k, v (B, H, count c, D), gates, state -> y (B, H, count c, D), state."""
    (B, H, T, _), M0, m = q.shape, state.M0, rule.muon_every
    if phi.kind == "exp":
        state = write_keys(rule, state, k)
    chunks, gates, past = prepare(rule, phi, count, q, k, v, gates, state)
    matrices = lambda these: [at_least_float32(a).expand(B, *a.shape[-3:]).flatten(0, 1) for a in these]  # (N, in, out)
    pos, begun = (state.pos + T // count) % rule.chunk, state.pos % m if m else 0
    anchor = state.anchor if state.pos else ()
    parts = map(matrices, (state.M0, state.W, state.S, anchor, state.U if begun else ()))
    fast = Fast(*parts, state.due.view(-1, 1, 1, 1))
    rule = rule._replace(ball=0.0) if pos else rule           # W is bounded where a chunk ends
    run = partial(muon_run, begun=begun, closes=not pos) if m else plain_run
    y, fast, before = run(rule, phi, chunks, gates, fast)
    W, S, U, before = (tuple(a.unflatten(0, (B, H)) for a in these) for these in (fast.W, fast.S, fast.U, before))
    if pos:
        anchor = state.anchor if state.pos else before
    # M0 as it came, not grown by write_keys: models.detach tells parameters by their being leaves
    return y.view(B, H, T, -1), State(M0, W, S, anchor if pos else W, U, fast.due.view(B, H), *past, state.keys, pos)


def with_past(rule, state, k, v, gate):
    """Return the earlier pairs and k, v in a row, a gate for all of them, and the k, v to carry on. Zeros of
    weight 0 stand for pairs before the text, and `idle` ones pad their number to a multiple of 8, which is faster."""
    idle, T = -(rule.window - 1) % 8, k.shape[2]
    missing = idle + rule.window - 1 - state.k.shape[2]
    ks, vs = (torch.cat([F.pad(old, (0, 0, missing, 0)), new], 2) for old, new in ((state.k, k), (state.v, v)))
    gate = F.pad(gate, (idle, 0))
    if missing > idle:
        pair = torch.arange(T, device=k.device)[:, None] + torch.arange(gate.shape[-1], device=k.device)
        gate = gate * (pair >= missing)
    return ks, vs, gate, [a[:, :, max(T + idle, missing):].clone() for a in (ks, vs)]   # a view would keep all of it


# ---- `exp` features: phi* is infinite (Eq 22), but the memory is a sum of phi*(k_i)^T d_i, and W holds the d_i
def write_keys(rule, state, k):
    """Return the state with room for the keys k of infinite features (Eq 22): the first matrix gets one row for each
    key. Its first D rows are the degree-1 part, where M0 lives. Reading multiplies by [r, exp(r . k_1), ..] (Eq 23).
    Writing pair i adds to row i, so x_i is one-hot (choice 19)."""
    keys, firsts = torch.cat([state.keys, k], 2), memory.firsts(rule.memory)
    width = k.shape[-1] + keys.shape[2]
    rows = [width] * firsts + [w.shape[-2] for w in state.W[firsts:]]
    matrices = {name: grown(getattr(state, name), rows) for name in ("M0", "W", "S", "anchor")}
    return state._replace(keys=keys, **matrices)


def one_hot(state, k, ks):
    """Return x_i of the pairs ks, the last of the state's keys: (B, H, n, rows of the first matrix)."""
    width = k.shape[-1] + state.keys.shape[2]
    hot = F.pad(torch.eye(ks.shape[2], dtype=k.dtype, device=k.device), (width - ks.shape[2], 0))   # crops missing ones
    return hot.expand(*k.shape[:2], *hot.shape)


def grown(W, rows):
    """Return matrices with `rows` rows each; the new rows are zero."""
    return tuple(F.pad(w, (0, 0, 0, n - w.shape[-2])) if n > w.shape[-2] else w for w, n in zip(W, rows))
