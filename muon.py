"""muon.py - Newton-Schulz, the locally second-order step of ATLAS (section 5): push the singular values of S toward 1.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X              ATLAS Eq 32, 40; Jordan et al. 2024

With Muon's coefficients five steps take singular values above |S|_F / 300 to about [0.68, 1.2], and more steps do not converge; the
classical cubic does converge to the nearest semi-orthogonal matrix, slowly (the paper's "k -> infinity").

`newton_schulz_ref` is this text. `newton_schulz` is the same function with its gradient written out, for several matrices in one
call, and where that pays (`plan`) on the small Gram matrix G = X X^T: a step multiplies X by Q = a I + b G + c G^2, so

    R <- Q R,   G <- Q G Q,   and at the end   X <- R X

All of R, Q, G are polynomials of the first G: symmetric, and they commute. But G squares the condition of X, and a step multiplies by a^2
what rounding has left of its smallest eigenvalues; after GRAM_STEPS steps G is taken from X again. (results/README.md: what five on one G cost
a gradient in float32.) `newton_schulz_of_pairs` is the same of a sum of few outer products.
"""
from functools import lru_cache
from itertools import islice

import torch

from memory import add_product, once_differentiable

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small singular values grow 3.4x a step
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}
GRAM_STEPS = 3                                                # steps on one Gram matrix


def newton_schulz_ref(S, steps=5, coefficients="muon", straight_through=False, dtype=None):
    """NS(S) as printed, on the short side, with autograd's own gradient: `newton_schulz` of one stack, without its checks."""
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz_ref(S.mT, steps, coefficients, straight_through, dtype).mT
    a, b, c = COEFFICIENTS[coefficients]
    start = S * inverse_norm(S)
    X = start.to(dtype or S.dtype)
    for _ in range(steps):
        G = X @ X.mT
        X = a * X + (b * G + c * (G @ G)) @ X
    X = X.to(S.dtype)
    return start + (X - start).detach() if straight_through else X


def inverse_norm(S):
    """1 / |S|_F, and 0 for a zero matrix, which so stays zero and passes no gradient."""
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    tiny = max(least_square(S.dtype, S.shape[-2:].numel()) ** 0.5, 2 / torch.finfo(S.dtype).max)     # below that float16 has no 1 / |S|
    return torch.where(norm > tiny, 1 / norm.clamp_min(tiny), 0)


def least_square(dtype, entries):
    """The least |S|^2 that does not count as zero: 1000 times the smallest normal number an entry, so that squares which underflow, or are
    flushed to zero, are no noticeable part of the sum. (bfloat16 and float16 are summed in float32.)
    """
    return 1e3 * torch.finfo(torch.promote_types(dtype, torch.float32)).tiny * entries


def newton_schulz(S, steps=5, coefficients="muon", straight_through=False, dtype=None):
    """NS(S), an odd polynomial of S with the singular vectors of S: (..., m, n) -> (..., m, n), any leading dimensions.

    S may be a tuple of such stacks, of any shapes: those that are iterated on their Gram matrices (`plan`) share one iteration if they have the
    same short side. Scale invariant: NS(c S) = NS(S) for c > 0, but |S|^2 has to fit the dtype; NS(0) = 0 with zero gradient. S counts
    as zero where |S|^2 is below `least_square` (of stacks that share an iteration: that of the largest): in float32 entries with a root mean square
    below 3.4e-18 (in float16 also an |S| below 3.1e-5). The outer gradient goes through (choice 14),
    or with `straight_through` past the iteration as if NS(S) were S / |S|_F. `dtype`: that of the iteration, if not that of S. Raises
    ValueError for unknown coefficients, and for less than one step. (The memory calls `orthogonalize` and its gradient: chunks.py; the outer
    optimizer calls this: train.Muon.)
    """
    stacks = S if isinstance(S, tuple) else (S,)
    out = NewtonSchulz.apply((steps, coefficients, straight_through, dtype, exact_products(stacks[0].device)), *stacks)
    return out if isinstance(S, tuple) else out[0]


