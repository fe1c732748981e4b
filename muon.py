"""muon.py - Newton-Schulz pushes singular values toward 1. ATLAS (section 5) applies it to the
momentum of the memory.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X        Eq 32, 40

The coefficients "muon" are from Jordan et al. 2024. Five steps take singular values above
|S|_F / 300 to about [0.68, 1.2]. More steps keep them there; they do not converge to 1. With the
coefficients "cubic" they do, slowly: X converges to the nearest semi-orthogonal matrix (the paper's
k -> infinity).

`newton_schulz_ref` is this text. `newton_schulz` computes the same on the small Gram matrix
G = X X^T, in 0.6 to 0.9 of the time. A step multiplies X by Q = a I + b G + c G^2, so

    R <- Q R,   G <- Q G Q,   and at the end   X <- R X

But G's eigenvalues are the squares of X's singular values, so the small ones have few correct
digits, and each step magnifies their rounding errors. So after GRAM_STEPS steps G is computed from
X again.

The outer optimizer Muon is in train.py. It uses the same function.
"""
import torch

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small ones grow 3.4x
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}
GRAM_STEPS = 3                                                # steps on one Gram matrix


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
    """Return NS(S) of a stack of matrices, by way of G and R: (N, m, n) -> (N, m, n). coefficients
    is a name in COEFFICIENTS, or three numbers."""
    m, n = S.shape[-2:]
    if m > n:
        return newton_schulz(S.mT, steps, coefficients).mT
    a, b, c = COEFFICIENTS.get(coefficients, coefficients)
    X = normalised(S)
    I = torch.eye(m, dtype=S.dtype, device=S.device)

    def factor(G):
        return torch.baddbmm(G, G, G, beta=b, alpha=c) + a * I           # Q = a I + b G + c G G

    for first in range(0, steps, GRAM_STEPS):
        G = X @ X.mT
        Q = R = factor(G)
        for _ in range(1, min(GRAM_STEPS, steps - first)):
            G = Q @ G @ Q
            Q = factor(G)
            R = Q @ R
        X = R @ X
    return X
