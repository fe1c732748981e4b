"""data.py - text becomes tokens, and tokens become batches.

`read` finds a text or token files, `make_tokenizer` turns text into ids, and `split`, `batch`, `windows` and `streams`
cut ids up. There is no loader object: a batch is a function of (seed, step), so an exact resume needs no loader state.
"""
import codecs
import glob
import hashlib
import json
import re
import sys
import urllib.request
from collections import Counter, defaultdict
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common import Parser, UserError, exit_code, replacing, say

SHAKESPEARE = Path(__file__).resolve().parent / "data" / "shakespeare.txt"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TOKENIZERS = ("char", "byte", "bpe", "gpt2")
EVERY_BYTE = [bytes([b]) for b in range(256)]
END = b"<|endoftext|>"                                  # GPT-2's last token; it stands between texts
BLOCK = 2**24                                           # characters encoded at a time
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"       # its words


# ---- text and token files
class Corpus(NamedTuple):
    """Hold what a name of --data stands for: a text, token files, or a mix of these."""
    used: str                                           # the name of what was really read
    sha256: str
    text: str = ""
    tokens: tuple = ()                                  # ids to train and to validate on, uint16 arrays on the disk
    mix: tuple = ()                                     # (weight, Corpus) of each part

    def splits(self, tokenizer, seq_len):
        """Return ids to train and to validate on, arrays (N,). Raises UserError where tokenizer or seq_len do not fit.
        A mix splits each part alone. To fit the weights, training repeats short parts, and validation cuts long
        ones."""
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
    """Return the Corpus of a name as --data takes it. Raises UserError for what cannot be read, is empty or not UTF-8.
    'shakespeare' is data/shakespeare.txt beside this file, downloaded if missing. Without a network it is 'pydoc',
    Python's own help text; that differs between Python versions, so it is no benchmark. A folder with nanoGPT's token
    files (*train*.bin and *val*.bin, no meta.pkl) stands for these; they are mapped, not loaded. Any other folder
    stands for its .txt files, in subfolders too, joined by newlines. Any other name is a UTF-8 file; a .json or .jsonl
    file gives its "text" fields. 'a.txt:0.4,b.jsonl:0.6' is a mix of names by weight."""
    weighted = [re.fullmatch(r"(.+):(\d*\.?\d+)", part) for part in str(name).split(",")]
    if all(weighted):
        mix = tuple((float(part[2]), read(part[1])) for part in weighted)
        if not all(weight for weight, _ in mix):
            raise UserError("a weight of --data is 0; leave that part out")
        used = ",".join(f"{part.used}:{weight:g}" for weight, part in mix)
        digest = hashlib.sha256(" ".join(f"{part.sha256}:{weight}" for weight, part in mix).encode())
        train, val = zip(*(split(part.text) for _, part in mix))
        return Corpus(used, digest.hexdigest(), "".join(train + val), mix=mix)      # bpe learns from what comes first
    text = _shakespeare() if name == "shakespeare" else None
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


def _text(name):
    """Return the text of a file, or of all .txt files of a folder, ordered by path. Line ends stay as they are."""
    paths, texts = [Path(name)], []
    if Path(name).is_dir():                             # glob skips hidden names (.ipynb_checkpoints, ._a.txt)
        paths = [Path(name, path) for path in sorted(glob.glob("**/*.[tT][xX][tT]", root_dir=name, recursive=True))]
    try:
        for path in paths:
            text = path.read_bytes().decode().removeprefix("\ufeff")               # a byte order mark
            if path.suffix in (".json", ".jsonl"):
                lines = filter(str.strip, text.split("\n")) if path.suffix == ".jsonl" else [text]
                rows = [row for made in map(json.loads, lines) for row in (made if isinstance(made, list) else [made])]
                text = "\n".join(row["text"] for row in rows)
            texts.append(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {type(error).__name__} {error}; give --data a file or folder of text in "
                        'UTF-8 (iconv converts), or JSON of objects with a "text"')
    text = "\n".join(texts)
    if not text.strip():
        raise UserError(f"no text in {name}; give --data a text file, or a folder of .txt files or of two token files")
    if Path(name).is_dir():
        print(f"data: read {len(text):,} characters from {len(paths)} .txt files in {name}", file=sys.stderr)
    return text


def _shakespeare():
    """Return the text. Print a line and return None if there is neither a file nor a network."""
    if SHAKESPEARE.exists():
        return SHAKESPEARE.read_bytes().decode()
    try:
        data = urllib.request.urlopen(SHAKESPEARE_URL, timeout=5).read()
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:          # a login page, half a file
            raise ValueError("wrong sha256")
        with suppress(OSError), replacing(SHAKESPEARE) as temporary:        # not kept where the folder is read-only
            temporary.write_bytes(data)
        return data.decode()
    except (OSError, ValueError) as error:
        print(f"data: cannot download tiny Shakespeare ({error}); using pydoc, Python's own help text, instead "
              f"(for Shakespeare, put it at {SHAKESPEARE})", file=sys.stderr)


