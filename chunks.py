"""chunks.py - how a run of chunks is computed: each learns after the one before it, many are read at once; and the gradient of all that.

What a chunk is, and every symbol here, is in omega.py; `omega_chunk` there is the same without what speed asks for, and to be read first.
What is computed in a chunk, for each matrix of the memory:

    read_carried        r_t (keepprod_t W_0 + u_t S_0 + M0)              what tokens read of what was there before their chunk
    read_chunks         + (P o R X^T) D                                  and of what it has learned up to them
    learn_chunk         x_i, d_i at the anchor;  X^T (P_last o D)        what the chunk leaves behind, P_last the last row of P as a column
    muon_learn          the same for the sum of the S_t of every block j, and from those W_j and O_j
    muon_read           r_t (since_t W_j + own_t O_j + M0)

Only learning has to go from chunk to chunk. What the tokens of a chunk read depends on the W and S before it and on its pairs, so
stretches of chunks are read together, and the gradient of that is computed together; without Newton-Schulz so is all of the gradient but
what leads from W and S after a chunk to those before it.

N is B H (sequences and heads do not take turns), c the tokens of a chunk, n the pairs they learn from, and C stacks the s matrices that
are read, (N, s, k, wide) or (N, s k, wide): W and S, which are carried from chunk to chunk, or W_j and O_j of a block.

The shapes of one chunk, for B 2, H 6, head dim 16, degree 2, hidden width 16, chunk 64, window 8, momentum: N = 12, E = 153, and n = 72
pairs, which are 64 tokens, the 7 before them and an idle one:

    xq (12, 64, 153)   xk (12, 72, 153)   v (12, 72, 16)   P (12, 64, 72)
    C of W1 (12, 2, 16, 153), W over S; W1 is 153 x 16, tall, so it lies transposed.     C of W2 (12, 2, 16, 16)
    learn_chunk    z = xk W1 (12, 72, 16), gelu(z) W2 - v = d2, and back: d1 (12, 72, 16);   W1 = keepprod W1 + u S1 + xk^T (P_last o d1), ..
    read_chunks    z = xq W1_t = xq (keepprod W1 + u S1 + M0) + (P o (xq xk^T)) d1 (12, 64, 16);   then gelu(z) reads W2 in the same way
    with Newton-Schulz every 16 tokens, 4 blocks: G (12, 5, 72), a row a block and one of the last token; W_j over O_j (12, 4, 2, 16, 153)

Arguments that most functions have: `how` (How); `anchor`, where gradients are taken in a run that begins within a chunk, which is then of
that one chunk (empty: at W); M0 (H, k, wide), where it is read `repeated` to (N, k, wide); empty for zero.
With a `rule.dtype` products are in that precision, and so is what they multiply and what the gradient needs of it; but not those of gates, of
Newton-Schulz, of what it sees (those of the gradient of that are) and of advance_blocks, nor what goes from chunk to chunk, W and S and their
gradients: there a keep of 0.999 would be 1 in bfloat16.
`kept` collects what the gradient needs. The order: a chunk's products; chunks without Newton-Schulz, and with; many of them at a time; and
in the second half all gradients.
"""
from contextlib import nullcontext
from functools import reduce
from itertools import islice, repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

import memory
from memory import once_differentiable
from muon import exact_products, orthogonalize, orthogonalize_backward


class Part(NamedTuple):
    """What omega.py makes of a run of chunks, of c tokens and n pairs each: idle ones of weight 0, the window - 1 before the tokens, the tokens.

    `...` is (chunks, N); N for one chunk, chunks N for many in one product. Pair i is token i - (n - c) of the chunk. phi may lie
    feature-major (memory.feature_major). The formulas are those of omega.py.
    """
    xq: torch.Tensor                                          # (..., c, E)  phi(q)
    xk: torch.Tensor                                          # (..., n, E)  phi(k)
    v: torch.Tensor                                           # (..., n, D)  memory.target(k, v)
    xw: torch.Tensor | None                                   # (..., n, E)  what x_i^T d_i is made of, if not phi(k)
    qk: torch.Tensor | None                                   # (..., c, n)  phi(q) phi(k)^T, if there is a shorter way to it
    # From here on what depends on the gates alone (omega.mixing).
    # Without Newton-Schulz     W_t = keepprod_t W_0 + u_t S_0 + sum_i P[t, i] x_i^T d_i,   S_t = momprod_t S_0 + sum_i G[t, i] x_i^T d_i
    # s = 2 matrices, W and S, are carried from chunk to chunk; s = 1, W, without momentum (omega.pairs_chunk: of the c tokens, not of n pairs)
    coef: torch.Tensor                                        # (..., c, s, 1)  keepprod and u = -A diag(step) momprod
    P: torch.Tensor | None = None                             # (..., c, n)  -A diag(step) G
    last: torch.Tensor | None = None                          # (..., n, s, 1)  the last rows of P and G
    ends: torch.Tensor | None = None                          # (..., s, 1, 1)  the last keepprod and momprod
    across: torch.Tensor | None = None                        # (..., 1, 1)  the last u
    # With Newton-Schulz     W_t = since_t W_j + own_t O_j,   in blocks of m tokens, or one of c <= m; W_j before block j, W_0 the first
    # coef is (..., blocks, m, 2, 1): since_t, the product of keep from the block's first token to t; own_t, -sum of A[t, i] step_i over them.
    # Token t of a chunk that begins `pos` tokens into a block is at [(pos + t) // m, (pos + t) % m]; where there is one block, at [0, t]
    shares: torch.Tensor | None = None                        # (..., blocks, 1 + blocks)  of W_0 and of O_0 .. in the W after each block
    # with momentum r = blocks + 1, the last row being that of the last token; else r = blocks
    G: torch.Tensor | None = None                             # (..., r, n)  Theta Gate, its rows summed over each block
    momprod: torch.Tensor | None = None                       # (..., r, 1)  momprod, likewise

    def each(self, f):
        """f of each field that is there."""
        return Part(*(None if a is None else f(a) for a in self))

    def split(self):
        """One Part for all chunks -> one for each."""
        return [Part(*one) for one in zip(*(repeat(None) if a is None else a.unbind(0) for a in self))]


class How(NamedTuple):
    """What all chunks of a run have in common."""
    rule: tuple                                               # omega.Rule
    tall: tuple                                               # of each matrix: does it lie transposed (`lay`)?
    closes: bool                                              # does the last token of each part end a chunk, where the ball of choice 22 is?
    pos: int = 0                                              # with Newton-Schulz, how many tokens into a block the first one is


# ---------------------------------------------------------------------------------------------------------------------------
# The products of a chunk.

def exact(rule, device):
    """Where products are in `rule.dtype` (memory.autocast), within this they are in the precision of what they multiply."""
    return memory.autocast(device) if rule.dtype else nullcontext()


def turn(a, tall):
    """a, or a^T if it is tall; also the way back."""
    return a.mT if tall else a


def lay(group, tall):
    """Matrices (B, H, in, out) or (H, in, out) -> (B H, k, wide) or (H, k, wide): the narrow side first, so the `tall` ones are transposed."""
    return [turn(a, t).contiguous().flatten(0, -3) for a, t in zip(group, tall)]


def unlay(group, tall, B):
    """(B H, k, wide) -> (B, H, in, out), the inverse of `lay`."""
    return [turn(a.unflatten(0, (B, -1)), t) for a, t in zip(group, tall)]


