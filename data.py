"""data.py - text and synthetic tasks: everything that becomes tokens.

read finds a text or token files, make_tokenizer turns text into ids, split, batch, windows and streams cut ids up,
mqar, needle and the tasks of MAD are drawn at random. There is no loader object: a batch is a function of (seed,
step), so an exact resume needs no loader state. `python data.py --data corpus --out tokens` makes token files.
"""
import argparse
import codecs
import glob
import hashlib
import json
import os
import re
import sys
import urllib.request
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

SHAKESPEARE = Path(__file__).resolve().parent / "data" / "shakespeare.txt"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TOKENIZERS = ("char", "byte", "bpe", "gpt2")
EVERY_BYTE = [bytes([b]) for b in range(256)]
END = b"<|endoftext|>"                                  # GPT-2's last token; it stands between texts
BLOCK = 2**24                                           # characters encoded at a time
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"       # its words


class UserError(Exception):
    """A mistake of the user's, told in one line that names fault and remedy."""


@contextmanager
def replacing(path):
    """A temporary name beside `path`, renamed to it at the end: a crash leaves the old file or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- text and token files
class Corpus(NamedTuple):
    """What a name stands for: a text, token files, or a mix of these."""
    used: str                                           # the name of what was really read
    sha256: str
    text: str = ""
    tokens: tuple = ()                                  # ids to train and to validate on, uint16 arrays on the disk
    mix: tuple = ()                                     # (weight, Corpus) of each part

    def splits(self, tokenizer, seq_len):
        """-> ids to train and to validate on, arrays (N,). Raises UserError where tokenizer or seq_len do not fit.

        Of a mix each part is cut alone. To train, the part that lasts longest comes once and the others again and
        again, up to their weight; to validate, the part that ends first comes once and the others are cut.
        """
        if self.mix:
            weights, parts = zip(*((weight, part.splits(tokenizer, seq_len)) for weight, part in self.mix))
            mixed = []
            for end, ids in zip((max, min), zip(*parts)):
                total = end(len(a) / weight for a, weight in zip(ids, weights))
                mixed.append(np.concatenate([np.resize(a, round(total * w)) for a, w in zip(ids, weights)]))
            return tuple(mixed)
        if not self.tokens:
            return split(tokenizer.encode(self.text), seq_len, self.used)
        if (shorter := min(map(len, self.tokens))) <= seq_len:
            raise UserError(f"a token file of {self.used} has {shorter} tokens, too few for --seq-len {seq_len}")
        if (greatest := max(int(ids.max()) for ids in self.tokens)) >= tokenizer.vocab_size:
            raise UserError(f"{self.used} holds token ids up to {greatest}, not of this {tokenizer.kind} vocabulary of "
                            f"{tokenizer.vocab_size}; give the --tokenizer that made them, or a text")
        return self.tokens


def read(name):
    """A name as --data takes it -> Corpus.

    'shakespeare' is data/shakespeare.txt beside this file, downloaded if missing. Without network it is 'pydoc',
    Python's own help text, which differs between Python versions, so it is no benchmark.
    A folder with nanoGPT's token files (*train*.bin and *val*.bin, no meta.pkl) is these, mapped and not loaded.
    Anything else is a UTF-8 file, or all .txt files of a folder and its subfolders, with a newline between two. Of
    .json and .jsonl files the "text" fields count. 'a.txt:0.4,b.jsonl:0.6' is a mix of names by weight.
    Raises UserError for what cannot be read, is empty or not UTF-8.
    """
    parts = [re.fullmatch(r"(.+):(\d*\.?\d+)", part) for part in str(name).split(",")]
    if all(parts):
        return mixed([(float(part[2]), read(part[1])) for part in parts])
    text = _shakespeare() if name == "shakespeare" else ""
    if name == "pydoc" or name == "shakespeare" and not text:
        from pydoc_data.topics import topics
        name, text = "pydoc", "\n".join(topics[topic] for topic in sorted(topics))
    train, val = (glob.glob(f"*{part}*.bin", root_dir=name) for part in ("train", "val"))       # no hidden names
    if not text and len(train) == len(val) == 1 and not Path(name, "meta.pkl").exists():
        tokens = tuple(np.memmap(Path(name, file), "<u2", "c") for file in train + val)  # torch warns of mode "r"
        digest = hashlib.sha256(tokens[0])
        digest.update(tokens[1])
        return Corpus(str(name), digest.hexdigest(), tokens=tokens)
    text = text or _text(name)
    return Corpus(str(name), hashlib.sha256(text.encode()).hexdigest(), text)


def mixed(mix):
    """(weight, Corpus) of each part -> Corpus. Its text begins with what each has to train, for `make_tokenizer`."""
    if not all(weight > 0 for weight, _ in mix):
        raise UserError("a weight of --data is 0; leave that part out")
    used = ",".join(f"{part.used}:{weight:g}" for weight, part in mix)
    digest = hashlib.sha256(" ".join(f"{part.sha256}:{weight}" for weight, part in mix).encode()).hexdigest()
    cut = [(part.text, len(part.text) * 9 // 10) for _, part in mix]
    text = "".join([text[:n] for text, n in cut] + [text[n:] for text, n in cut])
    return Corpus(used, digest, text, mix=tuple(mix))


def _text(name):
    """The text of a file, or of all .txt files of a folder, ordered by path. Line ends stay as they are."""
    paths, texts = [Path(name)], []
    if os.path.isdir(name):                             # glob skips hidden names (.ipynb_checkpoints, ._a.txt)
        paths = [Path(name, path) for path in sorted(glob.glob("**/*.[tT][xX][tT]", root_dir=name, recursive=True))]
    try:
        for path in paths:
            text = path.read_bytes().decode().removeprefix("\ufeff")               # a byte order mark
            if path.suffix in (".json", ".jsonl"):
                lines = filter(str.strip, text.split("\n")) if path.suffix == ".jsonl" else [text]
                rows = [row for made in map(json.loads, lines) for row in (made if isinstance(made, list) else [made])]
                text = "\n".join(row["text"] for row in rows)
            texts.append(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give --data a text file or folder, in UTF-8 (iconv converts)")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is no JSON of objects with a "text": {type(error).__name__} {error}')
    text = "\n".join(texts)
    if not text.strip():
        raise UserError(f"no text in {name}; give --data a text file, or a folder of .txt files or of two token files")
    if os.path.isdir(name):
        print(f"data: read {len(text):,} characters from {len(paths)} .txt files in {name}", file=sys.stderr)
    return text


def _shakespeare():
    """-> the text, or None and a line on stderr if there is neither file nor network."""
    if SHAKESPEARE.exists():
        return SHAKESPEARE.read_bytes().decode()
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=5) as reply:
            data = reply.read()
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:          # a login page, half a file
            raise ValueError("wrong sha256")
    except (OSError, ValueError) as error:
        print(f"data: cannot download tiny Shakespeare ({error}); using pydoc, Python's own help text, instead "
              f"(for Shakespeare, put it at {SHAKESPEARE})", file=sys.stderr)
        return None
    with suppress(OSError), replacing(SHAKESPEARE) as temporary:            # not kept where the folder is read-only
        temporary.write_bytes(data)
    return data.decode()


# ---- tokenizers
class Tokenizer:
    """Text <-> ids. tokens[id] is the UTF-8 bytes of one id, so one table decodes all kinds: char (the sorted
    characters of a text), byte (all 256), bpe (these, then merged pairs in order of merging), gpt2 (GPT-2's 50257).
    """

    def __init__(self, kind, tokens):
        self.kind, self.tokens, self.vocab_size = kind, list(tokens), len(tokens)
        self.lengths = np.array([len(t) * (t != END) for t in tokens])      # bytes of text behind each id
        if kind == "char":
            self.ids = {str(t, "utf-8"): i for i, t in enumerate(tokens)}
        elif kind != "byte":
            import tiktoken
            ranks = {t: i for i, t in enumerate(tokens) if t != END}
            self.bpe = tiktoken.Encoding(kind, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text):
        """str -> (T,) int64 array. Raises UserError naming the characters that the vocabulary lacks."""
        if self.kind == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        if self.kind in ("bpe", "gpt2"):
            return np.array(self.bpe.encode_ordinary(text), dtype=np.int64)
        if lacking := sorted(set(text) - self.ids.keys()):
            raise UserError(f"{len(lacking)} characters are not in the vocabulary: {''.join(lacking[:20])!r}; "
                            "leave them out, or train a new model with --tokenizer byte")
        return np.fromiter(map(self.ids.__getitem__, text), np.int64, len(text))

    def decode(self, ids):
        """ids (any integer sequence, array or tensor) -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.stream()(ids, final=True)

    def stream(self):
        """-> feed(ids, final=False): one id or several -> the text they complete. The first bytes of a character
        wait for its last one; feed(final=True) at the end lets out what is left, as U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids=(), final=False: decoder.decode(
            b"".join(self.tokens[i] for i in torch.as_tensor(ids).reshape(-1).tolist()), final)

    def bytes_a_token(self, ids):
        """Mean bytes of ids[1:], which a model that reads ids (N,) predicts: turns nats a token into bits a byte."""
        return int(self.lengths[ids[1:]].sum()) / (len(ids) - 1)

    def state(self):
        """The arguments that make it again, in plain types: torch.load(weights_only=True) reads them back."""
        return {"kind": self.kind, "tokens": self.tokens}


def make_tokenizer(kind, text, bpe_size=1024):
    """The tokenizer of this kind. char takes its vocabulary from all of text, as nanoGPT does; bpe learns up to
    bpe_size tokens from the first 90 %, which are trained on. Raises UserError where text or network is missing.
    """
    if kind == "byte":
        return Tokenizer(kind, EVERY_BYTE)
    if kind != "gpt2" and not text:
        raise UserError(f"a {kind} vocabulary needs a text; for token files give --tokenizer gpt2 or byte")
    if kind == "char":
        return Tokenizer(kind, [character.encode() for character in sorted(set(text))])
    if kind == "bpe":
        return Tokenizer(kind, train_bpe(text[:len(text) * 9 // 10], bpe_size))
    import tiktoken
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:              # no network; a wrong hash
        raise UserError(f"cannot download GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a "
                        "folder where it is cached, or use --tokenizer byte (train.py: bpe)") from None
    return Tokenizer(kind, [bpe.decode_single_token_bytes(i) for i in range(bpe.n_vocab)])


def train_bpe(text, size):
    """Byte-pair encoding (Sennrich et al. 2016): start from all bytes; again and again make the two neighbours that
    occur most often inside of GPT-2's words one more token -> at most `size` tokens, fewer where none occur twice.
    Pairs are counted by the bytes they make, as tiktoken merges them. Of equal counts the first in byte order wins.
    """
    import regex                                        # tiktoken requires it
    times = Counter(match.group() for match in regex.finditer(GPT2_PATTERN, text))
    words = [([bytes([b]) for b in word.encode()], n) for word, n in times.items()]
    counts, where = Counter(), defaultdict(set)         # of each pair: how often it occurs, in which words

    def count(i, word, n):
        for pair in map(bytes.__add__, word, word[1:]):
            counts[pair] += n
            where[pair].add(i)

    for i, (word, n) in enumerate(words):
        count(i, word, n)
    tokens = list(EVERY_BYTE)
    while len(tokens) < size and (most := max(counts.values(), default=0)) > 1:
        token = min(pair for pair, n in counts.items() if n == most)
        tokens.append(token)
        for i in where.pop(token):
            word, n = words[i]
            joined = word[:1]
            for part in word[1:]:                       # joins, from the left, what makes the token
                joined[-1:] = [token] if joined[-1] + part == token else [joined[-1], part]
            count(i, word, -n)
            count(i, joined, n)
            words[i] = joined, n
    return tokens


# ---- batches
def split(ids, seq_len=1, name="the text"):
    """ids (N,) -> the first 90 % to train, the last 10 % to validate, as nanoGPT cuts. UserError if too few."""
    cut = len(ids) * 9 // 10
    if (n := len(ids) - cut) <= seq_len:
        raise UserError(f"{name} is too short: validation keeps {n} tokens, no more than --seq-len {seq_len}")
    return ids[:cut], ids[cut:]


@lru_cache(4)
def epoch(n, seq_len, seed, number):
    """Where an epoch's windows start in n tokens: side by side from a random offset on, in random order."""
    count = max(1, n // seq_len - 1)
    random = np.random.default_rng([seed % 2**64, number])      # hashes the pair: (0, 1), (1, 0) share nothing
    return random.integers(n - count * seq_len) + seq_len * random.permutation(count)


def inputs_and_targets(ids, starts, length):
    """-> x, y (B, length) int64: ids from each start on, and y one token later."""
    rows = torch.stack([torch.as_tensor(ids[i: i + length + 1]).long() for i in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(ids, seed, step, batch_size, seq_len):
    """ids (N,) -> x, y (B, T) int64, where y is x one token later. A pure function of (seed, step): every window of
    an epoch comes once, then those of the next. N is at least T + 1 (Corpus.splits sees to it).
    """
    count = len(epoch(len(ids), seq_len, seed, 0))
    numbers = range(step * batch_size, (step + 1) * batch_size)
    starts = [epoch(len(ids), seq_len, seed, i // count)[i % count] for i in numbers]
    return inputs_and_targets(ids, starts, seq_len)


def windows(ids, seq_len, batch_size, every=1):
    """Yield x, y (<= B, T) int64: every token of ids but the first is a target exactly once. A shorter window comes
    last, as a batch of one, so weight means by y.numel(). every > 1: only each `every`-th whole window.
    """
    whole = (len(ids) - 1) // seq_len * seq_len
    starts = range(0, whole, every * seq_len)
    for i in range(0, len(starts), batch_size):
        yield inputs_and_targets(ids, starts[i: i + batch_size], seq_len)
    if every == 1 and whole < len(ids) - 1:
        yield inputs_and_targets(ids, [whole], len(ids) - 1 - whole)


def streams(ids, seq_len, n):
    """Yield x, y (n, <= T) int64: the same text as n streams side by side, in pieces of seq_len, for a state that
    is carried on. Fewer than n tokens are left out at the end; n tokens or fewer make fewer streams.
    """
    n = min(n, len(ids) - 1)
    length = (len(ids) - 1) // n
    for i in range(0, length, seq_len):
        yield inputs_and_targets(ids, range(i, i + n * length, length), min(seq_len, length - i))


# ---- synthetic tasks
def distinct(batch, n, below, generator):
    """-> (batch, n): n different numbers 0 .. below - 1 a row, in random order."""
    return torch.rand(batch, below, generator=generator).topk(n).indices


def mqar(batch, n_pairs, n_queries, vocab, seq_len, generator):
    """Multi-query associative recall: pairs of a key and its value, then some of the keys again; answer with the value.
    After Arora et al. 2023 (Zoology, arXiv 2312.04927), as https://github.com/HazyResearch/zoology draws it.

    mqar(1, n_pairs=3, n_queries=2, vocab=12, seq_len=14, generator=torch.Generator().manual_seed(7)):

                 key  val  key  val  key  val query                               query
        tokens     3   11    4   10    1    8    4    0    0    0    0    0    3    0
        targets -100 -100 -100 -100 -100 -100   10 -100 -100 -100 -100 -100   11 -100

    -> tokens, targets (batch, seq_len) int64 on the CPU. Keys are 1 .. vocab/2 - 1, values vocab/2 .. vocab - 1,
    each at most once in a row; 0 fills the rest; targets are -100 where no answer is asked. Queries stand 2g places
    behind the last pair, g = 0, 1, .. drawn by weight (g+1)^-0.99 (zoology's power_a = 0.01, without its filler).
    """
    if not (1 <= n_queries <= n_pairs <= vocab // 2 - 1 and 2 * (n_pairs + n_queries) <= seq_len):
        raise UserError("mqar needs 1 <= n_queries <= n_pairs <= vocab/2 - 1 and 2 (n_pairs + n_queries) <= seq_len, "
                        f"not {n_pairs=}, {n_queries=}, {vocab=}, {seq_len=}")
    keys = 1 + distinct(batch, n_pairs, vocab // 2 - 1, generator)
    values = vocab // 2 + distinct(batch, n_pairs, vocab - vocab // 2, generator)
    asked = distinct(batch, n_queries, n_pairs, generator)
    weights = torch.arange(1, (seq_len - 2 * n_pairs) // 2 + 1, dtype=torch.float64) ** -0.99
    place = 2 * n_pairs + 2 * torch.multinomial(weights.expand(batch, -1), n_queries, generator=generator)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    tokens[:, 0:2 * n_pairs:2], tokens[:, 1:2 * n_pairs:2] = keys, values
    tokens.scatter_(1, place, keys.gather(1, asked))
    targets = torch.full_like(tokens, -100).scatter_(1, place, values.gather(1, asked))
    return tokens, targets


def needle(batch, n_pairs, seq_len, generator, symbols=16):
    """Pairs of a key and its value anywhere in noise; at the end each key is asked for, in random order. Token 0 stands
    behind a key that asks; then come `symbols` tokens each for noise, keys (at most once a row) and values.
    needle(1, 2, 12, g, symbols=3), where g is torch.Generator().manual_seed(10521) here and below:
        tokens     1    1    6    7    1    1    4    9    4    0    6    0
        targets -100 -100 -100 -100 -100 -100 -100 -100    9 -100    7 -100
    """
    n = seq_len - 2 * n_pairs
    slot = distinct(batch, n_pairs, n - n_pairs, generator)
    place = slot + slot.argsort(-1).argsort(-1)                 # one further for each pair that stands before it
    keys = 1 + symbols + distinct(batch, n_pairs, symbols, generator)
    values = torch.randint(1 + 2 * symbols, 1 + 3 * symbols, keys.shape, generator=generator)
    tokens = torch.randint(1, 1 + symbols, (batch, seq_len), generator=generator)
    tokens.scatter_(1, place, keys).scatter_(1, place + 1, values)
    targets = torch.full_like(tokens, -100)
    tokens[:, n::2], tokens[:, n + 1::2], targets[:, n::2] = keys, 0, values
    return tokens, targets


# The tasks of MAD (Poli et al. 2024, arXiv 2403.17844, https://github.com/athms/mad-lab), written anew. Every batch is
# new, and training asks for the answers alone; MAD has fixed training sets, and its recalls train on every next token.
def recall(batch, n_keys, seq_len, generator, symbols=8, motif=1, noise=0.0):
    """In-context recall: n_keys pairs of a key and its value come again and again, asked from their second time on. A
    share `noise` of the pairs is noise. Fuzzy recall: a key has `motif` tokens (in MAD's training also fewer), a value
    1 to `motif`. `symbols` tokens each are for keys and values, then twice as many for noise.
    recall(1, 2, 16, g, symbols=3, motif=2, noise=0.2):
        tokens     2    1    3    0    2    5    3    2    1    3    7   11    9    0    2    5
        targets -100 -100 -100 -100 -100 -100 -100 -100    3 -100 -100 -100 -100 -100    5    3
    """
    n, at = seq_len // (motif + 1) + 1, torch.arange(motif)     # n pairs are enough, were all values one token
    keys = distinct(batch, n_keys, symbols ** motif, generator)[..., None] // symbols ** at % symbols
    values = torch.randint(symbols, 2 * symbols, keys.shape, generator=generator)
    values.masked_fill_(at > torch.randint(motif, (batch, n_keys, 1), generator=generator), -1)
    pick = torch.randint(n_keys, (batch, n), generator=generator)
    pick[torch.rand(batch, n, generator=generator) < noise] = -1
    tokens = torch.cat([keys, values], -1)[torch.arange(batch)[:, None], pick]          # (batch, n, 2 motif)
    order = (tokens < 0).flatten(1).int().argsort(stable=True)[:, :seq_len + 1]         # closes the gaps, the -1
    tokens[pick < 0] = torch.randint(2 * symbols, 4 * symbols, tokens[pick < 0].shape, generator=generator)
    seen = (pick[:, :, None] == pick[:, None]).tril(-1).any(-1) & (pick >= 0)
    targets = torch.where(seen[..., None] & (torch.arange(2 * motif) >= motif), tokens, -100)
    return tokens.flatten(1).gather(1, order[:, :-1]), targets.flatten(1).gather(1, order[:, 1:])


def compression(batch, n_tokens, generator, symbols=15):
    """Random tokens, a token "compress", then a token for each place that asks what stood there. In MAD an MLP answers
    from the output at "compress" alone; here a model may look further back, so only a fixed state has to compress.
    compression(1, 4, g, symbols=5):
        tokens     1    0    4    3    5    6    7    8    9
        targets -100 -100 -100 -100 -100    1    0    4    3
    """
    x = torch.randint(symbols, (batch, n_tokens), generator=generator)
    ask = symbols + torch.arange(n_tokens + 1).expand(batch, -1)
    return torch.cat([x, ask], 1), torch.cat([torch.full_like(ask, -100), x], 1)


def memorization(batch, seq_len, generator, symbols=127, seed=0):
    """Keys, each with a token "insert" that asks for its value. No value is ever shown: `seed` fixes them for all rows
    and batches, so a model must learn them in training. Tokens: `symbols` each of keys and values, "insert".
    memorization(1, 8, g, symbols=4):
        tokens     3    8    0    8    3    8    1    8
        targets -100    6 -100    4 -100    6 -100    5
    """
    values = symbols + torch.randperm(symbols, generator=torch.Generator().manual_seed(seed))
    keys = torch.randint(symbols, (batch, seq_len // 2), generator=generator)
    insert, nothing = torch.full_like(keys, 2 * symbols), torch.full_like(keys, -100)
    return torch.stack([keys, insert], -1).flatten(1), torch.stack([nothing, values[keys]], -1).flatten(1)


def selective_copying(batch, n_tokens, seq_len, generator, symbols=14):
    """Tokens anywhere among blanks, a token "copy", then as many blanks, each asking for the next of the tokens.
    selective_copying(1, 3, 10, g, symbols=4), where 4 is the blank, 5 "copy":
        tokens     4    3    0    3    4    4    5    4    4    4
        targets -100 -100 -100 -100 -100 -100 -100    3    0    3
    """
    n = seq_len - n_tokens - 1
    x = torch.randint(symbols, (batch, n_tokens), generator=generator)
    place = distinct(batch, n_tokens, n, generator).sort(-1).values
    tokens = torch.full((batch, seq_len), symbols).scatter_(1, place, x)
    tokens[:, n] = symbols + 1
    return tokens, torch.cat([torch.full((batch, n + 1), -100), x], 1)


# name: (draw, vocabulary size, chance); draw(batch, generator=g) -> tokens, targets. Sizes are MAD's smallest or below.
# Chance is what the row's commonest answer scores, asked for anything: no more than that shows no recall.
MAD = {
    "recall": (partial(recall, n_keys=8, seq_len=128), 16, 0.35),
    "noisy-recall": (partial(recall, n_keys=8, seq_len=128, noise=0.2), 32, 0.36),
    "fuzzy-recall": (partial(recall, n_keys=8, seq_len=128, motif=3), 16, 0.31),
    "compression": (partial(compression, n_tokens=31), 47, 0.16),
    "memorization": (partial(memorization, seq_len=32), 255, 1 / 127),      # of a fixed answer: a row shows none
    "selective-copying": (partial(selective_copying, n_tokens=16, seq_len=128), 16, 0.20)}


def main(argv=None):
    """Token files of a text, like nanoGPT's: OUT/train.bin and OUT/val.bin, cut by `split`, two bytes an id.
    A large text is encoded in blocks, between which gpt2 may cut words differently.
    """
    parser = argparse.ArgumentParser(description="Makes token files of a text: OUT/train.bin and OUT/val.bin.")
    parser.add_argument("--data", required=True, help="a text file, a folder of .txt files, shakespeare, pydoc")
    parser.add_argument("--tokenizer", default="gpt2", choices=("byte", "gpt2"), help="what a token is [gpt2]")
    parser.add_argument("--out", default="tokens", type=Path, help="folder for train.bin and val.bin [tokens]")
    args = parser.parse_args(argv)
    if any((args.out / file).exists() for file in ("train.bin", "val.bin")):
        raise UserError(f"{args.out} already holds token files; give another --out")
    corpus, tokenizer = read(args.data), make_tokenizer(args.tokenizer, "")
    if not corpus.text or corpus.mix:
        raise UserError(f"{args.data} is a mix, or token files; give one text, and mix the token files")
    text = corpus.text
    ids = [tokenizer.encode(text[i: i + BLOCK]).astype("<u2") for i in range(0, len(text), BLOCK)]
    train, val = split(np.concatenate(ids), name=args.data)
    for file, part in ("val.bin", val), ("train.bin", train):
        with replacing(args.out / file) as temporary:
            part.tofile(temporary)
    print(f"data: {len(train):,} and {len(val):,} ids; use them with --data {args.out} --tokenizer {args.tokenizer}")


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
