"""shards.py - memories that learn in parallel: TNT (arXiv 2511.07343, Eq 5 - 7; not in ATLAS).

    y_t = M(phi(q_t); V_t) + M(phi(q'_t); W_t),     q'_t = unit(sum over s <= t in this shard of k_s (k_s . q_t))

A shard is `size` tokens. The global memory V reads and writes all tokens; its chunk is one shard. The local memory W
begins anew from M0 in each shard, so all shards of a text learn in parallel. A GPU then waits for fewer steps in a row.
TNT reads V as it was before the shard. Here V is read after it has written (choice 3). With Newton-Schulz its block is
the whole shard, whose plain steps wait and are read (choice 15).
"""
from copy import deepcopy
from itertools import repeat
from typing import NamedTuple

import torch

import chunks
import layer
from memory import unit
from omega import Gates, State, omega_ref, start


class Shards(NamedTuple):
    """What `shards` carries from token to token."""
    M0: tuple                             # where every local memory starts, matrices (H, in, out)
    whole: State                          # of the global memory
    local: State | None                   # of the shard in progress, if there is one
    kk: torch.Tensor                      # (B, H, D, D) the sum of k k^T since the shard's first token
    pos: int                              # tokens of the shard so far


def global_rule(rule, size, gates):
    """Return rule and gates of the global memory. Its chunk is a shard, which errors at its start take as one step: so
    the step is multiplied by chunk / size."""
    step = gates.step * (rule.chunk / size if rule.error == "chunk" else 1)
    return rule._replace(chunk=size, muon_every=size if rule.muon_every else 0), gates._replace(step=step)


def shards_ref(size, rule, phi, q, k, v, gates, state):
    """Run the rule of the module docstring token by token. Arguments and results as in omega_ref; state: a Shards."""
    ys, (M0, whole, local, kk, pos) = [], state
    for q, k, v, *now in zip(*(repeat(None) if a is None else a.split(1, 2) for a in (q, k, v, *gates))):
        if not pos:
            local, kk = start(rule, phi, M0, len(q), gates.momentum is not None), torch.zeros_like(kk)
        kk, pos, (slow, scaled) = kk + k.mT @ k, (pos + 1) % size, global_rule(rule, size, Gates(*now))
        y, whole = omega_ref(slow, phi, q, k, v, scaled, whole)
        z, local = omega_ref(rule, phi, unit(q @ kk), k, v, Gates(*now), local)
        ys.append(y + z)
    return torch.cat(ys, 2), Shards(M0, whole, local if pos else None, kk if pos else torch.zeros_like(kk), pos)


def shards(size, rule, phi, q, k, v, gates, state):
    """Compute `shards_ref` with all shards in parallel, as extra sequences of the batch."""
    M0, whole, local, kk, pos = state
    slow, scaled = global_rule(rule, size, gates)
    y, whole = chunks.run(slow, phi, q, k, v, scaled, whole)
    ys, B, at, T = [], len(q), 0, q.shape[2]
    while at < T:                                             # the rest of a shard, whole shards, a part of one
        c, n = (min(T - at, size - pos), 1) if pos or T - at < size else (size, (T - at) // size)
        part = (a if a is None else a[:, :, at: at + n * c] for a in (q, k, v, *gates))
        part = (a if a is None else a.unflatten(2, (n, c)).movedim(2, 0).flatten(0, 1) for a in part)
        q_, k_, v_, *now = part                               # (B, H, n c, ..) -> (n B, H, c, ..)
        if not pos:
            local, kk = start(rule, phi, M0, n * B, gates.momentum is not None), torch.zeros_like(kk[:1])
        z, local = chunks.run(rule, phi, unit((q_ @ k_.mT).tril() @ k_ + q_ @ kk), k_, v_, Gates(*now), local)
        ys.append(z.unflatten(0, (n, B)).movedim(0, 2).flatten(2, 3))
        kk, pos, at = kk + k_.mT @ k_, (pos + c) % size, at + n * c
        if not pos:
            local, kk = None, kk.new_zeros(B, *kk.shape[1:])
    return y + torch.cat(ys, 2), Shards(M0, whole, local, kk, pos)


class ShardedMemory(layer.Memory):
    """A layer with a global memory and local ones. config: a models.Config, whose `shard` is the size."""

    def __init__(self, config, number=0):
        super().__init__(config, number)
        self.global_M0, self.period = deepcopy(self.M0), config.shard

    def start(self, x):
        c, state = self.config, super().start(x)
        whole = start(layer.rule(c), self.phi, list(self.global_M0), len(x), momentum=c.momentum)._replace(M0=())
        kk = whole.W[0].new_zeros(len(x), c.n_head, c.head_dim, c.head_dim)
        return state._replace(fast=Shards((), whole, None, kk, 0))

    def learn(self, q, k, v, gates, fast):
        """Run both rules. M0 belongs to the layer, not to its states."""
        with_M0 = lambda state, M0: state and state._replace(M0=tuple(M0) if self.config.forget == "start" else ())
        whole, local = with_M0(fast.whole, self.global_M0), with_M0(fast.local, self.M0)
        y, fast = shards(self.config.shard, layer.rule(self.config), self.phi, q, k, v, gates, fast._replace(
            M0=tuple(self.M0), whole=whole, local=local))
        return y, fast._replace(M0=(), whole=with_M0(fast.whole, ()), local=with_M0(fast.local, ()))


torch.serialization.add_safe_globals([Shards])