def scaled(a, coef):
    """Rows a (N, n, k), their numbers coef (N, n, s, 1) -> (N, n, s k): a row times the first of its numbers, then times the next."""
    return memory.cast((coef * a[:, :, None]).flatten(2), a.dtype)


def combined(t, coef, into=None):
    """t (N, n, s k) -> (N, n, k): the first k of a row times the first of its numbers, plus the next k times the next. Added to `into`, in
    its place, if that is given.
    """
    t, coef = t.unflatten(2, (coef.shape[2], -1)).unbind(2), coef.unbind(2)
    y = memory.cast(t[0] * coef[0], t[0].dtype) if into is None else into.addcmul_(t[0], coef[0])
    for i in range(1, len(t)):
        y = y.addcmul_(t[i], coef[i])
    return y


def read_carried(R, C, coef, M0, tall):
    """r_t (keepprod_t W_0 + u_t S_0 + M0) for all rows r_t of R (N, c, in) -> (N, c, out); C or M0 may be None, for zero.

    C (N, s k, wide) holds W_0, below it S_0, coef (N, c, s, 1) their numbers, M0 is (N, k, wide). Matrices are transposed if they are
    `tall` (`lay`): k is their narrow side, the one that is scaled. Also returns what its gradient needs of that, or None.
    """
    y = None if M0 is None else torch.bmm(R, turn(M0, tall))
    if C is None:
        return y, None
    if not tall:
        R = scaled(R, coef)
        return (torch.bmm(R, C) if y is None else memory.add_product(y, R, C)), None
    reads = torch.bmm(R, C.mT)
    return combined(reads, coef, y), reads


def write(X, D, last, tall, out=None):
    """X^T (P_last * D) and X^T (G_last * D), what a chunk adds to W and S: X (N, n, in), D (N, n, out) -> (N, s k, wide), as they are in C.

    last (N, n, s, 1) are those rows of P and G; with Newton-Schulz the s = r rows of G.
    """
    a, b = (D, X) if tall else (X, D)
    a = scaled(a, last).mT
    return torch.bmm(a, b) if out is None else memory.product_to(out, a, b)


def rows_to_write(part, pairs):
    """The X of `write` for each matrix: that of its pairs, but for the first matrix `part.xw`, if there is one (`exp` features)."""
    return [x if i or part.xw is None else part.xw for i, (x, _) in enumerate(pairs)]