# ---- tokenizers
class Tokenizer:
    """Turn text into ids and back. tokens[id] is the UTF-8 bytes of an id, so one table decodes all kinds: char (the
    sorted characters of a text), byte (all 256), bpe (these, then pairs in order of merging), gpt2 (GPT-2's 50257).
    """

    def __init__(self, kind, tokens):
        self.kind, self.tokens, self.vocab_size = kind, list(tokens), len(tokens)
        if kind == "char":
            self.ids = {str(t, "utf-8"): i for i, t in enumerate(tokens)}
        elif kind != "byte":
            import tiktoken
            ranks = {t: i for i, t in enumerate(tokens) if t != END}
            self.bpe = tiktoken.Encoding(kind, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text):
        """Return the int64 ids (T,) of a text. Raises UserError naming the characters that the vocabulary lacks."""
        if self.kind == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        if self.kind in ("bpe", "gpt2"):
            return np.array(self.bpe.encode_ordinary(text), dtype=np.int64)
        if lacking := sorted(set(text) - self.ids.keys()):
            raise UserError(f"{len(lacking)} characters are not in the vocabulary: {''.join(lacking[:20])!r}; "
                            "leave them out, or train a new model with --tokenizer byte")
        return np.fromiter(map(self.ids.__getitem__, text), np.int64, len(text))

    def decode(self, ids):
        """Return the text of ids (a sequence, array or tensor); bytes that are not UTF-8 become U+FFFD."""
        return self.stream()(ids, final=True)

    def stream(self):
        """Return feed(ids, final=False) -> the text that ids complete. final=True lets out the rest as U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids=(), final=False: decoder.decode(
            b"".join(self.tokens[i] for i in torch.as_tensor(ids).reshape(-1).tolist()), final)

    def bytes_a_token(self, ids):
        """Return the mean bytes of ids[1:], the tokens that a model predicts when it reads ids (N,)."""
        return sum(len(self.tokens[i]) for i in ids[1:] if self.tokens[i] != END) / (len(ids) - 1)

    def state(self):
        """Return the arguments that make it again, in types that torch.load(weights_only=True) reads."""
        return {"kind": self.kind, "tokens": self.tokens}


def encode_prompt(tokenizer, prompt):
    """Return the ids to start from; for an empty prompt the id of a newline, or 0 where the vocabulary has none."""
    return tokenizer.encode(prompt) if prompt else [tokenizer.tokens.index(b"\n") if b"\n" in tokenizer.tokens else 0]


def make_tokenizer(kind, text, bpe_size=1024):
    """Return a tokenizer of this kind. Raises UserError where a text or the network is missing. char takes all
    characters of the text, as nanoGPT does. bpe learns up to bpe_size tokens from the part to train on."""
    if kind == "byte":
        return Tokenizer(kind, EVERY_BYTE)
    if kind != "gpt2" and not text:
        raise UserError(f"a {kind} vocabulary needs a text; for token files give --tokenizer gpt2 or byte")
    if kind == "char":
        return Tokenizer(kind, [character.encode() for character in sorted(set(text))])
    if kind == "bpe":
        return Tokenizer(kind, train_bpe(split(text)[0], bpe_size))
    import tiktoken
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:              # no network; a wrong hash
        raise UserError(f"cannot download GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a "
                        "folder where it is cached, or use --tokenizer byte (train.py: bpe)") from None
    return Tokenizer(kind, [bpe.decode_single_token_bytes(i) for i in range(bpe.n_vocab)])


def train_bpe(text, size):
    """Return at most `size` tokens of byte-pair encoding (Sennrich et al. 2016), fewer where no pair occurs twice. It
    starts from all bytes. Again and again the two neighbours most frequent inside of GPT-2's words become a token.
    Pairs count by the bytes they make, as tiktoken merges them. Of equal counts the first in byte order wins."""
    import regex                                        # tiktoken requires it
    times = Counter(match.group().encode() for match in regex.finditer(GPT2_PATTERN, text))
    parts = {word: [bytes([b]) for b in word] for word in times}
    tokens, counts, where = list(EVERY_BYTE), Counter(), defaultdict(set)   # of a pair: how often, in which words

    def count(word, sign):
        for pair in map(bytes.__add__, parts[word], parts[word][1:]):
            counts[pair] += sign * times[word]
            where[pair].add(word)

    for word in parts:
        count(word, 1)
    while len(tokens) < size and (most := max(counts.values(), default=0)) > 1:
        token = min(pair for pair, n in counts.items() if n == most)
        tokens.append(token)
        for word in where.pop(token):
            count(word, -1)
            joined = parts[word][:1]
            for part in parts[word][1:]:                # joins, from the left, what makes the token
                joined[-1:] = [token] if joined[-1] + part == token else [joined[-1], part]
            parts[word] = joined
            count(word, 1)
    return tokens


# ---- batches
def split(ids, seq_len=-1, name="the text"):
    """Return the first 90 % of ids, to train, and the rest, to validate. Raises UserError unless it exceeds seq_len."""
    cut = len(ids) * 9 // 10
    if (n := len(ids) - cut) <= seq_len:
        raise UserError(f"{name} is too short: validation keeps {n} tokens, no more than --seq-len {seq_len}")
    return ids[:cut], ids[cut:]


@lru_cache(4)
def epoch(n, seq_len, seed, number):
    """Return where an epoch's windows start in n tokens: side by side from a random offset on, in random order."""
    count = max(1, n // seq_len - 1)
    random = np.random.default_rng([seed % 2**64, number])      # hashes the pair: (0, 1), (1, 0) share nothing
    return random.integers(n - count * seq_len) + seq_len * random.permutation(count)


def inputs_and_targets(ids, starts, length):
    """Return x, y (B, length) int64: ids from each start on, and y one token later."""
    rows = torch.stack([torch.as_tensor(ids[i: i + length + 1]).long() for i in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(ids, seed, step, batch_size, seq_len):
    """Return x, y (B, T) int64 of ids (N,), N > T, as a pure function of (seed, step), epoch after epoch."""
    count = len(epoch(len(ids), seq_len, seed, 0))
    numbers = range(step * batch_size, (step + 1) * batch_size)
    starts = [epoch(len(ids), seq_len, seed, i // count)[i % count] for i in numbers]
    return inputs_and_targets(ids, starts, seq_len)


def windows(ids, seq_len, batch_size, every=1):
    """Yield x, y (<= B, T) int64, in which every token of ids but the first is a target exactly once. A shorter window
    comes last and alone, so weight means by y.numel(). every > 1 leaves each `every`-th whole window."""
    whole = (len(ids) - 1) // seq_len * seq_len
    starts = range(0, whole, every * seq_len)
    for i in range(0, len(starts), batch_size):
        yield inputs_and_targets(ids, starts[i: i + batch_size], seq_len)
    if every == 1 and whole < len(ids) - 1:
        yield inputs_and_targets(ids, [whole], len(ids) - 1 - whole)


def streams(ids, seq_len, n):
    """Yield x, y (n, <= T) int64: ids as n streams side by side, in pieces of seq_len. At most n - 1 ids are lost."""
    n = min(n, len(ids) - 1)
    length = (len(ids) - 1) // n
    for i in range(0, length, seq_len):
        yield inputs_and_targets(ids, range(i, i + n * length, length), min(seq_len, length - i))


# ---- python data.py
def make_files(args):
    """Write OUT/train.bin and OUT/val.bin, two bytes an id, as nanoGPT does. The end of a BLOCK may cut a word."""
    if any((args.out / file).exists() for file in ("train.bin", "val.bin")):
        raise UserError(f"{args.out} already holds token files; give another --out")
    corpus, tokenizer = read(args.data), make_tokenizer(args.tokenizer, "")
    if corpus.mix or corpus.tokens:
        raise UserError(f"{args.data} is a mix, or token files; give one text, and mix the token files")
    blocks = (corpus.text[i: i + BLOCK] for i in range(0, len(corpus.text), BLOCK))
    train, val = split(np.concatenate([tokenizer.encode(text).astype("<u2") for text in blocks]), 1, args.data)
    for file, part in ("val.bin", val), ("train.bin", train):
        with replacing(args.out / file) as temporary:
            part.tofile(temporary)
    say(f"data: {len(train):,} and {len(val):,} ids; use them with --data {args.out} --tokenizer {args.tokenizer}")


def main(argv=None):
    parser = Parser(prog="data.py", description="Makes token files of a text: OUT/train.bin and OUT/val.bin.")
    parser.add_argument("--data", required=True, help="a text file, a folder of .txt files, shakespeare, pydoc")
    parser.add_argument("--tokenizer", default="gpt2", choices=("byte", "gpt2"), help="what a token is [gpt2]")
    parser.add_argument("--out", default="tokens", type=Path, help="folder for train.bin and val.bin [tokens]")
    return exit_code(partial(make_files, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
