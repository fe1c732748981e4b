"""chunks.py - the rule of omega.py chunk by chunk: products of triangular matrices (Eq 16, 39, 40).

At fixed weights the gradient of pair i is an outer product x_i^T d_i: x_i enters the matrix, and d_i is dl/d(what leaves
it). So what a chunk writes is a sum of x_i^T d_i, whose coefficients come from the gates alone. Of four tokens in two
blocks of two, with a window of 2 (a is keep, m momentum, e step, g gate, and pair 0 comes from before the chunk):

           t\\s  1     2    3    4               pair 0   1    2    3    4              t\\s   1     2    3    4
            1   1                                1  g10  g11                           1   e1
    Keep =  2   a2    1                 Gate =   2       g21  g22           Wait = -   2  a2 e1  e2
            3   a3a2  a3   1                     3            g32  g33                 3              e3
            4 a4a3a2 a4a3  a4   1                4                 g43  g44            4             a4 e3  e4

Mom is Keep with m in the place of a. Wait is -Keep times the steps, inside of blocks. In row t they hold what is left at
token t of S, g and -U of token s. X, D and R hold the rows x_i, d_i and r_t, what token t multiplies by the matrix:

    S_t  = (Mom Gate)[t] X^T D + momprod_t S_0                                                   Eq 33, 39
    -U_t = P[t] X^T D + u_t S_0,            P = Wait Mom Gate,   u = Wait momprod                what waits in t's block
    O_j  = due_j NS(-U at the end of j)     due = -Wait 1;  without Newton-Schulz O = -U         the update of block j
    W_t  = keepprod_t W_0 + sum_j Keep[t, end of j] O_j                     over blocks that have ended: Eq 16, 32

keepprod_t and momprod_t are the products of keep and momentum up to t, W_0 and S_0 what was before the chunk. Reading
needs no W_t. All tokens are read at once, by attention with P in the place of the softmax (o: elementwise):

    r_t (W_t - U_t) = keepprod_t (r_t W_0) + u_t (r_t S_0) + sum_j Keep[t, end of j] (r_t O_j) + ((P o R X^T) D)_t

With error = "token" the error of a pair is a reading, too, one token earlier. Then every token has pairs of its own for
its window, and X, D have a row for each. Let A hold the rows that enter the last matrix, and ' be "a token later":

    D = keepprod' o (A W_0) + u' o (A S_0) + (P' o A A^T) D - V,    so   (I - P' o A A^T) D = .. - V

The matrix is triangular, so this is one solve. It is DeltaNet's chunk form (Yang et al. 2024, arXiv 2406.06484) with
decay, momentum and windows.
"""
import sys
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

import memory
from memory import at_least_float32, without_autocast
from muon import newton_schulz
from omega import Gates, join, since
from poly import grown, kernel_rows, one_hot, with_keys


# ---- coefficients, which depend on the gates alone. `of` picks rows t: all, or the last tokens of blocks that end
def logs(a):
    """Return the logarithm; 0 counts as the smallest normal number."""
    return a.clamp_min(torch.finfo(a.dtype).tiny).log()


def products(decay):
    """Return the products decay_1 .. decay_t, (.., c) -> (.., c, 1)."""
    return logs(decay).cumsum(-1)[..., None].exp()


def decays(decay, of=lambda a: a, within=True, times=None):
    """Return decay_{s+1} .. decay_t times_s at [t, s], Keep or Mom or rows of it, 0 outside of `within`: (.., c, c)."""
    sums, ones = logs(decay).cumsum(-1), torch.ones(decay.shape[-1:] * 2, dtype=torch.bool, device=decay.device)
    hidden = torch.where(of(ones.tril() & within), 0.0, -torch.inf)              # before exp, which could overflow
    columns = -sums if times is None else logs(times) - sums
    return (of(sums[..., None]) + (hidden + columns[..., None, :])).exp()