def gradient_point(how, M0, W, N):
    """The weights to take gradients at, M0 + W, as memory.gradients wants them; M0 (H, k, wide) and W (.., N, k, wide), or empty for zero."""
    if M0 and W:
        W = [start_plus(m, w) for m, w in zip(M0, W)]
    elif M0:
        W = [m.expand(N // len(m), -1, -1, -1).flatten(0, 1) for m in M0]
    return [turn(memory.cast(w, how.rule.dtype), t).flatten(0, -3) for w, t in zip(W, how.tall)]


def start_plus(m, w):
    """M0 (H, k, wide) + W (.., N, k, wide), in the precision of W."""
    m = memory.cast(m, w.dtype)
    return m + w if w.shape[-3] == len(m) else (m + w.unflatten(-3, (-1, len(m)))).flatten(-4, -3)


def of_heads(d, m):
    """The gradient of M0 (H, ..), for that of each of its copies (.. H, ..)."""
    return d if d.shape == m.shape and d.dtype == m.dtype else d.unflatten(0, (-1, len(m))).sum(0, dtype=m.dtype)


def carry(to, C, ends, across):
    """to += keepprod W + u S, and momprod S, for C (N, s, k, wide) with W and S, or W alone, and the last of these numbers."""
    to.addcmul_(C, ends)
    if across is not None:
        to[:, 0].addcmul_(C[:, 1], across)


def ball_factors(rule, W, tall, count):
    """What `Rule.bound` multiplies W by, which may be `count` matrices side by side."""
    if count > 1:
        parts = [(w, ball_factors(rule, w, False, 1)) for w in turn(W, tall).chunk(count, -1)]
        return turn(torch.cat([f.expand(-1, 1, w.shape[-1]) for w, f in parts], -1), tall)
    return torch.linalg.vector_norm(W, dim=(-2, -1), keepdim=True).reciprocal_().mul_(rule.ball).clamp_max_(1)


def nth_or_none(group, i):
    """The i-th of a group; None of an empty one, which stands for zeros."""
    return group[i] if group else None


def plus(a, b):
    """a + b, where a may be None, for zero."""
    return b if a is None else a + b


# ---------------------------------------------------------------------------------------------------------------------------
# Without Newton-Schulz.

def learn_chunk(how, part, M0, C, anchor, after):
    """One chunk (or a part of one) learns without Newton-Schulz: its last W_t (Eq 10, 12) and S_t (Eq 33), written to `after`.

        x_i, d_i = gradients of all n pairs at the anchor               one pass through the memory and back (Eq 16)
        W = X^T (P_last o D),   S = X^T (G_last o D)                    what the chunk adds
        W += keepprod W_0 + u S_0,   S += momprod S_0                   what it keeps of what was there before
        W *= ball / |W|                                                 choice 22, where the chunk ends, if |W| is above the ball

    C and `after`: W and S of each matrix, (N, s, k, wide) as `lay` has them. C = [] stands for zeros, M0 = [] for none, anchor = [] for the
    W of C. -> W and S in their own precision (`after` itself, but with a rule.dtype); flat, all tensors, for the gradient: z and f of
    memory.gradients; d of every matrix; x of every one but the first; balls.
    """
    rule, tall, closes, _ = how
    W = gradient_point(how, M0, anchor or [c[:, 0] for c in C], len(part.v))
    pairs, (z, f, _) = memory.gradients(rule.memory, rule.loss, W, part.xk, part.v, rule.norm)        # Eq 16: all at the anchor
    balls, ends = [], [torch.empty_like(a, dtype=part.coef.dtype) if rule.dtype else a for a in after]
    for i, (x, (_, d), end) in enumerate(zip(rows_to_write(part, pairs), pairs, ends)):
        write(x, d, part.last, tall[i], end.flatten(1, 2))
        if C:
            carry(end, C[i], part.ends, part.across)
        if closes and rule.ball:
            balls.append(ball_factors(rule, end[:, 0], tall[i], 1 if i else memory.firsts(rule.memory)))
            end[:, 0].mul_(balls[i])
        if rule.dtype:
            after[i].copy_(end)
    return ends, (z, f, *(d for _, d in pairs), *(x for x, _ in pairs[1:]), *balls)


def read_chunks(how, part, pairs, C, M0):
    """What all tokens read, each at its own W_t, of any number of chunks (N, ..): layer by layer, as an MLP is computed.

        z = r_t (keepprod_t W_0 + u_t S_0 + M0)  +  (P o R X^T) D       the memory before the chunk; and what the chunk wrote up to t
        r = gelu(z)                                                     the rows that read the next matrix; of a gated memory gelu(z) * z', Eq 43

    C and M0 of each matrix, or empty, for zero.
    -> z of the last matrix (N, c, D); for the gradient: z of the first matrix and R X^T of the last (None for a linear memory), then what
    read_carried keeps of each.
    """
    rows, RX, z, zq, reads = part.xq, part.qk, None, None, [None] * len(pairs)
    for i, (x, d) in enumerate(pairs):
        if i:
            zq, rows, RX = z, memory.hidden(how.rule.memory, z), None
        RX = torch.bmm(rows, x.mT) if RX is None else RX
        z, reads[i] = read_carried(rows, nth_or_none(C, i), part.coef, nth_or_none(M0, i), how.tall[i])
        z = memory.add_product(z, part.P * RX, d)
    return z, zq, None if zq is None else RX, *reads


def plain_chunks(how, parts, M0, C, anchor, kept=None):
    """All chunks -> what is read (chunks, N, c, D), C at the end. `kept` gets what the gradient needs: first C before each chunk and
    after the last (chunks + 1, N, ..), then of each stretch.
    """
    (count, N, _, D), c, s, alone = parts.v.shape, parts.coef.shape[2], parts.ends.shape[2], not C
    cuts = stretches(parts, C or M0, alone)
    room = 1 + (count if kept is not None else longest(cuts))
    Cs = [w.new_empty(room, N, s, *w.shape[-2:], dtype=how.rule.dtype) for w in C or M0]
    for a, b in zip(Cs, C):
        a[0] = b
    if kept is not None:
        kept.append(Cs)
    y, starts = parts.v.new_empty(N, count, c, D).transpose(0, 1), repeated(how, M0, N, longest(cuts))
    for now in cuts:
        at, size = now.start if kept is not None else 0, now.stop - now.start    # without a gradient to come, all stretches share the room of one
        zero = alone and not now.start                        # W and S before this stretch, then of one chunk: no products with them
        part, learned, slots = parts.each(lambda a: a[now]), [], list(zip(*(a[at:].unbind(0) for a in Cs)))
        for j, one in enumerate(part.split()):
            before = [] if zero else slots[j]
            # With a rule.dtype C itself goes on in its own precision; what is kept of it is half as much to read. Without one C and an anchor that is
            # a view of it must not both be arguments: of views that overlap, a compiled learn_chunk is wrong in silence
            if how.rule.dtype:
                C, saved = learn_chunk(how, one, M0, C, anchor or [w[:, 0] for w in before], slots[j + 1])
            else:
                C, saved = learn_chunk(how, one, M0, before, anchor, slots[j + 1])
            learned.append(saved)
        z, f, *more = (joined(one) for one in zip(*learned))
        part = part._replace(v=None).each(merged)             # reading needs no v, which this might copy
        errors, rows, balls = grouped(more, (len(how.tall), len(how.tall) - 1))
        pairs = list(zip([part.xk, *rows], errors))
        before = [] if zero else [merged(a[at: at + size]).flatten(1, 2) for a in Cs]
        out, *reads = read_chunks(how, part, pairs, before, [m[: size * N] for m in starts])
        y[now] = out.unflatten(0, (-1, N))
        if kept is not None:
            kept.append((z, f, errors[-1], *reads, *balls))
        elif now.stop < count:
            for a in Cs:
                a[0] = a[size]
    return y, [c.clone() for c in C]


def plain_run(rule, state, parts, B):
    """Chunks without Newton-Schulz, of B sequences: the state before them, one Part for all

    -> what the last matrix produces (chunks, N, c, D), and the state after them.
    """
    count, c = len(parts.v), parts.xq.shape[2]
    groups = [memory.pack(group) for group in (state.M0, state.W, state.S, state.anchor)]
    tall = tuple(w.shape[-2] > w.shape[-1] for w in groups[1])
    M0, W, S, anchor = (lay(group, tall) for group in groups)
    C = [] if state.zero else [torch.stack(ws, 1) for ws in zip(*([W, S] if S else [W]))]
    if state.zero or not state.pos:                           # the anchor is W
        anchor = []
    how = How(rule, tall, (state.pos + c) % rule.chunk == 0)
    z, C = run(plain_chunks, plain_chunks_backward, how, parts, M0, C, anchor)
    back = lambda j: memory.unpack(unlay([a[:, j] for a in C], tall, B), memory.firsts(rule.memory))
    return z, advance(rule, state, back(0), back(1) if state.S else (), count * c)


# ---------------------------------------------------------------------------------------------------------------------------
# With Newton-Schulz.

def padding(pos, length, every):
    """How many tokens to fill up the first block of a chunk with, if it begins at its pos-th token, and the last; a single block is
    taken as it is.
    """
    return (pos, -(pos + length) % every) if pos + length > every else (0, 0)


def in_blocks(a, blocks, front, back):
    """Rows (N, c, ..) of chunks -> (N blocks, m, ..) of their blocks, filled up (`padding`)."""
    a = F.pad(a, (0, 0, front, back)) if front or back else a
    return a.reshape(len(a) * blocks, -1, a.shape[2])


def advance_blocks(shares, W, o):
    """Eq 32 from block to block: W before the first (or None, for a zero and a single block), O_j (N, blocks, k, wide)

    -> W_j and O_j (N, blocks, 2, k, wide), or O_j alone for a W that is zero; W after the last block.
    """
    if o.shape[1] == 1:                                       # W_0 and O_0, each times its share: no work for a product
        of_W, of_O = shares.view(-1, 2, 1, 1).unbind(1)
        o = o[:, 0]
        if W is None:
            return o[:, None, None], of_O * o
        return torch.stack([W, o], 1)[:, None], (of_O * o).addcmul_(of_W, W)
    after = torch.bmm(shares[:, :, 1:], o.flatten(2)).view(o.shape)
    after.addcmul_(shares[:, :, :1, None], W[:, None])        # not by the product: W stays float32 where products are TF32
    return torch.stack([torch.cat([W[:, None], after[:, :-1]], 1), o], 2), after[:, -1]


class Fast(NamedTuple):
    """What chunks with Newton-Schulz carry, of each matrix as `lay` has it; or its gradient."""
    W: list                                                   # [] for zero
    S: list                                                   # [] for zero, or no momentum
    sums: list                                                # S_t summed over the block in progress, to which its other tokens are added, or,
                                                              # between two, over the last one, for NS of the next; [] for muon_every 1
    O: list                                                   # NS of the block in progress; [] if the next one takes it anew


class MuonLearned(NamedTuple):
    """What the gradient of muon_learn needs of a chunk but its pairs."""
    S: list                                                   # before the chunk
    seen: list                                                # what Newton-Schulz sees (N, blocks, k, wide)
    balls: list
    ns: list                                                  # what Newton-Schulz saves


def momentum_of_blocks(how, part, pairs, fast):
    """The S_t of a chunk, summed over each of its blocks, with what an earlier part of the chunk had of the first (N, blocks, k, wide) of each
    matrix; its last S_t, or [] without momentum.
    """
    rows, G = [], part.G.mT.contiguous()[..., None]           # (N, n, r, 1)
    for i, (x, d) in enumerate(memory.unpacked_pairs(how.rule.memory, pairs)):
        x, d = memory.cast(x, G.dtype), memory.cast(d, G.dtype)
        with exact(how.rule, G.device):                       # rounded, an S of low rank has a full one: Newton-Schulz multiplies what should be 0
            s = write(x, d, G, how.tall[i]).unflatten(1, (G.shape[2], -1))       # all rows in one product
        if fast.S:
            s.addcmul_(part.momprod[..., None], fast.S[i][:, None])              # Eq 33
        if fast.sums and how.pos:
            s[:, 0].add_(fast.sums[i])
        rows.append(s)
    if part.momprod is None:
        return rows, []
    return [s[:, :-1] for s in rows], [s[:, -1] for s in rows]


def muon_learn(how, part, M0, fast, anchor):
    """One chunk (or a part of one) learns, with Newton-Schulz every `muon_every` tokens; it begins `pos` tokens into a block.

    `fast`: what there was before it. An O is given if the first block does not take Newton-Schulz anew: it is in progress, or there is none
    before it.
    -> W_j and O_j of its blocks, as `advance_blocks` has them; Fast after it; for its gradient, flat: what memory.gradients saves, what
    Newton-Schulz sees (one block less with an O), the last S_t, what bounds each matrix, what Newton-Schulz saves.
    """
    (rule, tall, closes, pos), (W, _, sums, O), c = how, fast, part.xq.shape[1]
    at = memory.pack(gradient_point(how, M0, anchor or W, len(part.v)))
    pairs, saved = memory.gradients(rule.memory, rule.loss, at, part.xk, part.v, rule.norm)      # Eq 16: all at the anchor
    rows, S = momentum_of_blocks(how, part, pairs, fast)
    seen = rows                                               # Eq 40: S_t itself
    if rule.muon_every > 1:                                   # choice 15: for each block without an O, the sum of the one before it
        seen = [s[:, :-1] for s in rows]
        if not O:
            seen = [torch.cat([a[:, None], s], 1) if s.shape[1] else a[:, None] for a, s in zip(sums, seen)]
        sums = [s[:, -1] for s in rows]
    new, ns = seen, []
    if seen[0].shape[1]:
        with exact(rule, part.G.device):
            new, ns = orthogonalize(seen, *rule.ns_args(), rule.ns_gram)
    if O:
        new = [torch.cat([old[:, None], o], 1) for old, o in zip(O, new)]
    if not W and new[0].shape[1] > 1:
        W = [torch.zeros_like(o[:, 0]) for o in new]
    with exact(rule, part.G.device):
        held, W = zip(*(advance_blocks(part.shares, nth_or_none(W, i), o) for i, o in enumerate(new)))
    held, balls = [memory.cast(h, rule.dtype) for h in held], []
    if closes and rule.ball:
        balls = [ball_factors(rule, w, t, 1) for w, t in zip(W, tall)]
        W = [w * ball for w, ball in zip(W, balls)]
    if torch.compiler.is_compiling():                         # inductor may lay them otherwise than the next chunk's graph expects
        W = [w.contiguous() for w in W]
    O = [o[:, -1] for o in new] if (pos + c) % rule.muon_every and not closes else []
    return held, Fast(W, S, sums, O), (*saved, *seen, *S, *balls, *ns)


def muon_held(held, coef):
    """What the blocks of all chunks read: W_j and O_j; what is zero is left out.

    held (chunks N, blocks, s, k, wide), coef (chunks N, blocks, m, 2, 1) -> (chunks N blocks, s k, wide), the coefficients.
    """
    coef = coef.flatten(0, 1)[:, :, -held[0].shape[2]:]       # of O_j alone, if W_0 is zero
    return [h.flatten(0, 1).flatten(1, 2) for h in held], coef


def muon_read(how, C, coef, M0, xq):
    """What all tokens of any number of chunks read, xq (N, c, E), block by block: r_t W_t = r_t (since_t W_j + own_t O_j + M0).

    C and coef of muon_held, M0 `repeated` for all blocks.
    -> (N, c, D); for the gradient, what the hidden units are made of, before gelu (or None), and what read_carried keeps.
    """
    (rule, tall, _, pos), (N, c, _), reads = how, xq.shape, [None] * len(C)
    fill = padding(pos, c, rule.muon_every)

    def read(i, rows):
        z, reads[i] = read_carried(in_blocks(rows, len(coef) // N, *fill), C[i], coef, nth_or_none(M0, i), tall[i])
        return z.reshape(N, -1, z.shape[2])[:, fill[0]: fill[0] + c]

    if rule.memory == "linear":
        return read(0, xq), None, *reads
    z = torch.cat([read(0, xq), read(1, xq)], -1) if memory.firsts(rule.memory) == 2 else read(0, xq)
    return read(-1, memory.hidden(rule.memory, z)), z, *reads


def muon_chunks(how, parts, M0, anchor, *fast, kept=None):
    """All chunks -> what is read (chunks, N, c, D); W, S, the sum of S_t and O at the end. `kept` gets what the gradient needs: of each
    stretch, then of each of its chunks.
    """
    (count, N, _, D), c, ones = parts.v.shape, parts.xq.shape[2], parts.split()
    y, fast = parts.v.new_empty(N, count, c, D).transpose(0, 1), Fast(*fast)
    cuts = stretches(parts, fast.W or M0, not fast.W)
    starts = repeated(how, M0, N, longest(cuts), parts.coef.shape[2])
    for now in cuts:
        held, learned = [], []
        for one in ones[now]:
            blocks, fast, saved = muon_learn(how, one, M0, fast, anchor)
            held.append(blocks)
            learned += [] if kept is None else [saved]
        held = [joined(a) for a in zip(*held)]
        C, coef = muon_held(held, merged(parts.coef[now]))
        out, *reads = muon_read(how, C, coef, [m[: len(coef)] for m in starts], merged(parts.xq[now]))
        y[now] = out.unflatten(0, (-1, N))
        if kept is not None:
            kept += [(*held, *reads), *learned]
    return y, [a.clone() for group in fast for a in group]


def muon_run(rule, state, parts, B):
    """Chunks with Newton-Schulz; arguments and returns of plain_run."""
    count, c, pos = len(parts.v), parts.xq.shape[2], state.pos
    tall = tuple(w.shape[-2] > w.shape[-1] for w in state.W)
    rule = rule._replace(ns_gram=rule.ns_gram and exact_products(parts.v.device))
    how = How(rule, tall, (pos + c) % rule.chunk == 0, pos % rule.muon_every)
    M0, W, S, sums, O, anchor = (
        lay(group, tall) for group in (state.M0, state.W, state.S, state.sums, state.O, state.anchor))
    if rule.muon_every > 1 and not sums:                      # no block before the first: 0, for NS(0), and nothing is written
        O = [torch.zeros_like(w) for w in W]
    if state.zero:
        W, S = [], []
    if state.zero or not pos:                                 # the anchor is W
        anchor = []
    z, after = run(muon_chunks, muon_chunks_backward, how, parts, M0, anchor, W, S, sums, O)
    sizes = len(tall), len(tall) if state.S else 0, len(tall) if rule.muon_every > 1 else 0
    W, S, sums, O = (tuple(unlay(group, tall, B)) for group in grouped(after, sizes))
    return z, advance(rule, state, W, S, count * c, O, sums)


# ---------------------------------------------------------------------------------------------------------------------------
# Many chunks at a time, and all of them as one step of autograd's.

# Numbers; measured on a CPU, where what is compiled has fewer temporaries; for a GPU a guess: kernels of some 30 us
AT_ONCE = dict(cpu=120_000, compiled=240_000, cuda=2**24)


def stretches(parts, weights, alone):
    """The chunks that are read together, as slices of all; the first is by itself if it has to be `alone`.

    Together they share the calls of some fifty operations, but on a CPU a temporary should still be in the cache when it is read: so it is
    to have at most AT_ONCE numbers, of N n rows a chunk, each as long as the widest side of a weight (`lay`).
    """
    (count, N, n, _), kind = parts.v.shape, "cuda" if parts.v.is_cuda else "compiled" if Chunks.compiled else "cpu"
    numbers, first = N * n * max(w.shape[-1] for w in weights), int(alone)
    size = max(1, AT_ONCE[kind] // numbers)
    if Chunks.compiled:                                       # each size is a shape to compile
        size = even(count - first, size)
    return [slice(0, 1)] * first + [slice(j, min(j + size, count)) for j in range(first, count, size)]


def even(count, size):
    """How large to make the parts of `count`: the largest divisor of `count` in (size // 2, size], so that all are equal; if there is none, `size`."""
    return next((s for s in range(min(size, count), size // 2, -1) if count % s == 0), size)


def longest(cuts):
    return max(now.stop - now.start for now in cuts)


def repeated(how, M0, N, count, blocks=1):
    """Each (H, k, wide) for so many chunks of N, and blocks of them, for products -> (count N blocks, k, wide)."""
    return [memory.cast(m, how.rule.dtype)[None, :, None].expand(count * N // len(m), -1, blocks, -1, -1).flatten(0, 2) for m in M0]


def merged(a):
    """(chunks, N, ..) -> (chunks N, ..)"""
    return a.flatten(0, 1)


def joined(tensors):
    """Tensors (N, ..), or None, of every chunk -> (chunks N, ..)."""
    return tensors[0] if len(tensors) == 1 or tensors[0] is None else torch.cat(tensors)


def separate(tree, count):
    """(chunks N, ..) -> `count` tensors (N, ..); of a tuple of such, `count` tuples."""
    if tree is None:
        return [None] * count
    if isinstance(tree, torch.Tensor):
        return tree.chunk(count)
    each = zip(*(separate(a, count) for a in tree)) if tree else [()] * count
    return [type(tree)(*one) for one in each] if hasattr(tree, "_fields") else [tuple(one) for one in each]


def advance(rule, state, W, S, length, O=(), sums=()):
    """The state `length` tokens on; at a chunk boundary the anchor moves to W."""
    pos = (state.pos + length) % rule.chunk
    return state._replace(W=W, S=S, anchor=state.anchor if pos else W, O=O if pos else (), sums=sums, pos=pos, zero=False)


def run(forward, backward, how, parts, *groups):
    """forward(how, parts, *groups), with a gradient if there may be one -> what is read, the matrices at the end."""
    if not torch.is_grad_enabled():                           # detached as in Chunks: compiled, a parameter would be another graph
        with below_autograd():
            return forward(how, parts, *([a.detach() for a in group] for group in groups))
    sizes = [len(group) for group in (parts, *groups)]
    y, *after = Chunks.apply(forward, backward, how, sizes, *parts, *(a for group in groups for a in group))
    return y, after


class Chunks(torch.autograd.Function):
    """All chunks of a run: they learn one after the other and are read many at a time; and their gradient.

    Autograd of the same lines takes twice as long and keeps more: to it each product, sum and view is a step of its own, and it
    keeps what is cheaper to compute again. `forward` and `backward` are plain_chunks and its gradient, or muon_chunks and its; `how`
    their first argument; then come the fields of Part and groups of matrices (M0, W, ..), of `sizes`. Returns what the last matrix produces
    (chunks, N, c, D), then the groups at the end.
    """
    compiled = False                                          # by omega.compile_chunks

    @staticmethod
    def forward(ctx, forward, backward, how, sizes, *tensors):
        kept = []
        parts, *groups, _ = grouped([a if a is None else a.detach() for a in tensors], sizes)
        with below_autograd():
            y, after = forward(how, Part(*parts), *groups, kept=kept)
        ctx.gradient, ctx.how, ctx.sizes, ctx.lengths = backward, how, sizes, [len(one) for one in kept]
        ctx.save_for_backward(*tensors, *(a for one in kept for a in one))
        ctx.set_materialize_grads(False)
        return y, *after

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dafter):
        if Chunks.compiled:                                   # on CUDA this is another thread, and each has limits of its own
            compile_every_shape()
        parts, *groups, kept = grouped(ctx.saved_tensors, ctx.sizes)
        parts, (*kept, _) = Part(*parts), grouped(kept, ctx.lengths)
        if dy is None:                                        # what was read is not used
            dy = parts.v.new_zeros(*parts.xq.shape[:3], parts.v.shape[-1])
        grads = parts.each(empty_like)
        with memory.autocast(dy.device, ctx.how.rule.dtype), below_autograd():           # as in forward (omega.omega)
            dgroups = ctx.gradient(ctx.how, parts, grads, kept, dy, dafter, *groups)
        return None, None, None, None, *grads, *(a for group in dgroups for a in group)


def below_autograd():
    """Within, autograd is not asked what it thinks of each view: a third of what a view costs. Not public, so torch may drop the name."""
    return getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", nullcontext)()


def compile_every_shape():
    """Every shape is compiled: by default the ninth would be eager."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000


def grouped(items, sizes):
    """The first items, so many a group; then a group of all others."""
    items = iter(items)
    return *(list(islice(items, n)) for n in sizes), list(items)


# ---------------------------------------------------------------------------------------------------------------------------
# From here on the gradient of all that, written out for speed. A first reading needs none of it: autograd of omega_chunk says the same.

def empty_like(a):
    """An empty tensor for the gradient of a, contiguous or feature-major as a is."""
    return a.mT.new_empty(a.mT.shape).mT if memory.feature_major(a) else a.new_empty(a.shape)


def put(grads, **fields):
    """Writes (chunks N, ..) to the (chunks, N, ..) of a Part, or zeros for None."""
    for name, value in fields.items():
        to = getattr(grads, name)
        if to is not None:
            to.zero_() if value is None else to.copy_(value.view_as(to))


def put_products(to, pairs, start=None):
    """to = start + the sum of g W^T, the gradient of x where each g is that of x W; `to` lies as x does (memory.transposed_product)."""
    if start is not None:
        to.copy_(start)
    for g, W in pairs:
        out, a, b = (to.mT, W, g.mT) if memory.feature_major(to) else (to, g, W.mT)
        start = memory.product_to(out, a, b) if start is None else memory.add_product(out, a, b)
    if start is None:
        to.zero_()


def dots(t, a):
    """t (N, n, s k), a (N, n, k) -> (N, n, s, 1): the gradient of coef in `scaled` and in `combined`."""
    return (t.view(*a.shape[:2], -1, a.shape[2]) * a[:, :, None]).sum(-1, keepdim=True)


def read_carried_backward(R, C, coef, M0, tall, reads, dz):
    """The gradient of read_carried, from dz (N, c, out) -> dR, dC, dcoef, dM0; dC, dcoef are None without C, dM0 without M0.

    dC is two factors, whose product is best written straight to where it ends.
    """
    dR = dM0 = None
    if M0 is not None:
        dR, dM0 = memory.transposed_product(dz, turn(M0, tall), R), memory.outer([(R, dz)], tall)
    if C is None:
        return dR, None, None, dM0
    if tall:
        dreads = scaled(dz, coef)
        return memory.transposed_product(dreads, C.mT, R, dR), (dreads.mT, R), dots(reads, dz), dM0
    dscaled = torch.bmm(dz, C.mT)
    return combined(dscaled, coef, dR), (scaled(R, coef).mT, dz), dots(dscaled, R), dM0


def write_backward(X, D, last, tall, dC):
    """The gradient of write, from dC (N, s k, wide) -> dX, dD, dlast, as X, D, last are."""
    a, b = (D, X) if tall else (X, D)
    dscaled = torch.bmm(b, dC.mT)
    da, db = combined(dscaled, last), memory.transposed_product(scaled(a, last), dC.mT, b)
    return *((db, da) if tall else (da, db)), dots(dscaled, a)


def frobenius(a, b):
    """The inner product of two matrices, (.., k, wide) -> (.., 1, 1). (As a product of rows this long it takes oneDNN four times as long.)"""
    return (a * b).sum((-2, -1), keepdim=True)


def carry_backward(dto, dC, ends, across):
    """Adds to dC what it gets through carry."""
    dC.addcmul_(dto, ends)
    if across is not None:
        dC[:, 1].addcmul_(dto[:, 0], across)


class Learned(NamedTuple):
    """What the gradient of learn_chunk needs: what the chunk has learned, and the gradients that reading it has given."""
    again: memory.Recomputed
    writes: list                                              # the x that `write` had of each matrix
    rows: list                                                # what it made of the narrow side by `scaled`
    balls: list                                               # what bounds each W before the chunk
    dd: list                                                  # the gradient of each d
    da: torch.Tensor | None                                   # and of the last x; None for a linear memory


def learn_chunk_backward(how, part, learned, carried, dC, dafter, low):
    """The gradient of learn_chunk, as far as it has to go from chunk to chunk.

    dafter (N, s, k, wide) of each matrix: that of W and S after the chunk, before the ball, or () for none; `low` is the same for products, in
    rule.dtype. dC (of W and S before the chunk), dd and da hold what reading has said of them, and this adds to it. `carried`: the chunk
    took gradients at the W of C itself (not at an anchor, nor at zero), so dW is a part of dC.
    -> the dafter of the chunk before (dC itself; with a rule.dtype a copy in float32, and dC is that rounded, its `low`); gradients of v and W;
    dz, where dz W[0]^T is the rest of that of xk; the gradient of Part.last, but for a first matrix that is not tall.
    """
    (rule, tall, *_), (again, writes, rows, balls, dd, da), dlast = how, learned, None
    if torch.compiler.is_compiling():                         # else what becomes of them would be written back
        dd, da = [d.clone() for d in dd], None if da is None else da.clone()
    dlow, dC = dC, [memory.cast(d, part.coef.dtype) for d in dC]
    for i, (x, end) in enumerate(zip(writes, low)):
        if dC:
            carry_backward(dafter[i], dC[i], part.ends, part.across)
        end = end.flatten(1, 2)
        d = again.pairs[i][1]
        if tall[i]:
            reads = torch.bmm(x, end.mT)
            dlast = plus(dlast, dots(reads, d))
            combined(reads, part.last, dd[i])
            if i:
                memory.add_product(da, rows[i], end)
        else:
            memory.add_product(dd[i], rows[i], end)
            if i:
                reads = torch.bmm(d, end.mT)
                dlast = plus(dlast, dots(reads, x))
                combined(reads, part.last, da)
    dW, dz, dv = memory.gradients_backward(rule.memory, rule.loss, again, part.v, rule.norm, dd, da)
    dW = [memory.outer(group, t) for group, t in zip(dW, tall)]
    if carried:
        for c, w in zip(dC, dW):
            c[:, 0].add_(w)
    for c, ball in zip(dC, balls):
        c[:, 0].mul_(ball)
    for d, c in zip(dlow, dC if rule.dtype else ()):
        d.copy_(c)
    return dC, dv, dW, dz, dlast


def write_rest_backward(how, part, pairs, C, dlast, dafter):
    """The rest of learn_chunk's gradient, for any number of chunks at once; C and dafter (N, s, k, wide) of each matrix, before and after.

    -> gradients of the x of the first `write` (None if it is tall: that is a product), of Part.last, Part.ends and Part.across. dlast: what
    learn_chunk_backward has of Part.last's.
    """
    tall, dx, dends, dacross = how.tall, None, None, None
    for i, (x, (_, d), dto) in enumerate(zip(rows_to_write(part, pairs), pairs, dafter)):
        end = dto.flatten(1, 2)
        if not i and not tall[i]:
            reads = torch.bmm(d, end.mT)
            dx, dlast = combined(reads, part.last), plus(dlast, dots(reads, x))
        if C:                                                 # the gradient of `carry`
            dends = plus(dends, frobenius(dto, C[i]))
            if part.across is not None:
                dacross = plus(dacross, frobenius(dto[:, 0], C[i][:, 1]))
    return dx, dlast, dends, dacross


def read_chunks_backward(how, part, grads, W, saved, C, M0, zq, RX, reads, dz):
    """The gradient of read_chunks -> that of M0, of each d and of the last x; the pairs, as memory.Recomputed; what `write` made of the narrow
    side; two factors of the gradient of each C; where R X^T was made of xk (there is no qk), pairs (a, b), for a part a^T b of xk's. Of part: to
    `grads`.

    W: the weights at which the chunks took gradients, `saved` what memory.gradients left.
    """
    (rule, tall, *_), again = how, memory.gradients_again(how.rule.memory, W, part.xk, saved)
    dM0, dd, dC = ([None] * len(tall) for _ in range(3))
    dcoef = dP = dqk = da = None
    dxk = []
    for i, (x, d) in reversed(list(enumerate(again.pairs))):
        if i:
            rows = memory.hidden(rule.memory, zq)
        else:
            rows, RX = part.xq, torch.bmm(part.xq, x.mT) if part.qk is None else part.qk
        dQ, dd[i] = torch.bmm(dz, d.mT), torch.bmm((part.P * RX).mT, dz)         # z = .. + (P o RX) D
        dP, dRX = dQ * RX if dP is None else dP.addcmul_(dQ, RX), dQ.mul_(part.P)
        drows, dC[i], more, dM0[i] = read_carried_backward(
            rows, nth_or_none(C, i), part.coef, nth_or_none(M0, i), tall[i], reads[i], dz)
        dcoef = plus(dcoef, more)
        if not i and part.qk is not None:
            dqk = dRX
            continue
        drows = memory.add_product(drows, dRX, x)             # RX = R X^T
        if i:
            da, dz = torch.bmm(dRX.mT, rows), memory.hidden_backward(rule.memory, zq, drows)
        else:
            dxk = [(dRX, rows)]
    put(grads, xq=drows, qk=dqk, P=dP, coef=dcoef)
    rows = [scaled(d if t else x, part.last) for x, (_, d), t in zip(rows_to_write(part, again.pairs), again.pairs, tall)]
    return dM0, dd, da, again, rows, dC, dxk


def of_stretch(how, kept):
    """What plain_chunks keeps of a stretch: that of memory.gradients; zq and RX; the reads; balls, if there are any."""
    return grouped(kept, (3, 2, len(how.tall)))


def room_for_dC(how, part, C, dafter):
    """Room for the gradients of W and S before each chunk of a stretch and after its last, where `dafter` is put, if it is given.

    -> the room of each matrix (count + 1, N, s, k, wide); the same by chunk, for products; that after each chunk (count N, s, k, wide); dafter,
    which now is the end of the room, but with a rule.dtype. Without C (zero: the first chunk, by itself) there is no room but dafter itself.
    """
    count = len(part.v)
    room = [c.new_empty(count + 1, *c.shape[1:]) for c in C]
    slots = list(zip(*(d.unbind(0) for d in room))) or [(), ()]
    if C and count > 1 and not dafter:
        dafter = [torch.zeros_like(d, dtype=part.coef.dtype) for d in slots[-1]]
    if not (C and dafter):
        slots[-1] = [memory.cast(d, how.rule.dtype) for d in dafter]
        return room, slots, slots[-1], dafter
    given = [d.copy_(a) for d, a in zip(slots[-1], dafter)]
    if not how.rule.dtype:                                    # in the caller's list, which else would keep the stretch after this one
        dafter[:] = given                                     # a list, of slots[-1] itself: to torch.compile, what learn_chunk_backward returns
    return room, slots, [merged(d[1:]) for d in room], dafter


def plain_stretch_backward(how, part, grads, kept, balls, dy, dafter, M0, starts, C, anchor):
    """The gradient of one stretch of chunks -> those of M0, of C before it, of the anchor.

    What was read, of all chunks at once; what each has learned, from the last to the first; the rest of that, at once again.
    starts: M0 `repeated`, for as many chunks or more. Those of part are written to `grads`; dafter, that of C after the stretch, before the
    ball, is () or a list, which this changes; balls bounded each W before a chunk.
    """
    (count, N), flat = part.v.shape[:2], part._replace(v=None).each(merged)
    saved, (zq, RX), reads, _ = of_stretch(how, kept)
    at, carried = anchor or [c[:, :, 0] for c in C], bool(C and not anchor)
    room, slots, last, dafter = room_for_dC(how, part, C, dafter)

    W, C, starts = gradient_point(how, M0, at, N), [merged(c) for c in C], [m[: count * N] for m in starts]
    dM0, dd, da, again, rows, factors, dxk = read_chunks_backward(
        how, flat, grads.each(merged), W, saved, [c.flatten(1, 2) for c in C], starts, zq, RX, reads, merged(dy))
    for d in room:                                            # not in there: compiled, that would be a copy more; popped, to make room
        memory.product_to(merged(d[:count]).flatten(1, 2), *factors.pop(0))
    dM0 = [of_heads(d, m) for d, m in zip(dM0, M0)]

    learned = separate(Learned(again, rows_to_write(flat, again.pairs), rows, balls, dd, da), count)
    ones, dvs, rest = part.split(), grads.v.unbind(0), []
    for j in reversed(range(count)):
        dafter, dv, dW, *more = learn_chunk_backward(how, ones[j], learned[j], carried, slots[j], dafter, slots[j + 1])
        dvs[j].copy_(dv)
        dM0 = [m.add_(of_heads(w, m)) for m, w in zip(dM0, dW)]
        rest.append(more)
    dz, dlast = (joined(a) for a in zip(*reversed(rest)))
    pairs = again.pairs
    del again, learned, dd, da, rest, more                    # to make room: with short chunks the peak of memory is here

    put_writes(how, flat, grads, pairs, rows[0], C, last, dlast, [(a.mT, b.mT) for a, b in dxk] + [(dz, W[0])])
    return dM0, dafter, dW if anchor else []                  # with an anchor the run is of one chunk: dW is that one's


def put_writes(how, part, grads, pairs, narrow, C, last, dlast, to_xk):
    """Writes to `grads` those of last, ends and across, and, with the pairs `to_xk` of put_products, of xk and xw: what `write` and `carry` are left
    with when the chunks have gone by. narrow: what the first `write` made of the narrow side.
    """
    dx = dends = dacross = None
    if last and (C or not how.tall[0]):                       # else that has nothing to do
        dx, dlast, dends, dacross = write_rest_backward(how, part, pairs, C, dlast, last)
    to_xw = [(narrow, last[0].flatten(1, 2).mT)] if last and how.tall[0] else []
    if part.xw is None:
        put_products(merged(grads.xk), to_xw + to_xk, dx)
    else:
        put_products(merged(grads.xw), to_xw, dx)
        put_products(merged(grads.xk), to_xk)
    put(grads, last=dlast, ends=dends, across=dacross)


def plain_chunks_backward(how, parts, grads, kept, dy, dafter, M0, C, anchor):
    """The gradient of plain_chunks -> that of M0, C, anchor; that of parts is written to `grads`.

    dafter: that of C at the end, or None.
    """
    Cs, *kept = kept
    if any(d is not None for d in dafter):                    # the state at the end is used
        dafter = [torch.zeros_like(c[-1], dtype=parts.ends.dtype) if d is None else d.clone() for c, d in zip(Cs, dafter)]
    else:
        dafter = ()
    cuts, dM0, N = stretches(parts, C or M0, not C), [None] * len(M0), parts.v.shape[1]
    starts, balls = repeated(how, M0, N, longest(cuts)), [torch.cat(a) for a in zip(*(of_stretch(how, one)[3] for one in kept))]
    for d, ball in zip(dafter, balls):
        d[:, 0].mul_(ball[-N:])
    # of W before each chunk, not after it: a chunk completes the gradient of the W that it finds, which the chunk before it has bounded
    balls = [torch.cat([torch.ones_like(ball[:N]), ball[:-N]]) for ball in balls]
    for now, one in reversed(list(zip(cuts, kept))):
        before = [c[now] for c in Cs] if C or now.start else []
        more, dafter, danchor = plain_stretch_backward(
            how, parts.each(lambda a: a[now]), grads.each(lambda a: a[now]), one,
            [ball[N * now.start: N * now.stop] for ball in balls], dy[now], dafter, M0, starts, before, anchor)
        dM0 = [b if a is None else a.add_(b) for a, b in zip(dM0, more)]
    return dM0, dafter, danchor


def muon_write_backward(how, G, pairs, drows):
    """The gradient of what pairs write to S -> that of G, of phi(k), of the last x, of each d (packed)."""
    (rule, tall, *_), dG, dx, da, dd = how, None, None, None, []
    for i, (x, d) in enumerate(memory.unpacked_pairs(rule.memory, pairs)):
        dX, dD, more = write_backward(x, d, G, tall[i], drows[i].flatten(1, 2))
        dG = plus(dG, more)
        dd.append(dD)
        if i < memory.firsts(rule.memory):
            dx = plus(dx, dX)
        else:
            da = dX
    return dG, dx, da, memory.pack(dd)


def advance_blocks_backward(shares, held, dheld, dafter):
    """The gradient of advance_blocks, from that of W_j and O_j (dheld) and of W after the last block -> dshares, dO_j (N, blocks, k, wide), dW_0.

    A single block of a W_0 that is zero has O_j alone, and no dW_0.
    """
    if held.shape[1] == 1:
        held, (*dW, dO), s = held[:, 0], dheld[:, 0].unbind(1), held.shape[2]
        of_W, of_O = shares.view(-1, 2, 1, 1).unbind(1)
        dshares = F.pad((dafter[:, None] * held).sum((-2, -1)), (2 - s, 0))[:, None]
        return dshares, torch.addcmul(dO, dafter, of_O)[:, None], torch.addcmul(dW[0], dafter, of_W) if dW else None
    dafter = dafter[:, None]
    dafter = torch.cat([dheld[:, 1:, 0], dafter], 1).flatten(2)                  # W after a block is the next one's before
    WO = torch.cat([held[:, :1, 0], held[:, :, 1]], 1)
    dW = (shares[:, :, :1] * dafter).sum(1).view_as(WO[:, 0]).add_(dheld[:, 0, 0])
    dO = torch.bmm(shares[:, :, 1:].mT, dafter).view_as(WO[:, 1:]).add_(dheld[:, :, 1])
    return torch.bmm(dafter, WO.flatten(2).mT), dO, dW


def muon_learn_backward(how, part, learned, again, held, dheld, dfast):
    """The gradient of muon_learn, from that of `held`, and of W, S, sums and O after it.

    -> gradients of the fields of part, by name; of W, S, sums, O before it; of the weights at which it took gradients.
    """
    (rule, tall, _, pos), (S, seen, balls, ns), (dW, dS, dsums, dO) = how, learned, dfast
    G, dshares, count = part.G.mT.contiguous()[..., None], None, seen[0].shape[1]
    new, before = [], []
    for i, (one, done) in enumerate(zip(held, dheld)):
        more, d, w = advance_blocks_backward(part.shares, one, done, dW[i] * balls[i] if balls else dW[i])
        d = memory.cast(d, G.dtype)
        if dO:
            d[:, -1].add_(dO[i])
        dshares = plus(dshares, more)
        new.append(d)
        before += [] if w is None else [w]
    dW, dO, dbefore, dmomprod = before, [], [], None
    if new[0].shape[1] > count:                               # the first block had an O
        dO, new = [d[:, 0] for d in new], [d[:, 1:] for d in new]
    if count:
        with exact(rule, G.device):
            new = orthogonalize_backward(seen, ns, new, *rule.ns_args(), rule.ns_gram)
    if rule.muon_every > 1 and not dO:                        # else NS of the sums before it
        dbefore, new = [d[:, 0] for d in new], [d[:, 1:] for d in new]
    drows = [torch.cat(ds, 1) for ds in zip(new, *([d[:, None] for d in ds] for ds in (dsums, dS) if ds))]
    if rule.muon_every > 1 and pos:                           # a block in progress has gone on with them
        dbefore = [d[:, 0] for d in drows]
    dS = []
    if S:
        momprod = part.momprod[..., None]
        dS = [(d * momprod).sum(1) for d in drows]
        dmomprod = sum((d * s[:, None]).sum((-2, -1)) for d, s in zip(drows, S))
    dG, dx, da, dd = muon_write_backward(how, G, again.pairs, drows)
    dat, dz, dv = memory.gradients_backward(rule.memory, rule.loss, again, part.v, rule.norm, dd, da)
    dat = [[(x, half)] for x, d in dat[0] for half in d.chunk(memory.firsts(rule.memory), -1)] + dat[1:]
    dxk = memory.transposed_product(dz, again.W[0], part.xk, dx)
    named = dict(xk=dxk, v=dv, shares=dshares, G=dG.squeeze(-1).mT, momprod=dmomprod)
    return named, Fast(dW, dS, dbefore, dO), [memory.outer(group, t) for group, t in zip(dat, tall)]


def muon_read_backward(how, C, coef, M0, xq, z, reads, dy):
    """The gradient of muon_read -> that of C, coef, M0, xq."""
    (rule, tall, _, pos), (N, c, _), (dC, dcoef, dM0) = how, xq.shape, ([None] * len(C) for _ in range(3))
    fill = padding(pos, c, rule.muon_every)

    def read_backward(i, rows, dz):
        rows, dz = (in_blocks(a, len(coef) // N, *fill) for a in (rows, dz))
        drows, factors, dcoef[i], dM0[i] = read_carried_backward(rows, C[i], coef, nth_or_none(M0, i), tall[i], reads[i], dz)
        dC[i] = torch.bmm(*factors)
        return drows.reshape(N, -1, drows.shape[2])[:, fill[0]: fill[0] + c]

    if rule.memory == "linear":
        dxq = read_backward(0, xq, dy)
    else:
        dz = memory.hidden_backward(rule.memory, z, read_backward(-1, memory.hidden(rule.memory, z), dy))
        dxq = reduce(plus, [read_backward(i, xq, part) for i, part in enumerate(dz.chunk(memory.firsts(rule.memory), -1))])
    return dC, reduce(plus, dcoef), dM0, dxq


def muon_stretch_backward(how, part, grads, read, saved, dy, M0, anchor, starts):
    """The gradient of what the chunks of a stretch read -> of each, what muon_learn_backward wants: again, held, dheld; the gradient of M0.

    read, saved: what muon_chunks kept of the stretch, and memory.gradients of each chunk. starts: M0 `repeated`, for as many chunks or more.
    """
    (held, (z,), reads), count = grouped(read, (len(how.tall), 1)), len(saved)
    _, blocks, s, *_ = held[0].shape
    C, coef = muon_held(held, part.coef)
    starts = [m[: len(coef)] for m in starts]
    dC, dcoef, dM0, dxq = muon_read_backward(how, C, coef, starts, part.xq, z, reads, dy)
    put(grads, xq=dxq, coef=F.pad(dcoef, (0, 0, 2 - s, 0)))
    dC = [d.view_as(h) for d, h in zip(dC, held)]
    dM0 = [d.view(-1, len(m), blocks, *d.shape[1:]).sum(0, dtype=m.dtype).sum(1) for d, m in zip(dM0, M0)]      # both at once: slow
    W = [h[:, 0, 0].unflatten(0, (count, -1)) for h in held] if s == 2 else []
    at = memory.pack(gradient_point(how, M0, anchor or W, part.v.shape[0] // count))
    again = memory.gradients_again(how.rule.memory, at, part.xk, [joined(a) for a in zip(*saved)])
    return separate((again, held, dC), count), dM0


def muon_chunks_backward(how, parts, grads, kept, dy, dafter, M0, anchor, *fast):
    """The gradient of muon_chunks -> that of M0, anchor, W, S, sums, O; that of parts is written to `grads`.

    dafter: that of W, S, sums, O at the end, or None.
    """
    (rule, tall, closes, _), (W, S, *_) = how, fast
    k, kept, read, saved, learned, momentum = len(tall), iter(kept), [], [], [], parts.momprod is not None
    cuts = stretches(parts, W or M0, not W)
    sizes = 3, k, k if momentum else 0, k if closes and rule.ball else 0
    for now in cuts:
        read.append(next(kept))
        for one in islice(kept, now.stop - now.start):
            first, seen, last, balls, ns = grouped(one, sizes)
            saved.append(first)
            learned.append(MuonLearned(S, seen, balls, ns))
            S = last
    after = grouped(dafter, (k, k if momentum else 0, k if rule.muon_every > 1 else 0))
    # compiled, the first gradient of the sums has the strides of the later ones, slices of a larger tensor: else its call would be another graph
    zeros = lambda h, *inner: parts.coef.new_zeros(parts.v.shape[1], *inner, *h.shape[-2:])[(slice(None), *(0 for _ in inner))]
    inner = ((), (), read[-1][0].shape[1:2], ()) if Chunks.compiled else [()] * 4
    dfast = Fast(*([zeros(h, *i) if d is None else d for h, d in zip(read[-1], ds)] for ds, i in zip(after, inner)))
    dM0, starts = [None] * len(M0), repeated(how, M0, parts.v.shape[1], longest(cuts), parts.coef.shape[2])
    ones, onegrads = parts.split(), grads.split()
    for now, one in reversed(list(zip(cuts, read))):
        part, some = parts.each(lambda a: merged(a[now])), grads.each(lambda a: a[now])
        each, more = muon_stretch_backward(how, part, some, one, saved[now], merged(dy[now]), M0, anchor, starts)
        dM0 = [d if m is None else m.add_(d) for m, d in zip(dM0, more)]
        for j in reversed(range(now.start, now.stop)):
            named, dfast, dat = muon_learn_backward(how, ones[j], learned[j], *each[j - now.start], dfast)
            put(onegrads[j], **named)
            dM0 = [m.add_(of_heads(d, m)) for m, d in zip(dM0, dat)]
            if not anchor:
                dfast = dfast._replace(W=[w.add_(d) for w, d in zip(dfast.W, dat)])
        del each                                              # to make room for the next stretch's
    dW, dS, dsums, dO = dfast
    return dM0, dat if anchor else [], dW if W else [], dS, dsums, dO            # with an anchor the run is of one chunk: dat is that one's
