"""muon.py - Newton-Schulz pushes singular values toward 1. ATLAS (section 5) applies it to the
momentum of the memory.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X        Eq 32, 40

The coefficients "muon" are from Jordan et al. 2024. Five steps take singular values above
|S|_F / 300 to about [0.68, 1.2]. More steps keep them there; they do not converge to 1. With the
coefficients "cubic" they do, slowly: X converges to the nearest semi-orthogonal matrix (the paper's
k -> infinity).

`newton_schulz_ref` is this text, and `newton_schulz` is the same in fewer operations. Where S is
not at hand, (X X^T) X = X (X^T X) helps: a step multiplies X from the right, by a polynomial Q of
the Gram matrix G = X^T X, which is small if X is tall:

    Q = a I + b G + c G^2,   X <- X Q,   G <- Q G Q

The product R of all Q depends on S^T S alone, and NS(S) = S R. `right_factor` returns R, from which
chunks.py takes NS(S_t) for each token t without ever having S_t itself.

G's eigenvalues are the squares of X's singular values, so small ones have few correct digits, and
each step magnifies their rounding errors. In float32, more than MOST_STEPS steps spoil R, and so
does TF32, the shorter float32 of GPUs. newton_schulz, which computes G anew in each step, bears it.

The outer optimizer Muon is in train.py. It uses the same function.
"""
import torch

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small ones grow 3.4x
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}
MOST_STEPS = dict(muon=6, cubic=15)                           # of right_factor: errors below 5e-4


def newton_schulz_ref(S, steps=5, coefficients="muon"):
    """Return NS(S), Eq 40, as printed: (.., m, n) -> (.., m, n). A tall S is transposed first, so
    that X X^T is the small product. The length of S does not matter: NS(2 S) = NS(S). Raises
    KeyError for unknown coefficients."""
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz_ref(S.mT, steps, coefficients).mT
    a, b, c = COEFFICIENTS[coefficients]
    X = normalised(S)
    for _ in range(steps):
        G = X @ X.mT
        X = a * X + (b * G + c * (G @ G)) @ X
    return X


def normalised(S):
    """Return S / |S|_F. A matrix too small to have a direction gives 0 and passes no gradient.

    Dividing by the largest entry first keeps the square of the norm, and its gradient, in range."""
    largest = S.detach().abs().amax((-2, -1), keepdim=True)
    smallest = torch.finfo(S.dtype).tiny ** 0.5               # 1e-19 in float32
    S = S * torch.where(largest > smallest, 1 / largest.clamp_min(smallest), 0)
    # now the largest entry is 1 and |S|_F at least 1, or all are 0: only then clamp_min acts
    return S * S.square().sum((-2, -1), keepdim=True).clamp_min(0.5).rsqrt()


def newton_schulz(S, steps=5, coefficients="muon"):
    """Return NS(S) of a stack of matrices: (N, m, n) -> (N, m, n)."""
    if S.shape[1] < S.shape[2]:
        return newton_schulz(S.mT, steps, coefficients).mT
    a, b, c = COEFFICIENTS[coefficients]
    X = normalised(S)
    for _ in range(steps):
        G = X.mT @ X
        Q = torch.baddbmm(G, G, G, beta=b, alpha=c)                      # b G + c G G
        X = torch.baddbmm(X, X, Q, beta=a)                               # a X + X Q
    return X


def right_factor(G, steps=5, coefficients="muon"):
    """Return R such that NS(S) = S R, from G = S^T S alone: (N, m, m) -> (N, m, m). A matrix too
    small to have a direction (in float32, |S|_F < 3e-10) gives R = 0 and passes no gradient."""
    square = G.diagonal(0, 1, 2).sum(-1)[:, None, None]                  # |S|_F^2
    smallest = torch.finfo(G.dtype).tiny ** 0.5               # its inverse has a gradient in range
    scale = torch.where(square > smallest, square.clamp_min(smallest).rsqrt(), 0)
    G = G * scale.square()

    a, b, c = COEFFICIENTS[coefficients]
    I = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    for step in range(steps):
        if step:
            G = Q @ G @ Q
        Q = torch.baddbmm(G, G, G, beta=b, alpha=c) + a * I              # a I + b G + c G G
        R = R @ Q if step else Q
    return R * scale
