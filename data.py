"""data.py - text becomes tokens, and tokens become batches.

`read` finds a text or token files, `make_tokenizer` turns text into ids, and `split`, `batch`, `windows` and `streams`
cut ids up. There is no loader object: a batch is a function of (seed, step), so an exact resume needs no loader state.
A document is a file of a folder or a row of JSON. Between two documents a text has BORDER, and ids have the id of END.
"""
import codecs
import glob
import hashlib
import json
import os
import re
import sys
import urllib.request
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch

from common import Parser, UserError, exit_code, locked, replacing, say, seeded, tell

SHAKESPEARE = Path(__file__).resolve().parent / "data" / "shakespeare.txt"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TOKENIZERS = ("char", "byte", "gpt2")
END = b"<|endoftext|>"                                  # GPT-2's last token; it stands between documents
JSON = ".json", ".jsonl", ".ndjson"                      # the last two have a document a line
BORDER = "\ud800"                                       # half of a surrogate pair, which no UTF-8 text can hold
PIECE = 1024                                            # tokens of a prompt that are read at a time
BLOCK = 2**24                                           # characters or ids that are worked on at a time
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"       # its words


# ---- text and token files
class Joined:
    """Join arrays of ids to one, of which the first `length` count. A slice is loaded, the rest stays on the disk."""

    def __init__(self, parts, length=None):
        self.parts, self.edges = parts, np.cumsum([0, *map(len, parts)]).tolist()
        self.length = self.edges[-1] if length is None else length

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        start, stop, _ = at.indices(len(self))
        inside = ((a, i) for a, i in zip(self.parts, self.edges) if i < stop and start < i + len(a))
        return np.concatenate([a[max(0, start - i): stop - i] for a, i in inside])