def windowed(rule, rows, gate, product=True):
    """Return rows @ Gate, (.., r, c) -> (.., r, n); n = w - 1 + c, or c w where each token has pairs of its own."""
    *lead, c, w = gate.shape
    if solves(rule):
        return (rows[..., None] * gate[..., None, :, :]).flatten(-2)
    if w == 1:
        return rows * gate.mT
    if product or rows.device.type == "cpu" and not torch.compiler.is_compiling():
        return rows @ F.pad(gate, (0, c)).flatten(-2)[..., : c * (w - 1 + c)].view(*lead, c, w - 1 + c)  # Gate
    return sum(F.pad(rows * g[..., None, :], (i, w - 1 - i)) for i, g in enumerate(gate.unbind(-1)))


def at_ends(rule):
    """Return the function that picks the rows of the last tokens of blocks. The end of a chunk ends a block, too."""
    m = rule.muon_every or rule.chunk

    def of(a):
        ends, c = a[..., m - 1::m, :], a.shape[-2]
        return torch.cat([ends, a[..., -1:, :]], -2) if c == rule.chunk and c % m else ends
    return of


def waiting(rule, gates, of=lambda a: a, within=True, Mom=None):
    """Return what makes -U_t: P (.., r, n) of the pairs and u (.., r, 1) of S_0, None without momentum; and due."""
    wait = decays(gates.keep, of, within, gates.step)
    if gates.momentum is None:
        return windowed(rule, wait, -gates.gate), None, wait.sum(-1, keepdim=True)
    Mom = decays(gates.momentum) if Mom is None else Mom
    G = wait @ Mom if wait.shape[-2] > 1 else (wait.mT * Mom).sum(-2, keepdim=True)          # Eq 39
    return windowed(rule, G, -gates.gate, product=False), G[..., :1] * -gates.momentum[..., :1, None], wait.sum(-1, keepdim=True)


def blocks(rule, gates):
    """Return t (c, 1), and where s is in the block of t (c, c)."""
    t = torch.arange(gates.keep.shape[-1], device=gates.keep.device)[:, None]
    return t, t // rule.muon_every == t.mT // rule.muon_every if rule.muon_every else True


def mixing(rule, gates, new, due, Mom=None):
    """Return what the last `new` tokens read: P (.., new, n); and of W_0, S_0 and each NS the coefficients (.., new, 1)."""
    c, m, of = gates.keep.shape[-1], rule.muon_every, lambda a: a[..., -new:, :]
    t, within = blocks(rule, gates)
    if m:                                                     # the last token of a block reads O instead
        within = within & (t % m < m - 1) & (t < c - (c == rule.chunk))
    P, u, _ = waiting(rule, gates, of, within, Mom)
    coef = [of(products(gates.keep))] + [u] * (u is not None and m != 1)
    if m and due.shape[-2]:
        coef += (at_ends(rule)(decays(gates.keep, of).mT) * due).mT.split(1, -1)
    return P, coef


class Closing(NamedTuple):
    """What the J blocks that end here, and the last W and S, are made of."""
    pairs: torch.Tensor                   # (.., J [+ 1], n) coefficients of the pairs: in -U of each block, in S
    S0: torch.Tensor | None               # (.., J [+ 1], 1) of S_0, likewise
    due: torch.Tensor                     # (.., J, 1)
    O: torch.Tensor | None                # (.., J, 1) in W, of -U of each block, or of its NS
    W0: torch.Tensor | None               # (.., 1, 1) in W, of W_0


def closing(rule, gates, Mom=None, last=True):
    """Return the Closing of gates (.., c); last: with what the last W and S need."""
    ends, row = at_ends(rule), lambda a: a[..., -1:, :]
    P, u, due = waiting(rule, gates, ends, blocks(rule, gates)[1], Mom)
    if not last:
        return Closing(P, u, due, None, None)
    if u is not None:
        S = decays(gates.momentum, row)
        P = torch.cat([P, windowed(rule, S, gates.gate, product=False)], -2)
        u = torch.cat([u, S[..., :1] * gates.momentum[..., :1, None]], -2)
    O = ends(decays(gates.keep, row).mT)
    return Closing(P, u, due, O * due if rule.muon_every else O, row(products(gates.keep)))


# ---- error = "token"
INVERT_ON = ("cuda",)                                         # devices that wait longer for a solve than for `inverse`


