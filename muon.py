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
    return S * S.square().sum((-2, -1), keepdim=True).clamp_min(0.5).rsqrt()


def newton_schulz(stacks, steps=5, coefficients="muon"):
    """Return NS of every matrix in a list of stacks (N, m, n). Stacks with the same short side share one
    iteration. coefficients: a name in COEFFICIENTS, or three numbers."""
    if isinstance(coefficients, str):
        coefficients = COEFFICIENTS[coefficients]
    out = [None] * len(stacks)
    for side in sorted({min(S.shape[-2:]) for S in stacks}):
        same = [i for i, S in enumerate(stacks) if min(S.shape[-2:]) == side]
        for i, X in zip(same, iterate([stacks[i] for i in same], steps, *coefficients)):
            out[i] = X
    return out


def iterate(stacks, steps, a, b, c):
    """Run Newton-Schulz on stacks (N, m, n) with one short side s; their Gram matrices form one batch."""
    short = lambda X, S: X.mT if S.shape[-2] > S.shape[-1] else X
    X = [normalised(short(S, S)) for S in stacks]
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
    """torch.optim.Muon, which computes in bfloat16. With bfloat16 = False it computes in the type of the
    gradients: on a CPU without bfloat16 float32 is 30 times as fast.

    B <- mu B + (1 - mu) g,   p <- (1 - lr decay) p - lr sqrt(max(1, rows / columns)) NS((1 - mu) g + mu B)

    mu is the momentum, decay the weight decay. The options are torch's, but for eps.
    """
    bfloat16 = False                                          # True where the device has instructions for it

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step for all parameters that have a gradient -> what the closure returns, if given."""
        if self.bfloat16:
            return super().step(closure)
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates = [self.direction(p, group)[None] for p in params]
            updates = newton_schulz(updates, group["ns_steps"], group["ns_coefficients"])
            for p, (update,) in zip(params, updates):
                rows, columns = p.shape
                longer = max(1, rows / columns) ** 0.5
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    longer = 0.2 * max(rows, columns) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * longer)
        return loss

    def direction(self, p, group):
        """Return what Newton-Schulz takes for the parameter p: its momentum, moved on by the gradient."""
        B = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        B.lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(B, group["momentum"]) if group["nesterov"] else B
