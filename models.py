"""models.py - from tokens to logits: the configuration, the presets and sizes, the language model.

    block(x) = x + layer(norm(x)),  then  x + SwiGLU(norm(x))               ATLAS Figure 3 (left)
    layer    = a memory that learns at test time (Figure 3, right), attention, or both (wiring.py)

There are two loops. The outer loop (train.py) learns every nn.Parameter, among them M0, where each
memory starts. The inner loop (omega.py) runs inside of forward. It starts from M0 at the beginning
of a sequence and changes only the fast weights W of that sequence, which are in the `state` that
forward returns.
"""
import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import chunks
from dot import DotMemory
from layer import Memory, Norm, Settings, UserError, check, check_settings, map_state, opt
from memory import MEMORIES, at_least_float32
from poly import Features, features_dim
from shards import ShardedMemory
from wiring import WIRINGS, Attention, Wiring


# ---- configuration
@dataclass
class Config(Settings):
    """Everything needed to rebuild the network: the settings of the memory layer (layer.Settings),
    and these. Each field is a flag of train.py and is saved in checkpoints."""
    vocab_size: int = opt(65, "number of different tokens; the tokenizer sets it", low=1)
    n_layer: int = opt(2, "number of blocks", low=1)
    attention: bool = opt(False, "attention instead of a memory")
    wiring: str = opt(
        "lmm", "lmm: the memory alone; mag, mal, mac: with attention, as in Titans", WIRINGS)
    persistent: int = opt(4, "for --wiring: number of learned tokens before the sequence")
    polarise: float = opt(
        0.0, "MAG and MAC only: add this times mean(1 - |2g - 1|) to the loss, where g is the "
        "attention gate")
    memory_floor: str = opt(
        "0", "MAG and MAC only: least weight of the memory's own output, in the first 10 % of the "
        "steps, up to 33 %, and after, as 0.3,0.1,0.05")
    shard: int = opt(
        0, "tokens per shard, which has a local memory beside the global one (shards.py); 0: off")
    attn_window: int = opt(
        64, "tokens that attention sees, or of a MAC segment; 0: all")
    rope: bool = opt(True, "rotary positions in attention; --no-rope: no positions")
    dropout: float = opt(
        0.0, "dropout on what each block adds to the residual stream, below 1", high=1)
    tie: bool = opt(False, "share the embedding with the output layer")

    def __post_init__(self):
        check(self)
        if not self.head_dim:
            self.head_dim = self.n_embd // self.n_head
            if self.n_embd % self.n_head:
                raise UserError(f"--n-embd {self.n_embd} is no multiple of --n-head {self.n_head}; "
                                "give --head-dim")
        wired = self.wiring != "lmm"
        if (self.attention or wired) and self.head_dim % 2:
            raise UserError("rotary embedding needs an even --head-dim")
        if wired and self.attention:
            raise UserError(f"--wiring {self.wiring} needs a memory model, not attention alone")
        if wired and not self.attn_window:
            raise UserError(f"--wiring {self.wiring} needs an --attn-window")
        if not re.fullmatch(r"(0|0?\.\d+)(,(0|0?\.\d+)){0,2}", self.memory_floor):
            raise UserError("--memory-floor takes 1 to 3 numbers below 1, as 0.3,0.1,0.05, not "
                            f"{self.memory_floor!r}")
        if (self.polarise or self.memory_floor != "0") and self.wiring not in ("mag", "mac"):
            raise UserError("--memory-floor and --polarise need --wiring mag or mac")
        if self.shard and (self.attention or self.wiring == "mac" or self.features == "exp"):
            raise UserError("--shard needs a memory with finite features, and another --wiring "
                            "than mac")
        if not self.attention:
            self.check_memory()

    def check_memory(self):
        """Raise UserError for settings that a memory cannot have."""
        check_settings(self)
        E = self.n_head * features_dim(self.features, self.head_dim, self.degree)
        if E > 200_000:
            raise UserError(f"phi of 4,096 tokens would take {E * 4096 * 4 / 1e9:,.0f} GB in each "
                            "layer; lower --degree, --head-dim or --n-head")

    def period(self):
        """Return the number of tokens between two places where a new text may begin. There a chunk
        (or shard) begins, and in MAC also a segment. For attention it is 1."""
        if self.attention:
            return 1
        chunk = self.shard or self.chunk
        return math.lcm(chunk, self.attn_window) if self.wiring == "mac" else chunk