def exact_products(device):
    """Do products of float32 keep float32? With TF32 or bfloat16 inside (torch.set_float32_matmul_precision) G's rounding would explode."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:                                      # set in torch's newer way, for each kind of device by itself
        precision = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    return precision in ("highest", "ieee") or device.type == "cpu" and exact_on_this_cpu(precision)


@lru_cache
def exact_on_this_cpu(precision):
    """Only some CPUs have other products than float32's: this tries one, once for each `precision` that is set."""
    a = torch.full((64, 64), 1 + 2**-12, dtype=torch.float32, device="cpu")      # 1 to TF32 and bfloat16
    return torch.mm(a, a)[0, 0].item() > 64.01


class NewtonSchulz(torch.autograd.Function):
    """`orthogonalize` as a step of autograd's."""

    @staticmethod
    def forward(ctx, how, *stacks):
        out, saved = orthogonalize(stacks, *how)
        ctx.how = how
        ctx.save_for_backward(*stacks, *saved)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dX):
        stacks, saved = ctx.saved_tensors[:len(dX)], ctx.saved_tensors[len(dX):]
        return None, *orthogonalize_backward(stacks, saved, dX, *ctx.how)


def checked(steps, coefficients):
    """a, b and c of these coefficients. ValueError for unknown ones, and for less than one step."""
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"unknown coefficients {coefficients!r}; choose one of {', '.join(COEFFICIENTS)}")
    if steps < 1:
        raise ValueError(f"Newton-Schulz takes at least one step, not {steps}")
    return COEFFICIENTS[coefficients]


def orthogonalize(stacks, steps, coefficients, straight_through, dtype, gram):
    """NS of each of the stacks, and, flat, what the gradient takes. `gram`: may it be on Gram matrices?"""
    polynomial = checked(steps, coefficients)
    out, saved = [None] * len(stacks), []
    for same, on_gram in plan(stacks, straight_through, dtype, gram):
        some = [flat(stacks[i]) for i in same]
        if on_gram:
            X, kept = iterate_on_gram(some, steps, *polynomial)
        else:
            X, kept = iterate(*some, steps, *polynomial, straight_through, dtype)
        saved += kept
        for i, x in zip(same, X):
            out[i] = x.view(stacks[i].shape)
    return out, saved


def orthogonalize_backward(stacks, saved, dX, steps, coefficients, straight_through, dtype, gram):
    """The gradient of each of the stacks, written out."""
    out, saved = [None] * len(stacks), iter(saved)
    for same, on_gram in plan(stacks, straight_through, dtype, gram):
        some, more = [flat(stacks[i]) for i in same], [flat(dX[i]) for i in same]
        if on_gram:
            dS = iterate_on_gram_backward(some, saved, more, steps, *COEFFICIENTS[coefficients][1:])
        else:
            dS = iterate_backward(*some, saved, *more, steps, *COEFFICIENTS[coefficients], straight_through)
        for i, d in zip(same, dS):
            out[i] = d.view(stacks[i].shape)
    return out


def plan(stacks, straight_through, dtype, gram):
    """Which stacks are iterated together -> their numbers, and whether on Gram matrices: one pair of these for each iteration."""
    inside = dtype or stacks[0].dtype
    plain = not gram or straight_through or inside in (torch.float16, torch.bfloat16) or inside != stacks[0].dtype
    sides = [min(S.shape[-2:]) for S in stacks]
    for side in sorted(set(sides)):
        same = [i for i, s in enumerate(sides) if s == side]
        if plain or all(max(stacks[i].shape[-2:]) < 2 * side for i in same):     # there it would not pay
            yield from (([i], False) for i in same)
        else:
            yield same, True


def flat(S):
    """(..., m, n) -> (N, m, n)"""
    return S.reshape(-1, *S.shape[-2:])


def tall(S):
    """Has S more rows than columns? Then the iteration is on S^T: the Gram matrix of the short side is the smaller one."""
    return S.shape[-2] > S.shape[-1]


def short(S):
    """S, or S^T, with no more rows than columns."""
    return S.mT if tall(S) else S


def with_product(y, A, B, beta=1.0, alpha=1.0):
    """beta y + alpha A B. torch.baddbmm begins with a copy of y, on a GPU; compiled, the sum is part of what comes next. And with alpha 0, as the
    cubic has it, torch (2.13, products by oneDNN) forgets beta.
    """
    if not alpha:
        return beta * y
    if torch.compiler.is_compiling():
        return beta * y + alpha * torch.bmm(A, B)
    return torch.baddbmm(y, A, B, beta=beta, alpha=alpha)


