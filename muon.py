"""muon.py - Newton-Schulz, the locally second-order step of ATLAS (section 5): push the singular values of S toward 1.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X              ATLAS Eq 32, 40; Jordan et al. 2024

With Muon's coefficients five steps end with singular values in about [0.68, 1.2], and more steps do not converge; the
classical cubic does converge to the nearest semi-orthogonal matrix, slowly (the paper's "k -> infinity").
"""
import torch

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small singular values grow 3.4x a step
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}


def newton_schulz(S, steps=5, coefficients="muon", straight_through=False):
    """NS(S), an odd polynomial of S with the singular vectors of S: (..., m, n) -> (..., m, n), any leading dimensions.

    Scale invariant: NS(c S) = NS(S) for c > 0; NS(0) = 0 with zero gradient. The outer gradient goes through (choice 14), or with
    `straight_through` sends the outer gradient past
    the iteration as if it were S / |S|_F. Raises ValueError for unknown coefficients.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"unknown coefficients {coefficients!r}; choose one of {', '.join(COEFFICIENTS)}")
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    tiny = torch.finfo(S.dtype).tiny * 1e3
    X = S * torch.where(norm > tiny, 1 / norm.clamp_min(tiny), 0)        # a zero matrix stays zero and passes no gradient
    if straight_through:
        return X + (_iterate(X.detach(), steps, COEFFICIENTS[coefficients]) - X).detach()
    return _iterate(X, steps, COEFFICIENTS[coefficients])


def _iterate(X, steps, abc):
    """a X + b (X X^T) X + c (X X^T)^2 X, `steps` times, for X (..., m, n)."""
    if X.shape[-2] > X.shape[-1]:                                        # X X^T on the short side
        return _iterate(X.mT, steps, abc).mT
    a, b, c = abc
    lead, X = X.shape[:-2], X.reshape(-1, *X.shape[-2:])
    if X.shape[-1] < 2 * X.shape[-2] or steps > 5 or X.dtype in (torch.float16, torch.bfloat16):
        for _ in range(steps):
            A = X @ X.mT
            H = torch.baddbmm(A, A, A, beta=b, alpha=c)                  # b A + c A^2
            X = torch.baddbmm(X, H, X, beta=a)
        return X.view(*lead, *X.shape[1:])
    # Much wider than tall: iterate on the small Gram matrix G = X X^T. A step multiplies X by a I + H, symmetric and commuting
    # with G, so G <- (a I + H) G (a I + H), and the product R of all steps meets X once, at the end. Rounding errors of G grow
    # with each step, so this is for few steps in float32 or better.
    G, R = X @ X.mT, None
    for i in range(steps):
        H = torch.baddbmm(G, G, G, beta=b, alpha=c)
        if R is None:
            R = H + a * torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
        else:
            R = torch.baddbmm(R, H, R, beta=a)
        if i + 1 < steps:
            G = torch.baddbmm(G, H, G, beta=a)
            G = torch.baddbmm(G, G, H, beta=a)
    X = R @ X
    return X.view(*lead, *X.shape[1:])