# ---- models and sizes
# The models of the paper's Table 1, in the size tiny; results/README.md compares them. Equations:
# linear 45, deltanet 47, titans 12 and 13, dla 19, swla 55, deeptransformer 25, deepomega ("Dot")
# 27, omeganet 10, atlas 9, 16, 32, 33 and 40, atlas++ 43. TTT lacks its norm inside the memory,
# Moneta its retention by l_q. `atlas-delta` is ours, not the paper's.
COLUMNS = "memory loss window error chunk momentum muon features keep".split()
TABLE = {
    # memory, loss, window, error, chunk, momentum, muon, features, keep
    "linear":          ("linear", "dot", 1, "chunk", 16, False, "none",  "none",     False),
    "ttt":             ("linear", "l2",  1, "chunk", 16, False, "none",  "none",     False),
    "ttt-mlp":         ("mlp",    "l2",  1, "chunk", 16, False, "none",  "none",     False),
    "deltanet":        ("linear", "l2",  1, "token", 64, False, "none",  "none",     False),
    "gated-deltanet":  ("linear", "l2",  1, "token", 64, False, "none",  "none",     True),
    "titans":          ("linear", "l2",  1, "chunk", 16, True,  "none",  "none",     True),
    "moneta":          ("mlp",    "lp",  1, "chunk", 16, False, "none",  "none",     True),
    "dla":             ("mlp",    "dot", 1, "chunk", 16, False, "none",  "monomial", True),
    "swla":            ("linear", "dot", 8, "chunk", 16, False, "none",  "none",     True),
    "deeptransformer": ("mlp",    "dot", 1, "chunk", 16, False, "none",  "exp",      False),
    "swdt":            ("mlp",    "dot", 8, "chunk", 16, False, "none",  "exp",      False),
    "deepomega":       ("mlp",    "l2",  8, "chunk", 16, False, "none",  "exp",      False),
    "omeganet":        ("linear", "l2",  8, "chunk", 16, False, "none",  "monomial", True),
    "atlas":           ("linear", "l2",  8, "chunk", 16, True,  "token", "monomial", True),
    "atlas++":         ("gated",  "l2",  8, "chunk", 16, True,  "chunk", "monomial", True),
    "atlas-delta":     ("linear", "l2",  1, "token", 64, True,  "none",  "monomial", True),
}
PRESETS = {name: dict(zip(COLUMNS, row)) for name, row in TABLE.items()} | {
    "transformer": dict(attention=True, head_dim=0, attn_window=0),
    "swa": dict(attention=True, head_dim=0),
}
# from 34m on the memory of these is an MLP, as in the paper, with this expansion
DEEP = {"titans": 4, "omeganet": 4, "atlas": 4, "atlas-delta": 2}

SIZES = {
    "tiny": dict(),
    "baby": dict(n_layer=6, n_head=12, n_embd=384, dropout=0.1),
}
# (n_layer, n_head, n_embd); from 170m on those of Table 7
SHAPES = {
    "34m": (6, 6, 384),
    "170m": (12, 16, 768),
    "195m": (12, 12, 768),
    "340m": (24, 16, 1024),
    "760m": (24, 16, 1536),
    "1.3b": (18, 8, 2048),
}
for _name, (_layers, _heads, _width) in SHAPES.items():
    SIZES[_name] = dict(n_layer=_layers, n_head=_heads, n_embd=_width, head_dim=_width // _heads,
                        tie=_width < 768)


def sized(preset, size):
    """Return the fields of Config that a preset and a size set. A GPU likes longer chunks than the
    table has. In baby they are four times as long, or twice where errors or Newton-Schulz are at
    each token. From 34m on heads are wide. Then chunks have 512 tokens; Newton-Schulz, if any, runs
    once a chunk; a sketch of 1 + D + 79 features stands in for the monomials, which would be too
    many (the sum is a multiple of 16, which GPUs like); and the memories of DEEP are MLPs."""
    given = PRESETS[preset] | SIZES[size]
    if "attention" in given or size == "tiny":
        return given
    if size == "baby":
        at_token = "token" in (given["error"], given["muon"])
        return given | dict(chunk=given["chunk"] * (2 if at_token else 4))

    given["chunk"] = 512
    if given["muon"] == "token":
        given["muon"] = "chunk"
    if given["features"] == "monomial":
        given["features"] = "sketch"
    if preset in DEEP:
        given |= dict(memory="mlp", expansion=DEEP[preset])
    return given