def iterate(S, steps, a, b, c, straight_through, dtype):
    """The iteration of newton_schulz_ref, for one stack (N, m, n)."""
    scale = inverse_norm(S)
    X, saved = short(S * scale).to(dtype or S.dtype), [scale]
    for _ in range(steps):
        G = torch.bmm(X, X.mT)
        P = with_product(G, G, G, b, c)                       # b G + c G^2
        saved += [] if straight_through else [X, G, P]
        X = with_product(X, P, X, a)                          # a X + P X
    X = X.to(S.dtype)
    return [X.mT if tall(S) else X], saved


def iterate_backward(S, saved, dX, steps, a, b, c, straight_through):
    """Each step is X_after = a X + P X with P = b G + c G^2 and G = X X^T, symmetric both; D is the gradient of X_after, then of X.

    dX = a D + P D + (dG + dG^T) X. dP and dG are twice their symmetric parts, which are all that counts: then dG stands for dG + dG^T.
    """
    scale = next(saved)
    if not straight_through:
        kept = [list(islice(saved, 3)) for _ in range(steps)]
        D = short(dX).to(kept[0][0].dtype)
        for X, G, P in reversed(kept):
            dP = doubled(torch.bmm(D, X.mT))
            dG = doubled(with_product(dP, dP, G, b / 2, c))   # b dP + c (dP G + G dP)
            D = with_product(with_product(D, P, D, a), dG, X)
        dX = (D.mT if tall(S) else D).to(S.dtype)
    start = S * scale
    return [scale * (dX - start * (start * dX).sum((-2, -1), keepdim=True))]     # through the norm


def inner(S, X):
    """S X^T on the short side of S: (s, s)."""
    return torch.bmm(S.mT, X) if tall(S) else torch.bmm(S, X.mT)


def times(R, S, into=None):
    """R S on the short side of S, for a symmetric R; added to `into`, in its place, if that is given."""
    a, b = (S, R) if tall(S) else (R, S)
    return torch.bmm(a, b) if into is None else add_product(into, a, b)


def all_times(R, stacks):
    """R S for each S of the stacks, whose R (all N, s, s) lie one behind the other."""
    return [times(r, S) for r, S in zip(R.split([len(S) for S in stacks]), stacks)]


def runs(steps):
    """The steps in parts of GRAM_STEPS, each on a Gram matrix of its own -> how many each has."""
    return [min(GRAM_STEPS, steps - first) for first in range(0, steps, GRAM_STEPS)]


def iterate_on_gram(stacks, steps, a, b, c):
    """NS of stacks of matrices with the same short side s, (N, m, n) each, on G (all N, s, s): the formulas of the module docstring.

    The first R is divided by |S|: the stacks come as they are.
    """
    X, saved = stacks, []
    for run, n in enumerate(runs(steps)):
        G, R, Gs, Qs = torch.cat([inner(x, x) for x in X]), None, [], []
        if not run:
            square = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]         # |S|^2
            tiny = least_square(G.dtype, max(S.shape[-2:].numel() for S in stacks))
            scale = torch.where(square > tiny, square.clamp_min(tiny).rsqrt(), 0)                # 1 / |S|
            G = G * scale.square()
        for i in range(n):
            Q = factor(G, a, b, c)
            Gs.append(G)
            Qs.append(Q)
            R = Q if R is None else torch.bmm(Q, R)
            if i < n - 1:
                G = torch.bmm(torch.bmm(Q, G), Q)
        R = R if run else R * scale
        X = all_times(R, X)
        saved += [R, *Gs, *Qs]
    return X, [scale, *saved]