def solves(rule):
    """Tell whether errors are solved for. Those of the dot loss are -v, wherever they are measured."""
    return rule.error == "token" and rule.loss != "dot"


def inverts(rule, device):
    """Tell whether (I + A)^-1 is made for all chunks at once: a matrix memory's A A^T does not depend on W."""
    return rule.memory == "linear" and device.type in INVERT_ON


class System(NamedTuple):
    """What D solves: (I - P' o A A^T) D = keepprod' o (A W_0) + u' o (A S_0) - V."""
    L: torch.Tensor                       # (.., n, n) -P' o A A^T, or (I + that)^-1
    W0: torch.Tensor                      # (.., n, 1) keepprod'
    S0: torch.Tensor | None               # (.., n, 1) u'


def system(rule, gates, scores):
    """Return the System of gates (.., c) and scores A A^T (.., n, n)."""
    with without_autocast(scores):
        P, u, _ = waiting(rule, gates)
        later = lambda a, first=0.0: F.pad(a[..., :-1, :], (0, 0, 1, 0), value=first).repeat_interleave(rule.window, -2)
        L = -later(P) * scores
        L = inverse(L) if inverts(rule, L.device) else L
        return System(L, later(products(gates.keep), 1.0), u if u is None else later(u))


def inverse(L):
    """Return (I + L)^-1 of strictly lower L (.., n, n), in log n steps, by joining the inverses of blocks: that of
    [[a, 0], [b, c]] is [[1/a, 0], [-1/c b 1/a, 1/c]]."""
    n, s = L.shape[-1], 1
    L = F.pad(L, (0, (1 << (n - 1).bit_length()) - n) * 2)
    T = L.new_ones(*L.shape[:-1], 1, 1)                       # the inverses of the blocks of size s on the diagonal
    while s < L.shape[-1]:
        b = L.unflatten(-1, (-1, 2 * s)).unflatten(-3, (-1, 2 * s)).diagonal(0, -4, -2).movedim(-1, -3)[..., s:, :s]
        a, c = T.unflatten(-3, (-1, 2)).unbind(-3)
        T, s = torch.cat([F.pad(a, (0, s)), torch.cat([-c @ b @ a, c], -1)], -2), 2 * s
    return T[..., 0, :n, :n]


def errors(rule, solve, a, v, M0, W, S):
    """Return D (N, n, out): a (N, n, in) are the rows that enter the last matrix M0 + W, with momentum S."""
    with without_autocast(v):
        a = a.to(W.dtype)
        y = solve.W0 * torch.bmm(a, W) - v
        y = y if S is None else y + solve.S0 * torch.bmm(a, S)
        y = y if M0 is None else y + torch.bmm(a, M0)
        return solve.L @ y if inverts(rule, y.device) else torch.linalg.solve_triangular(
            solve.L, y, upper=False, unitriangular=True)


# ---- one chunk learns
class Chunks(NamedTuple):
    """Tokens and pairs of N = B H sequences, cut into chunks: c tokens and n pairs in each."""
    q: torch.Tensor                       # (N, chunks, c, D); of a chunk that is gone on with, the new tokens alone
    k: torch.Tensor                       # (N, chunks, n, D)
    xq: torch.Tensor                      # (N, chunks, c, E) phi(q)
    xk: torch.Tensor                      # (N, chunks, n, E) phi(k)
    x: torch.Tensor | None                # (N, chunks, n, E) with `exp` features: what is written in place of phi(k)
    v: torch.Tensor                       # (N, chunks, n, D) what the last matrix should produce


def gradients(rule, chunk, solve, M0, W, S):
    """Return x_i (N, n, in) and d_i (N, n, out) of each matrix at W_0 (Eq 16). solve: a System, or Gates that make it,
    for the d of the last matrix at the tokens; or None."""
    last, firsts = None, memory.firsts(rule.memory)
    if solve:
        def last(a):
            made = solve if isinstance(solve, System) else system(rule, solve, torch.bmm(b := a.to(W[-1].dtype), b.mT))
            return errors(rule, made, a, chunk.v, *(these[-1] if these else None for these in (M0, W, S)))
    anchor = [m + w for m, w in zip(M0, W)] if M0 else W
    found = memory.gradients(rule.memory, rule.loss, anchor, chunk.xk, chunk.v, rule.norm, last)
    return found if chunk.x is None else [(chunk.x, d) for _, d in found[:firsts]] + found[firsts:]


