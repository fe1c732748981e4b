"""muon.py - Newton-Schulz pushes singular values toward 1. ATLAS (section 5) applies it to the memory's momentum.

    X <- S / |S|_F,   then `steps` times   X <- a X + b (X X^T) X + c (X X^T)^2 X      Eq 32, 40; Jordan et al. 2024

With Muon's coefficients five steps take singular values above |S|_F / 300 to about [0.68, 1.2]. More steps keep them
there; they do not converge to 1. With the cubic they do, slowly: it finds the nearest semi-orthogonal matrix (the
paper's k -> infinity).

`newton_schulz_ref` is this text. `newton_schulz` computes the same on the small Gram matrix G = X X^T. A step
multiplies X by Q = a I + b G + c G^2, so   R <- Q R,   G <- Q G Q,   and at the end   X <- R X.   But G has
the square of X's condition, and each step magnifies the rounding errors of G's smallest eigenvalues. So after
GRAM_STEPS steps G is computed from X again.

The second half of the file holds the outer optimizer of the same name, Muon (Jordan et al. 2024). train.make_optimizers
decides which parameters it trains.
"""
import torch

COEFFICIENTS = {
    "muon": (3.4445, -4.7750, 2.0315),                        # steep at 0: small singular values grow 3.4x a step
    "cubic": (1.5, -0.5, 0.0),                                # converges to U V^T
}
GRAM_STEPS = 3                                                # steps on one Gram matrix


def newton_schulz_ref(S, steps=5, coefficients="muon"):
    """Return NS(S), Eq 40, as printed; a tall S is transposed first: (.., m, n) -> (.., m, n). NS(c S) = NS(S). Raises
    KeyError for unknown coefficients."""
    if S.shape[-2] > S.shape[-1]:
        return newton_schulz_ref(S.mT, steps, coefficients).mT
    a, b, c = COEFFICIENTS[coefficients]
    X = S * inverse_norm(S)
    for _ in range(steps):
        G = X @ X.mT
        X = a * X + (b * G + c * (G @ G)) @ X
    return X


def inverse_norm(S):
    """Return 1 / |S|_F, and 0 for a zero matrix, which therefore stays zero and passes no gradient."""
    square = S.square().sum((-2, -1), keepdim=True)
    tiny = 1e3 * torch.finfo(S.dtype).tiny * S.shape[-2:].numel()
    return torch.where(square > tiny, square.clamp_min(tiny).rsqrt(), 0)


def newton_schulz(stacks, steps=5, coefficients="muon"):
    """Return NS of every matrix in a list of stacks (N, m, n). Stacks with the same short side share one iteration."""
    out = [None] * len(stacks)
    for side in sorted({min(S.shape[-2:]) for S in stacks}):
        same = [i for i, S in enumerate(stacks) if min(S.shape[-2:]) == side]
        for i, X in zip(same, iterate([stacks[i] for i in same], steps, *COEFFICIENTS[coefficients])):
            out[i] = X
    return out


def iterate(stacks, steps, a, b, c):
    """Run Newton-Schulz on stacks (N, m, n) with one short side s; their Gram matrices form one batch."""
    short = lambda X, S: X.mT if S.shape[-2] > S.shape[-1] else X
    X = [short(S, S) * inverse_norm(S) for S in stacks]
    for first in range(0, steps, GRAM_STEPS):
        G, R = torch.cat([torch.bmm(x, x.mT) for x in X]), None                  # (sum of N, s, s)
        I = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
        for i in range(min(GRAM_STEPS, steps - first)):
            G = torch.bmm(torch.bmm(Q, G), Q) if i else G
            Q = a * I + (torch.baddbmm(G, G, G, beta=b, alpha=c) if c else b * G)
            R = torch.bmm(Q, R) if i else Q
        X = [torch.bmm(r, x) for r, x in zip(R.split([len(x) for x in X]), X)]
    return [short(x, S) for x, S in zip(X, stacks)]


# ---- the outer optimizer
class Muon(torch.optim.Muon):
    """torch.optim.Muon, which computes in bfloat16. With bfloat16 = False it computes in float32.

    B <- mu B + (1 - mu) g,   p <- (1 - lr decay) p - lr sqrt(max(1, rows / columns)) NS((1 - mu) g + mu B)

    mu is the momentum, decay the weight decay. On a CPU without bfloat16 float32 is 5 times as fast.
    """
    bfloat16 = False                                          # True where the device has instructions for it

    @torch.no_grad()
    def step(self):
        """Take one step for all parameters that have a gradient."""
        if self.bfloat16:
            return super().step()
        for group in self.param_groups:
            params, updates = [p for p in group["params"] if p.grad is not None], []
            for p in params:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(buffer, group["momentum"])[None])     # Nesterov's
            for p, update in zip(params, newton_schulz(updates)):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update[0], alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