def iterate_on_gram_backward(stacks, saved, dX, steps, b, c):
    """From the last run of steps to the first: with X = R X_before, dX_before = R dX + (dG + dG^T) X_before, where G = X_before X_before^T
    gets its gradient through R.

    G, Q and R are symmetric, so only the symmetric part of a gradient counts. dR, dQ and dG hold twice that: dG is dG + dG^T of the formula.
    """
    scale, Xs = next(saved), [stacks]
    kept = [(next(saved), list(islice(saved, n)), list(islice(saved, n))) for n in runs(steps)]
    for R, *_ in kept[:-1]:                                   # X before each run: a product each, for less memory
        Xs.append(all_times(R, Xs[-1]))
    for run, (X, (R, Gs, Qs)) in reversed(list(enumerate(zip(Xs, kept)))):
        dR = doubled(torch.cat([inner(d, x) for d, x in zip(dX, X)]))
        dG = gradient_of_G(Gs, Qs, dR if run else dR * scale, b, c)
        if not run:                                           # G = G0 / |S|^2, R has 1 / |S|, and |S|^2 is the trace of G0
            along = (dG * Gs[0]).sum((-2, -1), keepdim=True) + 0.5 * (dR * R).sum((-2, -1), keepdim=True)
            dG.diagonal(dim1=-2, dim2=-1).sub_(along[..., 0])
            dG = dG * scale.square()
        dX = [times(r, d, times(g, x)) for d, x, r, g in zip(dX, X, *(m.split([len(x) for x in X]) for m in (R, dG)))]
    return dX


def gradient_of_G(Gs, Qs, dR, b, c):
    """dG of the G that a run begins with, for that of the R it ends with."""
    Rs, dG = [None, Qs[0]], None                              # before each step
    for Q in Qs[1:-1]:
        Rs.append(torch.bmm(Q, Rs[-1]))
    for i in reversed(range(len(Gs))):
        G, Q = Gs[i], Qs[i]
        dQ = torch.bmm(dR, Rs[i]) if i else dR                                   # R = Q R_before
        if dG is not None:                                                       # G_after = Q G Q
            half = torch.bmm(dG, Q)
            dQ = torch.baddbmm(dQ, half, G, alpha=2)
        dQ4, dR = doubled(dQ), torch.bmm(Q, dR) if i else None                   # 4 times the symmetric part
        direct = with_product(dQ4, dQ4, G, b / 4, c / 2)      # Q = a I + b G + c G^2
        dG = doubled(direct if dG is None else torch.baddbmm(direct, Q, half, alpha=0.5))
    return dG


def factor(G, a, b, c):
    """Q = a I + b G + c G^2."""
    Q = with_product(G, G, G, b, c)
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    return Q


def doubled(A):
    """Twice the symmetric part."""
    return A + A.mT


def few_steps(steps, coefficients):
    """Few enough for newton_schulz_of_pairs, where pairs that cancel leave rounding errors, and each step multiplies them?

    The bound on a^steps is measured: with it float64 bears five steps of Muon's coefficients, 15 of the cubic.
    """
    return checked(steps, coefficients)[0] ** steps < 500


def newton_schulz_of_pairs(G, D, least, steps=5, coefficients="muon"):
    """NS of S = X^T D, a sum of w pairs, by way of w x w matrices: G = X X^T (N, w, w), D (N, w, n) -> K D (N, w, n) with NS(S) = X^T K D.

    Every iterate is X^T K D with a K that begins at 1 / |S|:

        H = D D^T,   |S|^2 = sum of G o H,   then `steps` times   B = K H K^T G,   K <- a K + (b B + c B^2) K

    K and B are polynomials of H G, so fewer products would do, on powers of it; but it is not symmetric, and its rounding would grow a
    millionfold. So each step looks at what the one before it has made. Where pairs cancel to 1 / r of their size rounding grows as r^3, and by
    a^2 a step: G and D should be in float64, `steps` few (`few_steps`), and an S below a thousandth of its pairs counts as one of that norm, which
    gives less than NS(S). An |S|^2 of at most `least` (`least_square`) counts as zero. Errors as of `newton_schulz`; the gradient is autograd's.
    """
    a, b, c = checked(steps, coefficients)
    H = torch.bmm(D, D.mT)
    square = (G * H).sum((-2, -1), keepdim=True).maximum(1e-6 * (G * H).diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])
    scale = torch.where(square > least, square.clamp_min(least).rsqrt(), 0)      # 1 / |S|
    K, KH, KG, one = None, scale * H, scale * G, torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    for i in range(steps):
        if i:
            KH, KG = torch.bmm(K, H), torch.bmm(K.mT, G)
        B = torch.bmm(KH, KG)
        P = with_product(B, B, B, b, c)
        K = with_product(K, P, K, a) if i else scale * (a * one + P)
    return torch.bmm(K, D)