class Corpus(NamedTuple):
    """Hold what a name of --data stands for: a text, token files, or a mix of these."""
    used: str                                           # the name of what was really read
    sha256: str
    text: str = ""                                      # with BORDER between documents
    tokens: tuple = ()                                  # ids to train and to validate on, Joined uint16 files
    mix: tuple = ()                                     # (weight, Corpus) of each part

    def splits(self, tokenizer, seq_len):
        """Return ids to train and to validate on, arrays (N,). Raises UserError where tokenizer or seq_len do not fit.
        A mix splits each part alone. To fit the weights, training repeats short parts, validation cuts long ones."""
        if self.mix:
            weights, parts = zip(*((weight, part.splits(tokenizer, seq_len)) for weight, part in self.mix))
            mixed = []
            for end, ids in zip((max, min), zip(*parts)):
                total = end(len(a) / weight for a, weight in zip(ids, weights))
                counts = [round(total * weight) for weight in weights]
                mixed.append(Joined([Joined([a] * -(-n // len(a)), n) for a, n in zip(ids, counts)]))
            return tuple(mixed)
        both = self.tokens or split(tokenizer.encode(self.text))
        if (shorter := min(map(len, both))) <= seq_len:
            raise UserError(f"{self.used} is too short: a split has {shorter} tokens, no more than --seq-len {seq_len}")
        greatest = max((int(part.max()) for ids in self.tokens for part in ids.parts), default=0)
        if greatest >= tokenizer.vocab_size:
            raise UserError(f"{self.used} holds ids up to {greatest}; give the --tokenizer that made them")
        return both


def read(name):
    """Return the Corpus of a name as --data takes it. Raises UserError for what cannot be read.
    'shakespeare' is data/shakespeare.txt, downloaded if missing. Without a network it is 'pydoc', Python's help text,
    which differs between its versions. A folder stands for its token files, or else for its .txt,
    .json, .jsonl and .ndjson files, in subfolders too, but for those of runs; any other name for a
    file. 'a.txt:0.4,b.jsonl:0.6' is a mix of names by weight."""
    weighted = [re.fullmatch(r"(.+):(\d*\.?\d+)", part) for part in str(name).split(",")]
    if all(weighted):
        mix = tuple((float(part[2]), read(part[1])) for part in weighted)
        if not all(weight for weight, _ in mix):
            raise UserError("a weight of --data is 0; leave that part out")
        used = ",".join(f"{part.used}:{weight:g}" for weight, part in mix)
        digest = hashlib.sha256(" ".join(f"{part.sha256}:{weight}" for weight, part in mix).encode())
        train, val = zip(*(split(part.text) for _, part in mix))
        return Corpus(used, digest.hexdigest(), "".join(train + val), mix=mix)
    digest = hashlib.sha256()
    if any(tokens := _token_files(Path(name))):
        for ids in sum(tokens, []):
            digest.update(ids)
        return Corpus(str(name), digest.hexdigest(), tokens=tuple(map(Joined, tokens)))
    used, pieces = texts(name)
    text = "".join(pieces)
    digest.update(text.replace(BORDER, "\n").encode())
    return Corpus(used, digest.hexdigest(), text)


def _token_files(folder):
    """Return two lists of uint16 arrays, the files to train and to validate on: .bin of nanoGPT or llm.c, whose names
    have the word train or val. They stay on the disk. Raises UserError for other names or ids."""
    files = {"train": [], "val": []}
    for path in sorted(folder.glob("[!.]*.bin")) if not (folder / "meta.pkl").exists() else ():
        kinds = files.keys() & re.split(r"[\W\d_]+", path.name.lower())
        if len(kinds) != 1:
            raise UserError(f"{path}: is it train or val? rename it to tell, or move it")
        size, head = path.stat().st_size, np.fromfile(path, "<i4", 3)
        first = 1024 * (len(head) == 3 and head[0] in (20240520, 20240801))        # llm.c's header of uint16, uint32
        ids = np.fromfile(path, "<u2", 2**16, offset=first)
        wide = len(ids) >= 64 and ids[1::2].max() < 4 <= ids[::2].max()
        if wide or size % 2 or not len(ids) or first and head[2] != (size - first) // 2:
            raise UserError(f"{path} is empty, cut off, or of four bytes an id; write it as uint16, like data.py")
        files[kinds.pop()].append(np.memmap(path, "<u2", "r", first))              # of mode "c" all would be in memory
    return list(files.values())


def texts(name):
    """Return what is really read for a name, and its documents, each but the first with a BORDER before it."""
    if name == "pydoc" or name == "shakespeare" and not _shakespeare():
        from pydoc_data.topics import topics
        text = "\n".join(map(topics.get, sorted(topics)))
        return "pydoc (not tiny Shakespeare: not comparable with README)", [text]
    return str(name), _documents(SHAKESPEARE if name == "shakespeare" else Path(name))


def _files(folder):
    """Return the texts in a folder: each real file once, whatever links to it, and none of runs."""
    inside = sorted(glob.glob("**", root_dir=folder, recursive=True), reverse=True)  # skips .hidden
    runs = tuple(p.removesuffix("ckpt.pt") for p in inside if p.endswith(f"{os.sep}ckpt.pt"))
    if runs:
        tell(f"data: left out the runs in {folder}: {' '.join(runs)}")
    kept = [f"{folder}/{p}" for p in inside
            if p.lower().endswith((".txt", *JSON)) and not p.startswith(runs)]
    return sorted({os.path.realpath(p): p for p in kept}.values())


def _documents(name):
    """Yield the documents of a file or folder, and say how far it is. Raises UserError for what cannot be read."""
    paths, length, n, row = _files(name) if name.is_dir() else [name], 0, 0, 0
    try:
        for i, path in enumerate(map(Path, paths)):
            for row, text in enumerate(_rows(path), 1):
                if text.strip():
                    yield BORDER * (n > 0) + text
                    n, length = n + 1, length + len(text)
                    if length % (4 * BLOCK) < len(text):                           # not too often
                        tell(f"data: read {length:,} characters, {i} of {len(paths)} files")
            row = 0
    except Exception as error:                          # its type depends on what the file is
        fault = f"{type(error).__name__} {error}" + f" after row {row}" * (row > 0)
        raise UserError(f"cannot read {path}: {fault}; give a file or folder of UTF-8 text (gunzip, iconv), JSON of "
                        'objects whose "text" is a string, or, to train, a mix with weights, a.txt:0.4,b.txt:0.6'
                        )
    if not n:
        raise UserError(f"no text in {name}; give --data a text (gunzip .gz), or a folder of texts or of token files")
    if n > 1:
        tell(f"data: {length:,} characters, {n:,} documents, {len(paths)} files in {name}")


def _rows(path):
    """Yield the text of a file, or the "text" of each row of JSON."""
    kind = path.suffix.lower()
    if kind == ".bin":
        raise ValueError("a token file by its name, which is read by that of its folder")
    with path.open("rb") as file:
        if kind in JSON[1:]:
            rows = (json.loads(line) for line in file if line.strip())
        elif kind == ".json":
            rows = json.load(file)
        else:
            rows = [dict(text=file.read().decode("utf-8-sig"))]
        if isinstance(rows, dict):                      # config.json, even of an unsaved run
            rows = [rows] if rows.keys() != {"train", "config", "data"} else []
        for row in rows:
            row["text"].encode()                        # fails for half of a surrogate pair, as BORDER is
            yield row["text"]


def _shakespeare():
    """Download tiny Shakespeare if it is missing, and tell whether it is there. Print a line if not."""
    try:
        if not SHAKESPEARE.exists():
            text = urllib.request.urlopen(SHAKESPEARE_URL, timeout=5).read()
            if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:      # a login page, half a file
                raise ValueError("wrong sha256")
            with replacing(SHAKESPEARE) as temporary:
                temporary.write_bytes(text)
        return True
    except (OSError, ValueError) as error:
        tell(f"data: cannot download {SHAKESPEARE} ({error}); using pydoc, Python's help text")


# ---- tokenizers
class Tokenizer:
    """Turn text into ids and back. tokens[id] is the UTF-8 bytes of an id, of all kinds: char (the sorted characters of
    a text), byte (all 256), gpt2 (GPT-2's 50257). `end` is the id of END; None for characters of a single document.
    Where a text itself says <|endoftext|>, that becomes ordinary tokens."""

    def __init__(self, kind, tokens):
        self.kind, self.tokens, self.vocab_size = kind, list(tokens), len(tokens)
        self.state = dict(kind=kind, tokens=self.tokens)      # for checkpoints: Tokenizer(**state) makes it again
        self.end = self.tokens.index(END) if END in self.tokens else None
        if kind == "char":
            self.ids = {BORDER if t == END else str(t, "utf-8"): i for i, t in enumerate(tokens)}
        if kind == "gpt2":
            ranks = {t: i for i, t in enumerate(tokens) if t != END}
            self.gpt2 = tiktoken.Encoding(kind, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text):
        """Return the int64 ids (T,) of a text. Raises UserError naming the characters that the vocabulary lacks."""
        text = text.replace(BORDER, "\n") if self.end is None else text
        if self.kind != "char" and BORDER in text:
            return np.concatenate([ids for part in text.split(BORDER) for ids in ([self.end], self.encode(part))][1:])
        if self.kind == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        if self.kind == "gpt2":
            return np.array(self.gpt2.encode_ordinary(text), dtype=np.int64)
        if lacking := sorted(set(text) - self.ids.keys()):
            raise UserError(f"the vocabulary lacks {len(lacking)} characters, {''.join(lacking[:20])!r}; omit them")
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
        lengths = np.array([len(token) * (token != END) for token in self.tokens])
        return sum(lengths[ids[i: i + BLOCK]].sum() for i in range(1, len(ids), BLOCK)) / (len(ids) - 1)


def encode_prompt(tokenizer, prompt):
    """Return the ids to start from; for an empty prompt the id of a newline, or 0 where the vocabulary has none."""
    return tokenizer.encode(prompt) if prompt else [tokenizer.tokens.index(b"\n") if b"\n" in tokenizer.tokens else 0]


def continue_text(model, tokenizer, place, n, **how):
    """Yield what the model writes after a place, piece by piece, n tokens in all; `how` goes to
    model.generate. A place, [state, list of the ids that it has not read], moves on with the text,
    so one may stop at any piece. At the end the last id is left."""
    feed, unread, device = tokenizer.stream(), place[1], next(model.parameters()).device

    def drawn(ids, n):
        if ids:
            tokens = torch.tensor([ids], device=device)
            place[0] = yield from model.generate(tokens, n, state=place[0], **how)
    while len(unread) > PIECE:
        nothing = "".join(drawn(unread[:PIECE], 0))
        del unread[:PIECE]                                    # first: the reader may stop at the yield
        yield nothing
    for token in drawn(unread if n else unread[:-1], n):
        unread += token.tolist()
        yield feed(token)
    del unread[:-1]
    yield feed(final=True)


def make_tokenizer(kind, text):
    """Return a tokenizer of this kind; char takes all characters of the text, as nanoGPT does. Raises UserError where a
    text or the network is missing."""
    if kind == "byte":
        return Tokenizer(kind, [*(bytes([b]) for b in range(256)), END])
    if kind == "char":
        if not text:
            raise UserError("a char vocabulary needs a text; for token files give --tokenizer gpt2 or byte")
        characters = [character.encode() for character in sorted(set(text) - {BORDER})]
        return Tokenizer(kind, characters + [END] * (BORDER in text))
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:              # no network; a wrong hash
        raise UserError(f"cannot download GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a "
                        "folder that has it, or use --tokenizer byte")
    return Tokenizer(kind, [gpt2.decode_single_token_bytes(i) for i in range(gpt2.n_vocab)])


# ---- batches
def split(ids):
    """Return the first 90 % of ids, to train, and the rest, to validate."""
    cut = len(ids) * 9 // 10
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


def documents(x, y, end, chunk):
    """Return x, y, mask, reset (B, T) of inputs and targets (B, T). Each x == end begins a document, which moves to
    the right, to a multiple of chunk; what leaves the row is dropped. Gaps have mask False, x 0 and y -100; reset is
    True where a document begins. With chunk 4 and end 9, x  1 2 9 3 4 5 9 6  becomes  1 2 0 0 9 3 4 5."""
    T, begins = x.shape[1], x == end
    t = torch.arange(T, device=x.device).expand_as(x)
    first = (t * begins).cummax(1).values               # where the document of a token begins
    gaps = (first.roll(1, 1) - t) % chunk * (begins & (t > 0))
    places = (t + gaps.cumsum(1)).clamp_max(T)
    move = lambda a, gap: a.new_full((len(a), T + 1), gap).scatter(1, places, a)[:, :T].contiguous()
    return move(x, 0), move(y, -100), move(torch.ones_like(begins), False), move(begins, False)


def repeated(x, y, share, on, seed, number):
    """Return x, y (B, T), where a share of the rows reads a passage of 16 to T / 2 tokens, anywhere in them, twice.
    With `on` such a row reads its beginning, of at most 128 tokens, again and again, to its end. T >= 32."""
    random, (B, T) = seeded(1_000_003 * seed + number), x.shape
    chosen, length, first = torch.rand(3, B, 1, generator=random)
    length = (16 + length * (min(T // 2, 128 if on else T) - 15)).long()
    again = length if on else (first * (T + 2 - 2 * length)).long() + length     # where the passage begins again
    at = torch.arange(T + 1)
    back = (at - again) // length + 1                         # lengths to go back
    back = (back.clamp_min(0) if on else (back == 1).long()) * (chosen < share)
    tokens = torch.cat([x, y[:, -1:]], 1).gather(1, at - back * length)
    return tokens[:, :-1], tokens[:, 1:]


# ---- python data.py
def make_files(args):
    """Write OUT/train.bin and OUT/val.bin, two bytes an id, as nanoGPT does. The end of a BLOCK may cut a word."""
    out = Path(args.out)
    with locked(out), replacing(out / "train.bin") as whole:
        if any(out.glob("*.bin")):
            raise UserError(f"{out} already holds token files; give another --out")
        tokenizer = make_tokenizer(args.tokenizer, "")
        with whole.open("wb") as file:                  # all ids, until val.bin has the last tenth
            for text in texts(args.data)[1]:
                for i in range(0, len(text), BLOCK):
                    file.write(tokenizer.encode(text[i: i + BLOCK]).astype("<u2").tobytes())
        train, val = split(np.memmap(whole, "<u2", "r"))
        with replacing(out / "val.bin") as tail:
            val.tofile(tail)
        os.truncate(whole, 2 * len(train))
    say(f"data: {len(train):,} and {len(val):,} ids; use them with "
        f"--data {out} --tokenizer {args.tokenizer}")


def main(argv=None):
    parser = Parser(prog="data.py", description="Makes token files of a text: OUT/train.bin and OUT/val.bin. "
                    "Between two documents, files or rows of JSON, stands the id of <|endoftext|>.")
    parser.add_argument("--data", required=True, help="a file or folder of .txt, .json or .jsonl, shakespeare, pydoc")
    parser.add_argument("--tokenizer", default="gpt2", choices=("byte", "gpt2"), help="what a token is [gpt2]")
    parser.add_argument("--out", default="tokens", help="folder for train.bin and val.bin [tokens]")
    return exit_code(partial(make_files, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