def write(x, d, rows):
    """Return the sums of rows[r, i] x_i^T d_i over i: x (N, n, in), d (N, n, out), rows (N, r, n) -> r (N, in, out)."""
    made = torch.bmm(x.mT, (rows.mT[..., None] * d[:, :, None]).flatten(2))
    return [a.to(rows.dtype) for a in made.chunk(rows.shape[1], -1)] if rows.shape[1] else []    # bfloat16 in autocast


def learn(rule, chunk, close, solve, M0, W, S):
    """Learn one chunk -> W and S at its end (without close.W0 unchanged); NS of each block that ends, [matrix][block],
    [] without Newton-Schulz; x and d of each matrix."""
    found, J = gradients(rule, chunk, solve, M0, W, S), close.due.shape[1]
    new = [write(x, d, close.pairs) for x, d in found]        # of each matrix: -U of each block, S
    if S:
        new = [[torch.addcmul(a, close.S0[:, r, None], s) for r, a in enumerate(made)] for made, s in zip(new, S)]
    last_S, new = [made[-1] for made in new if S and close.W0 is not None], [made[:J] for made in new]
    if rule.muon_every and J:                                 # the outer gradient goes through it (choice 14)
        with without_autocast(close.due):
            new = newton_schulz([torch.cat(made) for made in new], rule.ns_steps, rule.ns_coefficients)          # Eq 40
        new = [made.chunk(J) for made in new]
    if close.W0 is not None:
        W, S = [close.W0 * w for w in W], last_S
        for j in range(J):                                                       # Eq 16, 32
            W = [torch.addcmul(w, close.O[:, j, None], made[j]) for w, made in zip(W, new)]
        W = rule.bound(W)                                                        # choice 22
    return W, S, new if rule.muon_every else [[] for _ in W], found


