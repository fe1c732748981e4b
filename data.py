"""data.py - text becomes tokens, and tokens become batches.

`read` finds a text or token files, and `make_tokenizer` makes what turns text into ids. `split`
parts ids into those to train on and those to validate on. `batch` cuts random batches from them,
`windows` and `streams` read them in order. There is no loader object: a batch is a function of
(seed, step), so --resume needs no state of a loader.

A document is a file of a folder or a row of .jsonl. Documents are joined to one text, with
<|endoftext|>, which is one token, between two of them. A file that itself holds <|endoftext|> has
several documents, too.
"""
import codecs
import json
import math
import os
import re
import sys
import urllib.request
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch

from common import Halt, Parser, UserError, exit_code, locked, replacing, say, tell

SHAKESPEARE = Path(__file__).resolve().parent / "data" / "shakespeare.txt"
SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
                   "/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TOKENIZERS = ("char", "byte", "gpt2")
BORDER = "<|endoftext|>"                                # between two documents; GPT-2's last token
END = BORDER.encode()
PIECE = 1024                                            # tokens of a prompt that are read at a time
GPT2_PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"      # its words
                r"|\s+(?!\S)|\s+")


# ---- text and token files
class Joined:
    """Join arrays of ids, in order, to one with len() and slices, but without a copy: ids on the
    disk are loaded only when a slice takes them. `length` cuts off what is beyond it."""

    def __init__(self, parts, length=None):
        self.parts = parts
        self.edges = np.cumsum([0, *map(len, parts)]).tolist()
        self.length = self.edges[-1] if length is None else length

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        start, stop, _ = at.indices(self.length)
        found = []
        for part, first in zip(self.parts, self.edges):
            if first < stop and start < first + len(part):
                found.append(part[max(0, start - first): stop - first])
        return np.concatenate(found)


def blend(parts, weights, total):
    """Return `total` * weight ids of each part, Joined. A part that is too short is repeated, and
    one that is too long is cut."""
    blended = []
    for ids, weight in zip(parts, weights):
        n = round(total * weight)
        blended.append(Joined([ids] * math.ceil(n / len(ids)), n))
    return Joined(blended)


class Corpus(NamedTuple):
    """Hold what a name of --data stands for: a text, token files, or a mix of these."""
    used: str                                           # the name of what was really read
    sha256: str
    text: str = ""                                      # with BORDER between documents
    tokens: tuple = ()                                  # two Joined: ids to train, to validate on
    mix: tuple = ()                                     # (weight, Corpus) of each part

    def splits(self, tokenizer, seq_len):
        """Return ids to train on and ids to validate on, (N,) each, arrays or Joined. Each part of
        a mix is split by itself. To get the shares that the weights ask for, training repeats short
        parts, and validation cuts long ones. Raises UserError if the tokenizer or seq_len does not
        fit."""
        if self.mix:
            weights = [weight for weight, _ in self.mix]
            train, val = zip(*(part.splits(tokenizer, seq_len) for _, part in self.mix))
            most = max(len(ids) / weight for ids, weight in zip(train, weights))
            least = min(len(ids) / weight for ids, weight in zip(val, weights))
            return blend(train, weights, most), blend(val, weights, least)

        train, val = self.tokens or split(tokenizer.encode(self.text))
        shorter = min(len(train), len(val))
        if shorter <= seq_len:
            raise UserError(f"{self.used} is too short: a split has {shorter} tokens, "
                            f"no more than --seq-len {seq_len}")
        for ids in self.tokens:
            if max(part.max() for part in ids.parts) >= tokenizer.vocab_size:
                raise UserError(f"{self.used} holds greater ids than the vocabulary has; "
                                "give the --tokenizer that made them")
        return train, val


def read(name):
    """Return the Corpus that a name of --data stands for. Raises UserError if it cannot be read.

    shakespeare              data/shakespeare.txt, downloaded if missing; without a network pydoc
    pydoc                    Python's help text, which differs between versions of Python
    a folder                 its token files, train*.bin and val*.bin, else all its .txt and .jsonl
    a.txt:0.4,b.jsonl:0.6    a mix of such names, by weight
    any other name           a file
    """
    weight_of = r"(.+):(?=.*[1-9])(\d*\.?\d+)"          # name:weight; a weight of 0 does not match
    weighted = [re.fullmatch(weight_of, part) for part in str(name).split(",")]
    if all(weighted) and not os.path.exists(name):      # a file's name may have a colon
        mix = [(float(part[2]), read(part[1])) for part in weighted]
        used = ",".join(f"{part.used}:{weight:g}" for weight, part in mix)
        digests = " ".join(f"{part.sha256}:{weight}" for weight, part in mix)
        text = "".join(part.text for _, part in mix)
        return Corpus(used, sha256(digests.encode()).hexdigest(), text, mix=tuple(mix))

    if any(Path(name).glob("*.bin")):
        if Path(name, "meta.pkl").exists():             # of nanoGPT; a pickle could run any code
            raise UserError(f"{name} has a vocabulary of its own, in meta.pkl, which is not read; "
                            "give its text, input.txt")
        tokens = token_files(name, "train"), token_files(name, "val")
        digest = sha256()
        for part in tokens[0].parts + tokens[1].parts:
            digest.update(part)
        return Corpus(str(name), digest.hexdigest(), tokens=tokens)

    used, found = texts(name)
    text = BORDER.join(found)
    return Corpus(used, sha256(text.encode()).hexdigest(), text)