def configure(preset="atlas", size="tiny", **overrides):
    """Return the Config of a preset and a size, with `overrides` (fields of Config)."""
    for name, known in ((preset, PRESETS), (size, SIZES)):
        if name not in known:
            raise UserError(f"no model or size {name!r}; choose one of {', '.join(known)}")
    return Config(**sized(preset, size) | overrides)


def build(preset="atlas", size="tiny", **overrides):
    """Return LM(configure(preset, size, **overrides)), a language model."""
    return LM(configure(preset, size, **overrides))


# ---- speed on a GPU
def set_precision(config):
    """Let a GPU multiply float32 matrices in its shorter TF32, unless Newton-Schulz at each token
    needs all digits (muon.py). This sets an option of the whole process."""
    torch.set_float32_matmul_precision("highest" if config.muon == "token" else "high")


def compile_function(owner, name, **options):
    """Replace a function of a module or class by its compiled form, once."""
    f = getattr(owner, name)
    if not hasattr(f, "_torchdynamo_orig_callable"):
        setattr(owner, name, torch.compile(f, dynamic=False, **options))


# ---- the language model
class SwiGLU(nn.Module):
    """silu(x Gate) * (x Up) Out, the second half of a block (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        hidden = -(-config.n_embd * 8 // 3 // 16) * 16        # 8/3 n_embd, up to a multiple of 16
        self.gate = nn.Linear(config.n_embd, hidden, bias=False)
        self.up = nn.Linear(config.n_embd, hidden, bias=False)
        self.out = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + layer(norm(x)), then x + SwiGLU(norm(x)): Figure 3 (left)."""

    def __init__(self, config, number=0):
        super().__init__()
        self.norm1, self.norm2 = Norm(config.n_embd), Norm(config.n_embd)
        if config.attention:
            self.layer = Attention(config)
        elif config.features == "exp":
            self.layer = DotMemory(config, number)
        elif config.shard:
            self.layer = ShardedMemory(config, number)
        else:
            self.layer = Memory(config, number)
        if config.wiring != "lmm":
            self.layer = Wiring(config, self.layer)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, state=None, mask=None, reset=None):
        y, state = self.layer(self.norm1(x), state, mask, reset)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), state