# ---- then all tokens are read
def read(rule, phi, chunks, gates, due, Mom, M0, bases, found):
    """Read K = N chunks at once, layer by layer -> y (K, c, D). bases: of each chunk and matrix W_0, S_0, O_1, O_2, ..;
    found: of each chunk and matrix x and d."""
    q, k, xq, xk = (a.flatten(0, 1) for a in chunks[:4])
    P, coef = mixing(rule, gates, q.shape[1], due, Mom)
    P, coef = P.flatten(0, 1), [a.flatten(0, 1) for a in coef]
    stacked = lambda these: torch.stack(these, 1).flatten(0, 1)                  # of each chunk (N, ..) -> (K, ..)
    bases = [[stacked(base) for base in zip(*matrix)] for matrix in zip(*bases)]
    direct, firsts = rule.muon_every != 1, memory.firsts(rule.memory)            # muon_every = 1: nothing waits
    scores = P * phi.inner(q, k, xq, xk) if direct else None  # once for all matrices that phi(k) enters

    def of_matrix(i, rows):
        """Return what rows (K, c, in) read of the i-th matrix."""
        base = bases[i] + ([M0[i][:, None].expand(-1, len(rows) // len(M0[i]), -1, -1).flatten(0, 1)] if M0 else [])
        reads = torch.bmm(rows, torch.cat(base, -1)).chunk(len(base), -1)
        y = reads[-1] if M0 else 0.0
        for c, r in zip(coef, reads):
            y = torch.addcmul(y, c, r) if torch.is_tensor(y) else c * r
        if direct:
            d = stacked([pairs[i][1] for pairs in found])
            weights = scores if i < firsts else P * torch.bmm(rows, stacked([pairs[i][0] for pairs in found]).mT)
            y = torch.baddbmm(y, weights, d)                                     # Eq 16
        return y
    return memory.output(rule.memory, memory.through(rule.memory, xq, of_matrix), q, rule.norm)


# ---- from tokens to chunks and back
AT_ONCE = 12_000_000, 4_000_000_000       # numbers of phi(q) in a call of `advance`, on a CPU (its cache) and on a GPU


def run(rule, phi, q, k, v, gates, state):
    """Run the rule chunk by chunk. Arguments and results as in omega.omega_ref; it knows `exp`, too. Raises ValueError
    for what Rule.fault names."""
    if fault := rule.fault():
        raise ValueError(fault)
    pos, c, E = state.pos, rule.chunk, phi.out_dim
    ks, vs, gates = join(state, k, v, gates)
    if phi.kind == "exp":
        state, E = with_keys(state, k, memory.firsts(rule.memory)), state.keys.shape[2] + q.shape[2]
    most = max(1, AT_ONCE[q.device.type == "cuda"] // max(1, q.shape[:2].numel() * E * c))
    M0, W, S = (sequences(a, len(q)) for a in (state.M0, state.W, state.S))
    pairs = (ks, vs) if state.keys is None else (ks, vs, one_hot(ks, state.keys))
    at, end, past, ys = 0, gates.keep.shape[2], ks.shape[2] - gates.keep.shape[2], []
    part = lambda a, i, j: a if a is None or (i, j) == (0, a.shape[2]) else a[:, :, i:j]     # a slice costs a copy
    while at < end:                                           # a chunk in progress, whole chunks, a part of one
        count = 1 if at < pos or end - at < c else min((end - at) // c, most)
        to, first = min(end, at + c * count), max(0, past + at - rule.window + 1)
        y, W, S = advance(rule, phi, count, part(q, max(0, at - pos), to - pos), [part(a, first, past + to) for a in pairs],
                          Gates(*(part(a, at, to) for a in gates)), state.keys, M0, W, S)
        ys, at = ys + [y], to
    W, S = ([a.unflatten(0, q.shape[:2]) for a in matrices] for matrices in (W, S))
    return torch.cat(ys, 2) if len(ys) > 1 else ys[0], since(rule, state, W, S, ks, vs, gates)


def sequences(matrices, B):
    """Return matrices (.., H, in, out) as (B H, in, out), in float32 at least."""
    return [at_least_float32(a).expand(B, *a.shape[-3:]).flatten(0, 1) for a in matrices]


def cut(rule, phi, count, q, pairs, gates, keys):
    """Cut what `advance` takes into `count` chunks -> a Chunks, gates (N, count, c, ..). pairs: k, v [and one-hot x] of
    the tokens and of up to window - 1 before. Where there are fewer, zeros of weight 0 stand for them; up to 7 idle
    ones more make their number a multiple of 8, which is faster."""
    T, w, cast, device = gates.keep.shape[2], rule.window, lambda a: a, q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        cast = lambda a: a.to(torch.get_autocast_dtype(device))
    c, idle = T // count, 0 if solves(rule) else -(w - 1) % 8
    past, gate = idle + w - 1, F.pad(gates.gate, (idle, 0))
    missing = past + T - pairs[0].shape[2]
    if missing > idle:
        pair = torch.arange(T, device=q.device)[:, None] + torch.arange(past + 1, device=q.device)
        gate = gate * (pair >= missing)
    k, v, *x = (F.pad(a, (0, 0, missing, 0)) if missing else a for a in pairs)
    tokens = lambda a: a.flatten(0, 1).unflatten(1, (count, -1))                 # (B, H, T, ..) -> (N, count, c, ..)
    chunked = lambda a: a.flatten(0, 1).unfold(1, c + past, c).movedim(-1, 2).contiguous()
    if solves(rule):                                          # each token has the pairs of its window
        chunked = lambda a: a.flatten(0, 1).unfold(1, w, 1).mT.flatten(1, 2).unflatten(1, (count, -1))
    cq, ck, cv = tokens(q), chunked(k), chunked(memory.target(rule.memory, rule.loss, k, v))
    if x:
        x, xq, xk = chunked(x[0]), tokens(kernel_rows(q, keys)), chunked(kernel_rows(k, keys))
    else:
        x, xq, xk = None, cast(phi(cq)), cast(phi(ck))
    gates = gates._replace(gate=gate)
    return Chunks(cq, ck, xq, xk, x, cv), Gates(*(a if a is None else tokens(a) for a in gates))


def advance(rule, phi, count, q, pairs, gates, keys, M0, W, S):
    """Run `count` chunks, or a part of one -> y (B, H, T, D), and W, S at the last boundary."""
    chunks, gates = cut(rule, phi, count, q, pairs, gates, keys)
    whole, bases, found = gates.keep.shape[-1] == rule.chunk, [], []             # a part leaves W and S as they are
    # a compiled `read` makes Mom again rather than keep it
    Mom = None if gates.momentum is None or is_compiled(read) else decays(gates.momentum)
    close, each = each_chunk(rule, phi, chunks, gates, Mom, whole)
    for reset, *one in each:
        if reset is not None:
            W, S = ([a.where(~reset[:, :1, None], 0) for a in matrices] for matrices in (W, S))
        new_W, new_S, NS, pairs = learn(rule, *one, M0, W, S)
        bases.append(bases_of(rule, W, S, NS))
        found.append(pairs)
        W, S = new_W, new_S
    return read(rule, phi, chunks, gates, close.due, Mom, M0, bases, found).view(*q.shape), W, S


def each_chunk(rule, phi, chunks, gates, Mom=None, last=True):
    """Return a Closing, and for each chunk its reset and what `learn` takes: Chunks, Closing; System, Gates or None."""
    each = lambda a: repeat(None) if a is None else a.unbind(1)
    split = lambda these: (type(these)(*one) for one in zip(*map(each, these)))
    with without_autocast(gates.keep):
        close = closing(rule, gates, Mom, last)
    solve = repeat(None) if not solves(rule) else split(gates) if rule.memory != "linear" else split(
        system(rule, gates, phi.inner(chunks.k, chunks.k, chunks.xk, chunks.xk)))
    return close, zip(each(gates.reset), split(chunks), split(close), solve)


def bases_of(rule, W, S, NS):
    """Return of each matrix what is read: W_0, S_0 unless nothing waits, the NS of each block."""
    S = [[s] for s in S] if S and rule.muon_every != 1 else [[] for _ in W]
    return [[w, *s, *ns] for w, s, ns in zip(W, S, NS)]


def weights(rule, phi, state):
    """Return what a query reads after the last token, the matrices W - U plus M0, and the momentum S then."""
    W, S, B = list(state.W), list(state.S), len(state.k)
    M0 = grown(state.M0, [w.shape[-2] for w in W])
    if state.pos:
        W, S, m0 = (sequences(a, B) for a in (W, S, M0))
        pairs = (state.k, state.v) if state.keys is None else (state.k, state.v, one_hot(state.k, state.keys))
        chunks, gates = cut(rule, phi, 1, state.k[:, :, -1:], pairs, state.gates, state.keys)
        close, ((_, *one),) = each_chunk(rule, phi, chunks, gates)
        _, new_S, NS, found = learn(rule, *one, m0, W, S)
        P, coef = mixing(rule, gates, 1, close.due)
        W = [sum(c[:, 0] * a for c, a in zip(coef, base)) + write(x, d, P[:, 0])[0]
             for base, (x, d) in zip(bases_of(rule, W, S, NS), found)]
        W, S = ([a.unflatten(0, (B, -1)) for a in matrices] for matrices in (W, new_S))
    return tuple(a + b for a, b in zip(M0, W)) if M0 else tuple(W), tuple(S)


def compile_chunks(**options):
    """Compile the functions of the chunk form by torch.compile. The rest stays eager. The settings of torch below hold
    for all that this process compiles."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # shapes, rules, parts
    torch._functorch.config.backward_pass_autocast = "off"    # backward takes the types that forward took
    torch._functorch.config.activation_memory_budget = 0.0    # and computes again what forward would have kept
    for name in ("cut", "closing", "system", "learn", "read"):
        compile_function(sys.modules[__name__], name, **options)


def is_compiled(f):
    return hasattr(f, "_torchdynamo_orig_callable")


def compile_function(owner, name, **options):
    """Compile a function of a module or class, unless it is compiled."""
    if not is_compiled(f := getattr(owner, name)):
        setattr(owner, name, torch.compile(f, dynamic=False, **options))
