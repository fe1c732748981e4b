"""shards.py - memories that learn in parallel: TNT (arXiv 2511.07343, Eq 5 - 7; not in ATLAS).

    y_t = M(phi(q_t); V_t) + M(phi(q'_t); W_t)
    q'_t = unit(sum over s <= t in this shard of k_s (k_s . q_t))

A shard is `size` tokens. The global memory V learns from all tokens, and its chunk is one shard.
The local memory W begins anew from M0 in each shard, so all shards of a text learn in parallel. A
GPU then waits for fewer steps in a row. The local memory is asked q'_t in the place of q_t. It lies
in the span of the keys that this memory has seen, and unit gives it length 1.

TNT reads V as it was before the shard. Here V_t has learned from the tokens up to t (choice 3).
"""
from copy import deepcopy
from typing import NamedTuple

import torch

import chunks
import layer
from memory import unit
from omega import Gates, State, omega_ref, start


class Shards(NamedTuple):
    """What `shards` carries from call to call."""
    M0: tuple                             # where every local memory starts, matrices (H, in, out)
    whole: State                          # of the global memory
    local: State | None                   # of the local memory; None where a shard begins
    kk: torch.Tensor                      # (B, H, D, D) the sum of k^T k in the shard so far
    pos: int                              # tokens of the shard so far


def global_rule(rule, size, gates):
    """Return rule and gates of the global memory, whose chunk is a shard. If errors are those at a
    chunk's start, a chunk is one big step. Then a longer chunk needs smaller steps, so they are
    multiplied by chunk / size."""
    if rule.error == "chunk":
        gates = gates._replace(step=gates.step * (rule.chunk / size))
    return rule._replace(chunk=size), gates


def side_by_side(a, begin, end, n):
    """Return tokens begin to end of a (B, H, T, ..) as n sequences side by side in the batch:
    (n B, H, length, ..)."""
    if a is None:
        return None
    return a[:, :, begin:end].unflatten(2, (n, -1)).movedim(2, 0).flatten(0, 1)


def shards_ref(size, rule, phi, q, k, v, gates, state):
    """Run the rule of the module docstring token by token. Arguments and results as in omega_ref;
    state: a Shards."""
    M0, whole, local, kk, pos = state
    ys = []
    for t in range(q.shape[2]):
        parts = [side_by_side(a, t, t + 1, 1) for a in (q, k, v, *gates)]
        q_t, k_t, v_t, *now = parts
        now = Gates(*now)
        if pos == 0:                                          # a shard begins
            local = start(rule, phi, M0, len(q), now.momentum is not None)
            kk = torch.zeros_like(kk)
        kk = kk + k_t.mT @ k_t

        slow, scaled = global_rule(rule, size, now)
        y, whole = omega_ref(slow, phi, q_t, k_t, v_t, scaled, whole)
        z, local = omega_ref(rule, phi, unit(q_t @ kk), k_t, v_t, now, local)
        ys.append(y + z)
        pos = (pos + 1) % size

    if pos == 0:
        local = None
        kk = torch.zeros_like(kk)
    return torch.cat(ys, 2), Shards(M0, whole, local, kk, pos)


def shards(size, rule, phi, q, k, v, gates, state):
    """Compute `shards_ref` with all shards in parallel, as extra sequences of the batch."""
    M0, whole, local, kk, pos = state
    slow, scaled = global_rule(rule, size, gates)
    y, whole = chunks.run(slow, phi, q, k, v, scaled, whole)

    B, T = len(q), q.shape[2]
    zs, at = [], 0
    while at < T:
        # take all whole shards that follow, side by side; or, before and after them, a part of one
        length = min(T - at, size - pos)
        n = (T - at) // size if length == size else 1
        end = at + n * length
        parts = [side_by_side(a, at, end, n) for a in (q, k, v, *gates)]
        q_, k_, v_, *now = parts
        if pos == 0:                                          # shards begin
            local = start(rule, phi, M0, n * B, gates.momentum is not None)
            kk = kk.new_zeros(n * B, *kk.shape[1:])

        asks = unit((q_ @ k_.mT).tril() @ k_ + q_ @ kk)       # q'
        z, local = chunks.run(rule, phi, asks, k_, v_, Gates(*now), local)
        z = z.unflatten(0, (n, B)).movedim(0, 2).flatten(2, 3)
        zs.append(z)

        kk = kk + k_.mT @ k_
        at = end
        pos = (pos + length) % size
        if pos == 0:
            local = None
            kk = torch.zeros_like(kk[:B])
    return y + torch.cat(zs, 2), Shards(M0, whole, local, kk, pos)


class ShardedMemory(layer.Memory):
    """The memory layer with a global memory, which starts from global_M0, and local ones, which
    start from M0. config: a models.Config, whose `shard` is the size."""

    def __init__(self, config, number=0):
        super().__init__(config, number)
        self.global_M0 = deepcopy(self.M0)
        self.period = config.shard

    def start(self, x):
        state = super().start(x)
        c = self.config
        whole = start(self.rule, self.phi, list(self.global_M0), len(x), c.momentum)
        whole = whole._replace(M0=())
        kk = whole.W[0].new_zeros(len(x), c.n_head, c.head_dim, c.head_dim)
        return state._replace(fast=Shards((), whole, None, kk, 0))

    def weights(self, state):
        """Raise ValueError: there is not one memory to return."""
        raise ValueError("a layer in shards has two memories; state.fast holds both")

    def learn(self, q, k, v, gates, fast):
        """Run both memories from the state `fast`, a Shards -> y (B, H, T, D), and the state after
        it. States are without M0, which belongs to the layer: it is put in before and taken out
        after."""
        whole = self.with_M0(fast.whole, self.global_M0)
        local = fast.local and self.with_M0(fast.local, self.M0)
        state = Shards(tuple(self.M0), whole, local, fast.kk, fast.pos)
        y, state = shards(self.config.shard, self.rule, self.phi, q, k, v, gates, state)
        whole = state.whole._replace(M0=())
        local = state.local and state.local._replace(M0=())
        return y, Shards((), whole, local, state.kk, state.pos)


torch.serialization.add_safe_globals([Shards])