def token_files(folder, kind):
    """Return the ids in a folder's files kind*.bin (train*.bin or val*.bin), Joined. They are
    uint16, as nanoGPT writes them, and stay on the disk until they are used."""
    paths = sorted(Path(folder).glob(f"{kind}*.bin"))
    paths = dict.fromkeys(map(os.path.realpath, paths))       # each file once, in spite of links
    if not paths:
        raise UserError(f"{folder} has .bin files, but no {kind}.bin; python data.py makes both")
    try:
        parts = [np.memmap(path, "<u2", "r") for path in paths]
        if not all(part[::-2].any() for part in parts):
            raise ValueError("every second is 0, as in uint32")
        return Joined(parts)
    except ValueError as fault:                         # also no bytes, or an odd number of them
        raise UserError(f"a {kind}*.bin in {folder} is not of uint16 ids: {fault}; make it again")


def texts(name):
    """Return the name of what is really read, as pydoc may take the place of shakespeare, and the
    list of its documents. Raises UserError if it cannot be read."""
    if name == "shakespeare" and download_shakespeare():
        return name, [SHAKESPEARE.read_text()]
    if name in ("shakespeare", "pydoc"):
        from pydoc_data.topics import topics
        text = "\n".join(topics[topic] for topic in sorted(topics))
        return "pydoc (not tiny Shakespeare: not comparable with README)", [text]

    files = [Path(name)]
    if files[0].is_dir():
        files = sorted(text_files(files[0], set()), key=str)
    found = []
    for file in files:
        try:
            found += [text for text in rows(file) if text.strip()]
        except Exception as fault:                      # its type depends on what the file is
            raise UserError(f"cannot read {file}: {fault}; give UTF-8 text, .jsonl with a "
                            '"text" in each row, or a mix with weights, a.txt:0.4,b.txt:0.6')
    if not found:
        raise UserError(f"no text in {name}; give a .txt, a .jsonl or a folder of these")
    return str(name), found


def text_files(folder, seen):
    """Yield the .txt and .jsonl files in a folder and in the folders in it, but none that are
    hidden. `seen` collects what links may lead to again: each real file and folder counts once."""
    for path in sorted(folder.glob("[!.]*")):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        if path.is_dir():
            yield from text_files(path, seen)
        elif path.suffix.lower() in (".txt", ".jsonl"):
            yield path


def rows(path):
    """Yield the documents of a file: its whole text, or the "text" of each row if it is .jsonl.
    Blank rows are skipped."""
    if ".json" not in path.suffix.lower():              # a .json that has no rows is refused below
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("it is binary")
        yield text
        return
    with path.open(encoding="utf-8-sig") as file:
        for number, row in enumerate(file, 1):
            if row.isspace():
                continue
            try:
                text = json.loads(row)["text"]
                text.encode()                           # fails for half of a surrogate pair
            except Exception as fault:
                raise ValueError(f"row {number}, {type(fault).__name__} {fault}")
            yield text


def download_shakespeare():
    """Download tiny Shakespeare if it is missing. Return whether it is there now, and print a line
    if it is not."""
    if SHAKESPEARE.exists():
        return True
    try:
        text = urllib.request.urlopen(SHAKESPEARE_URL, timeout=5).read()
        if sha256(text).hexdigest() != SHAKESPEARE_SHA256:    # a login page, half a file
            raise ValueError("wrong sha256")
        with replacing(SHAKESPEARE) as temporary:
            temporary.write_bytes(text)
        return True
    except (OSError, ValueError, Halt) as fault:
        tell(f"data: cannot download {SHAKESPEARE} ({fault}); using pydoc, Python's help text")
        return False


