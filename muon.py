"""muon.py - Newton-Schulz, the locally second-order step of ATLAS (section 5): push the singular values of S toward 1.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X              ATLAS Eq 32, 40; Jordan et al. 2024

With Muon's coefficients five steps end with singular values in about [0.68, 1.2], and more steps do not converge; the
classical cubic does converge to the nearest semi-orthogonal matrix, slowly (the paper's "k -> infinity").

`newton_schulz_ref` is this text. `newton_schulz` is the same function on the small Gram matrix G = X X^T, for several
matrices in one call: a step multiplies X by Q = a I + b G + c G^2, so

    R <- Q R,   G <- Q G Q,   and once, at the end,   NS(S) = R S / |S|_F

All of R, Q, G are polynomials of the first G: symmetric, and they commute.
"""
import torch

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small singular values grow 3.4x a step
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}


def newton_schulz_ref(S, steps=5, coefficients="muon", straight_through=False, dtype=None):
    """NS(S) as printed, on the short side, with autograd's own gradient; arguments and returns of `newton_schulz`."""
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz_ref(S.mT, steps, coefficients, straight_through, dtype).mT
    a, b, c = COEFFICIENTS[coefficients]
    start = unit(S)
    X = start.to(dtype or S.dtype)
    for _ in range(steps):
        G = X @ X.mT
        X = a * X + (b * G + c * (G @ G)) @ X
    X = X.to(S.dtype)
    return start + (X - start).detach() if straight_through else X


def unit(S):
    """S / |S|_F; a zero matrix stays zero and passes no gradient."""
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    tiny = torch.finfo(S.dtype).tiny * 1e3
    return S * torch.where(norm > tiny, 1 / norm.clamp_min(tiny), 0)


def newton_schulz(S, steps=5, coefficients="muon", straight_through=False, dtype=None):
    """NS(S), an odd polynomial of S with the singular vectors of S: (..., m, n) -> (..., m, n), any leading dimensions.

    S may be a tuple of such stacks, of any shapes: all of the same short side then share one iteration. Scale invariant: NS(c S) =
    NS(S) for c > 0, but |S|^2 has to fit the dtype; NS(0) = 0 with zero gradient. The outer gradient goes through (choice 14), or
    with `straight_through` past the iteration as if NS(S) were S / |S|_F. `dtype`: that of the iteration, if not that of S. Raises
    ValueError for unknown coefficients.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"unknown coefficients {coefficients!r}; choose one of {', '.join(COEFFICIENTS)}")
    many = S if isinstance(S, tuple) else (S,)
    plain = straight_through or steps > 5 or (dtype or many[0].dtype) in (torch.float16, torch.bfloat16)
    out = [None] * len(many)
    for side in {min(s.shape[-2:]) for s in many}:
        same = [i for i, s in enumerate(many) if min(s.shape[-2:]) == side]
        if plain or all(max(many[i].shape[-2:]) < 2 * side for i in same):       # G squares the condition: only where it pays
            for i in same:
                out[i] = newton_schulz_ref(many[i], steps, coefficients, straight_through, dtype)
        else:
            stacks = [many[i].reshape(-1, *many[i].shape[-2:]) for i in same]
            for i, x in zip(same, GramNewtonSchulz.apply(steps, COEFFICIENTS[coefficients], *stacks)):
                out[i] = x.view(many[i].shape)
    return tuple(out) if isinstance(S, tuple) else out[0]


def gram(S, X):
    """S X^T on the short side of S."""
    return torch.bmm(S.mT, X) if S.shape[-2] > S.shape[-1] else torch.bmm(S, X.mT)


def times(R, S):
    """R S on the short side of S, for a symmetric R."""
    return torch.bmm(S, R) if S.shape[-2] > S.shape[-1] else torch.bmm(R, S)


class GramNewtonSchulz(torch.autograd.Function):
    """NS of stacks of matrices with the same short side s, (N, m, n) each, with its gradient written out.

    Autograd of the same lines costs about twice as much: the products are as small as s x s, and it has more of them. Of the steps
    it keeps G alone, from which backward makes Q and R again.
    """

    @staticmethod
    def forward(ctx, steps, abc, *stacks):
        G = torch.cat([gram(S, S) for S in stacks])
        square = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]             # |S|^2
        tiny = torch.finfo(G.dtype).tiny * 1e3
        scale = torch.where(square > tiny, square.clamp_min(tiny).rsqrt(), 0)    # 1 / |S|
        G, R, Gs = G * scale.square(), None, []
        for i in range(steps):
            Q = factor(G, *abc)
            Gs.append(G)
            R = Q if R is None else torch.bmm(Q, R)
            if i < steps - 1:
                G = torch.bmm(torch.bmm(Q, G), Q)
        P = R * scale
        ctx.abc, ctx.steps, ctx.sizes = abc, steps, [len(S) for S in stacks]
        ctx.save_for_backward(scale, P, *Gs, *stacks)
        return tuple(times(p, S) for p, S in zip(P.split(ctx.sizes), stacks))

    @staticmethod
    def backward(ctx, *dXs):
        """With P = R / |S|: X = P S, so dS = P dX + (dG + dG^T) S, where G = S S^T gets its gradient through P.

        All is symmetric, so gradients may be made so: then dG + dG^T = 2 dG.
        """
        (scale, P, *saved), n, (_, b, c) = ctx.saved_tensors, ctx.steps, ctx.abc
        Gs, stacks = saved[:n], saved[n:]
        Qs = [factor(G, *ctx.abc) for G in Gs]
        Rs = [None, Qs[0]]                                    # before each step
        for Q in Qs[1:-1]:
            Rs.append(torch.bmm(Q, Rs[-1]))
        dP = doubled(torch.cat([gram(dX, S) for dX, S in zip(dXs, stacks)])) * 0.5
        dR, dG = dP * scale, None                             # dG: twice the gradient of G, from here on
        for i in reversed(range(n)):
            G, Q = Gs[i], Qs[i]
            dQ = torch.bmm(dR, Rs[i]) if i else dR                               # R = Q R_before
            if dG is not None:                                                   # G_after = Q G Q
                half = torch.bmm(dG, Q)
                dQ = torch.baddbmm(dQ, half, G)
            dQ, dR = doubled(dQ), torch.bmm(Q, dR) if i else None
            direct = torch.baddbmm(dQ, dQ, G, beta=b / 2, alpha=c)               # Q = a I + b G + c G^2
            dG = doubled(direct if dG is None else torch.baddbmm(direct, Q, half, alpha=0.5))
        dG = dG * 0.5
        # G = G0 / |S|^2, P = R / |S|, |S|^2 = trace of G0
        along = (dG * Gs[0]).sum((-2, -1), keepdim=True) + 0.5 * (dP * P).sum((-2, -1), keepdim=True)
        dG = 2 * scale.square() * (dG - along * torch.eye(dG.shape[-1], dtype=dG.dtype, device=dG.device))
        parts = zip(dXs, stacks, P.split(ctx.sizes), dG.split(ctx.sizes))
        return None, None, *(times(p, dX) + times(g, S) for dX, S, p, g in parts)


def factor(G, a, b, c):
    """Q = a I + b G + c G^2."""
    Q = torch.baddbmm(G, G, G, beta=b, alpha=c)
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    return Q


def doubled(A):
    """Twice the symmetric part."""
    return A + A.mT