class LM(nn.Module):
    """A language model: tokens (B, T) -> logits (B, T, vocab_size) and a state, a tuple of the
    states of all layers, from which the next call can go on."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.remat = False                # --remat of train.py: backward recomputes each block
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = Norm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init()

    def init(self):
        """Set all starting values, also of buffers: a model made on the meta device has none."""
        if self.config.tie:
            self.head.weight = self.embed.weight

        for name, m in self.named_modules():
            if isinstance(m, (Norm, Features)):
                m.init()
            if isinstance(m, nn.Linear):  # what adds to the residual stream begins smaller
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith(".out") else 1.0
                nn.init.normal_(m.weight, std=scale * m.in_features ** -0.5)
        nn.init.normal_(self.embed.weight, std=0.02 if self.config.tie else 1.0)

        for m in self.modules():          # after the Linear layers, some of which they change
            if isinstance(m, (Memory, Wiring)):
                m.init()

    def forward(self, tokens, state=None, mask=None, reset=None):
        """Read tokens (B, T >= 1), from the beginning or after an earlier state -> logits
        (B, T, vocab_size), and the state after the last token. A sequence gives the same logits in
        one call or in several. Raises ValueError if tokens or state do not fit.

        mask (B, T) bool is False at padding: such tokens write nothing and forget nothing, and no
        other token looks at them. Padding counts where chunks are cut: they begin at the same
        places in all rows. reset (B, T) bool is True where a row begins a new text, with a new
        memory; this must be the first token of a chunk (see `Memory.forward`)."""
        x = self.embed(tokens)
        if self.config.tie:
            x = x * self.config.n_embd ** 0.5

        n, states = len(self.blocks), []
        if state is None:
            state = [None] * n
        if hasattr(state, "_fields") or len(state) != n:
            raise ValueError("a model takes a tuple of the states of its layers; its n_layer is "
                             f"{len(state)}, not {n}")
        for block, s in zip(self.blocks, state):
            if self.remat and torch.is_grad_enabled():
                x, s = checkpoint(block, x, s, mask, reset, use_reentrant=False)
            else:
                x, s = block(x, s, mask, reset)
            states.append(s)
        return self.head(self.norm(x)), tuple(states)

    def loss(self, tokens, targets, mask=None, reset=None):
        """Return the mean cross entropy, in nats, of targets (B, T) given tokens (B, T). Targets of
        -100 and those of masked tokens do not count. The caller gives -100 as the target of the
        last token before padding. config.polarise adds a penalty on undecided attention gates.
        mask, reset: see `forward`."""
        if targets.shape != tokens.shape:
            raise ValueError(f"targets are (B, T) {tuple(tokens.shape)}, not "
                             f"{tuple(targets.shape)}")
        logits, _ = self(tokens, None, mask, reset)
        logits, targets = at_least_float32(logits).flatten(0, 1), targets.long()
        if mask is not None:
            targets = targets.masked_fill(~mask, -100)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
        loss = loss / (targets != -100).sum().clamp_min(1)    # 0 if no target counts

        for block in self.blocks if self.config.polarise else ():
            undecided = torch.cat(block.layer.undecided, 1)                  # (B, T)
            real = torch.ones_like(undecided) if mask is None else mask
            undecided = (undecided * real).sum() / real.sum().clamp_min(1)
            loss = loss + self.config.polarise / len(self.blocks) * undecided
        return loss

    def compile_memory(self, **options):
        """Compile the memory, SwiGLU and Norm of all models, and the attention blocks of this
        one. This sets options of the whole process."""
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        torch._functorch.config.backward_pass_autocast = "off"    # backward has forward's types
        torch._functorch.config.activation_memory_budget = 0.0    # backward recomputes a chunk
        compile_function(chunks, "run_chunk", **options)
        compile_function(Memory, "project", **options)
        compile_function(Memory, "finish", **options)
        compile_function(SwiGLU, "forward", **options)
        compile_function(Norm, "forward", **options)
        for block in self.blocks:
            if isinstance(block.layer, Attention):
                block.compile(dynamic=False, **options)

    def set_floor(self, done):
        """Set the floor that --memory-floor gives for `done`, the share of the training that is
        done (see `Wiring`)."""
        for m in self.modules():
            if isinstance(m, Wiring):
                m.set_floor(done)

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None,
                 state=None):
        """Yield max_new_tokens new tokens, (B,) each, that continue tokens (B, T). `state` is that
        of a text before the tokens. At the end return the state after all tokens but the last,
        which the model has not read: state = yield from model.generate(..).

        Call eval() first if the model has dropout. temperature 0 takes the likeliest token. top_k 0
        and top_p 1 switch these limits off. All tokens cost the same unless the state grows
        (`holds_all`). Raises ValueError, at the first token, for an empty prompt, for a number
        below 0 or nan, and for a top_p above 1."""
        if not tokens.numel():
            raise ValueError("a prompt is (B, T >= 1); to begin with nothing, give a newline")
        numbers = max_new_tokens, top_k, temperature, top_p
        whole = all(isinstance(a, int) for a in numbers[:2])
        if not whole or not all(a >= 0 for a in numbers) or top_p > 1:       # nan >= 0 is False
            raise ValueError("max_new_tokens and top_k are whole numbers; they, temperature and "
                             f"top_p are at least 0, and top_p to 1, not {numbers}")
        for _ in range(max(1, max_new_tokens)):               # for 0 new tokens read the prompt
            # without torch.compile, because lengths change: there would be too many shapes
            with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
                for piece in tokens.split(1024, -1):          # all logits would take much memory
                    logits, state = self(piece, state)
                token = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
                tokens = token[:, None]
            if max_new_tokens:
                yield token.clone()                           # no longer an inference tensor
        return map_state(torch.clone, state)


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw a token for each row of logits (B, V), from the top_k likeliest tokens and from the
    fewest tokens whose probabilities add up to top_p."""
    if temperature == 0:
        return logits.argmax(-1)

    logits, order = (logits / max(temperature, 1e-30)).sort(descending=True)
    if top_k:
        logits[:, top_k:] = -torch.inf
    probs = logits.softmax(-1)
    if top_p < 1:                         # drop tokens once those above them add up to top_p
        above = probs.cumsum(-1) - probs
        probs = probs.masked_fill(above >= max(top_p, 1e-9), 0)

    drawn = torch.multinomial(probs, 1, generator=generator)
    return order.gather(1, drawn)[:, 0]


def holds_all(config):
    """Return whether the state keeps every token, so that it grows with the text."""
    if config.attention:
        return not config.attn_window
    return config.features == "exp"