# ---- tokenizers
class Tokenizer:
    """Turn text into ids and back. There are three kinds: the tokens of "char" are the characters
    of a text, sorted, those of "byte" are all 256 bytes, and "gpt2" has GPT-2's 50,257 tokens.
    tokens[id] is the bytes of a token in UTF-8. `end` is the id of BORDER, or None if BORDER is no
    token: "char" has it only if its text has several documents."""

    def __init__(self, kind, tokens):
        self.kind = kind
        self.tokens = list(tokens)
        self.vocab_size = len(tokens)
        self.state = dict(kind=kind, tokens=self.tokens)      # Tokenizer(**state) makes it again
        self.end = self.tokens.index(END) if END in self.tokens else None
        if kind == "char":
            self.ids = {token.decode(): i for i, token in enumerate(tokens)}
        if kind == "gpt2":
            ranks = {token: i for i, token in enumerate(tokens) if token != END}
            self.gpt2 = tiktoken.Encoding(kind, pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                          special_tokens={})

    def encode(self, text):
        """Return the int64 ids (T,) of a text. Raises UserError naming the characters that the
        vocabulary lacks."""
        if self.end is None:
            return self.encode_document(text.replace(BORDER, "\n"))
        parts = []
        for document in text.split(BORDER):
            parts += [self.encode_document(document), [self.end]]
        return np.concatenate(parts[:-1])                     # BORDER is between, not at the end

    def encode_document(self, text):
        """Return the ids of a text without BORDER."""
        if self.kind == "byte":
            return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        if self.kind == "gpt2":
            return np.array(self.gpt2.encode_ordinary(text), np.int64)
        lacking = set(text) - self.ids.keys()
        if lacking:
            raise UserError(f"the checkpoint's vocabulary lacks {''.join(sorted(lacking))!r}; omit "
                            "these")
        return np.array([self.ids[character] for character in text], np.int64)

    def decode(self, ids):
        """Return the text of ids, a list, an array or a tensor. Bytes that are not UTF-8 become
        U+FFFD."""
        return self.stream()(ids, final=True)

    def stream(self):
        """Return a function feed(ids, final=False) that decodes a text piece by piece. It returns
        the characters that its ids complete, and keeps bytes that begin another character for the
        next call. With final=True it returns these as U+FFFD, too."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def feed(ids=(), final=False):
            ids = torch.as_tensor(ids).reshape(-1).tolist()
            return decoder.decode(b"".join(self.tokens[i] for i in ids), final)

        return feed

    def bytes_a_token(self, ids):
        """Return the mean number of bytes of the tokens ids[1:], which a model predicts when it
        reads ids (N,). BORDER counts 0 bytes."""
        lengths = [0 if token == END else len(token) for token in self.tokens]
        return np.array(lengths)[ids[1:]].mean()


def make_tokenizer(kind, text):
    """Return a tokenizer of this kind. Only "char" looks at the text: it takes all its characters,
    as nanoGPT does. Raises UserError if it needs a text or the network and there is none."""
    if kind == "byte":
        return Tokenizer(kind, [*(bytes([i]) for i in range(256)), END])
    if kind == "char":
        if not text:
            raise UserError("a char vocabulary needs a text; for token files give --tokenizer gpt2 "
                            "or byte")
        tokens = [character.encode() for character in sorted(set(text.replace(BORDER, "")))]
        if BORDER in text:
            tokens.append(END)
        return Tokenizer(kind, tokens)

    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as fault:              # no network, or a wrong hash
        raise UserError(f"cannot download GPT-2's vocabulary ({type(fault).__name__}); set "
                        "TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer byte")
    return Tokenizer(kind, [gpt2.decode_single_token_bytes(i) for i in range(gpt2.n_vocab)])


# ---- writing
def encode_prompt(tokenizer, prompt):
    """Return the list of ids to start from. An empty prompt stands for a newline, or for the first
    token of a vocabulary that has no newline."""
    start = "\n" if b"\n" in tokenizer.tokens else tokenizer.decode([0])
    return tokenizer.encode(prompt or start).tolist()


def continue_text(model, tokenizer, place, n, **how):
    """Yield the text of n new tokens, piece by piece. `how` goes to model.generate.

    place is a list [state, ids]: the state of the model, and the list of the ids that follow and
    that it has not read yet. Both are changed in place while the text goes on. So one may stop at
    any piece and go on from the same place later. In the end one id is left, the last of the text,
    which the model has not read."""
    feed = tokenizer.stream()
    unread = place[1]
    device = next(model.parameters()).device

    def draw(ids, n):
        """Read ids, yield n new ones, and keep the state that generate returns."""
        tokens = torch.tensor([ids], device=device)
        place[0] = yield from model.generate(tokens, n, state=place[0], **how)

    # read a long prompt in pieces, after each of which the caller may stop
    while len(unread) > PIECE:
        list(draw(unread[:PIECE], 0))
        del unread[:PIECE]
        yield ""

    # read the rest and write; to write nothing, the last id stays unread
    ids = unread if n else unread[:-1]
    if ids:
        for token in draw(ids, n):
            unread += token.tolist()
            yield feed(token)
    del unread[:-1]
    yield feed(final=True)


# ---- batches
def split(ids):
    """Return the first 90 % of ids, to train, and the rest, to validate."""
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]


@lru_cache(4)
def epoch(n, seq_len, seed, number):
    """Return where the windows of epoch `number` start in n tokens, (count,) in random order. They
    lie side by side, the first at a random offset."""
    count = max(1, n // seq_len - 1)
    random = np.random.default_rng([seed % 2**64, number])    # (0, 1) and (1, 0) share nothing
    offset = random.integers(n - count * seq_len)
    return offset + seq_len * random.permutation(count)


def inputs_and_targets(ids, starts, length):
    """Return x, y (B, length) int64: row b of x is the ids from starts[b] on, and y is one token
    later."""
    rows = torch.stack([torch.as_tensor(ids[i: i + length + 1]).long() for i in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(ids, seed, step, batch_size, seq_len):
    """Return inputs and targets x, y (B, T) int64 of ids (N,), N > T. They depend on (seed, step)
    alone. Batches take the windows of one epoch after the other."""
    n = len(ids)
    count = len(epoch(n, seq_len, seed, 0))
    starts = []
    for i in range(step * batch_size, (step + 1) * batch_size):
        starts.append(epoch(n, seq_len, seed, i // count)[i % count])
    return inputs_and_targets(ids, starts, seq_len)


def windows(ids, seq_len, batch_size, every=1):
    """Yield x, y (<= B, T) int64 in the order of ids: every token but the first is a target exactly
    once. The rest of ids, a shorter window, comes last and alone, so a mean over batches must be
    weighted by y.numel(). With every > 1, only one whole window of `every` is yielded, without the
    rest."""
    whole = (len(ids) - 1) // seq_len * seq_len
    starts = range(0, whole, every * seq_len)
    for i in range(0, len(starts), batch_size):
        yield inputs_and_targets(ids, starts[i: i + batch_size], seq_len)
    rest = len(ids) - 1 - whole
    if every == 1 and rest:
        yield inputs_and_targets(ids, [whole], rest)


def streams(ids, seq_len, n):
    """Yield x, y (n, <= T) int64: ids are cut into n equally long streams, one a row, and read in
    pieces of seq_len. At most n - 1 ids at the end are lost."""
    n = min(n, len(ids) - 1)
    length = (len(ids) - 1) // n
    for i in range(0, length, seq_len):
        starts = range(i, i + n * length, length)
        yield inputs_and_targets(ids, starts, min(seq_len, length - i))


def documents(x, y, end, chunk):
    """Return x, y, mask, reset (B, T) of inputs and targets (B, T), moved so that each document
    begins at a multiple of chunk. A document begins where x is `end`. It moves to the right, and
    what leaves the row is dropped. Gaps have mask False, x 0 and y -100. reset is True where a
    document begins. With chunk 4 and end 9,
    x  1 2 9 3 4 5 9 6  becomes  1 2 0 0 9 3 4 5."""
    T = x.shape[1]
    t = torch.arange(T, device=x.device).expand_as(x)
    begins = x == end

    # a document is as long after the move, so the gap before the next one completes its last chunk
    first = (t * begins).cummax(1).values               # where the document of a token begins
    gaps = (first.roll(1, 1) - t) % chunk * (begins & (t > 0))
    places = (t + gaps.cumsum(1)).clamp_max(T)          # T: out of the row

    def move(a, gap):
        moved = a.new_full((len(a), T + 1), gap).scatter(1, places, a)
        return moved[:, :T].contiguous()

    mask = torch.ones_like(begins)
    return move(x, 0), move(y, -100), move(mask, False), move(begins, False)


# ---- python data.py
def make_files(name, kind, out):
    """Write the ids of a text to OUT/train.bin and OUT/val.bin, two bytes an id, as nanoGPT does.
    The id of <|endoftext|> stands between two documents, which are files or rows of .jsonl."""
    with locked(out):
        if any(out.glob("*.bin")):
            raise UserError(f"{out} already holds token files; give another --out")
        train, val = read(name).splits(make_tokenizer(kind, ""), 0)
        with replacing(out / "train.bin") as first:     # both or none
            first.write_bytes(train[:].astype("<u2"))
            with replacing(out / "val.bin") as second:
                second.write_bytes(val[:].astype("<u2"))
    say(f"data: {len(train):,} and {len(val):,} ids; use --data {out} --tokenizer {kind}")


def main(argv=None):
    parser = Parser(prog="data.py", description=make_files.__doc__)
    parser.add_argument("--data", required=True, help="a file, a folder, or a mix: a.txt:0.4,b:0.6")
    parser.add_argument("--tokenizer", default="gpt2", choices=("byte", "gpt2"), help="[gpt2]")
    parser.add_argument("--out", default="tokens", help="folder for the files [tokens]")
    args = parser.parse_args(argv)
    return exit_code(lambda: make_files(args.data, args.tokenizer, Path(args.out)))


if __name__ == "__main__":
    sys.exit(main())
