"""Text and synthetic tasks: everything that becomes tokens.

load_text finds the text, make_tokenizer makes it ids, split / batch / windows cut the ids up for training and for the
validation loss, mqar draws a synthetic recall task. There is no loader object and so no loader state: a batch is a
function of (seed, step), all that an exact resume must know. Texts are held in memory whole; nothing here is sharded.
"""
import codecs
import hashlib
import http.client
import os
import stat
import sys
import urllib.request
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
KINDS = ("char", "byte", "gpt2")
EVERY_BYTE = [bytes([b]) for b in range(256)]
# how GPT-2 cuts text into words; here, so that no checkpoint can bring a regular expression of its own
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class UserError(Exception):
    """A mistake of the user's, told in one line that names the remedy; scripts print it on stderr and exit with 2."""


# ---- text

def load_text(name, folder="data"):
    """-> (text, used), where `used` is the name of what was really read: 'shakespeare', 'pydoc' or the path as given.

    'shakespeare' is FOLDER/shakespeare.txt (FOLDER relative to this file), downloaded if missing, pydoc if that fails.
    'pydoc' is the help text inside CPython; it differs between Python versions, so it is no benchmark.
    Anything else is the path of a UTF-8 file, or of a folder: all its *.txt files, subfolders too, ordered by path, a
    newline between two of them. A byte order mark is dropped, line ends are kept as they are.
    Raises UserError for what is missing, empty, unreadable, not a regular file or not UTF-8.
    """
    if name == "shakespeare":
        return _shakespeare(Path(__file__).resolve().parent / folder / "shakespeare.txt")
    if name == "pydoc":
        return _pydoc(), "pydoc"
    paths = [name]
    if os.path.isdir(name):
        paths = sorted((p for p in Path(name).rglob("*.txt") if p.is_file()), key=lambda p: p.as_posix())
        if not paths:
            raise UserError(f"the folder {name} holds no .txt file; --data takes a text file or a folder of .txt files")
    text = "\n".join(_decode(_read(path), path) for path in paths)
    if not text.strip("\n"):
        raise UserError(f"{name} is empty; --data needs a file or folder with text in it")
    return text, str(name)


def _read(path):
    """-> bytes. A FIFO or device is refused before it is opened: opening could wait for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path} is not a regular file; save the text in a file and give its path")
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no such file: '{path}'; --data takes shakespeare, pydoc, a text file or a folder") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None


def _decode(data, path):
    """UTF-8 bytes -> text without a byte order mark."""
    body = data.removeprefix(codecs.BOM_UTF8)
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        guess = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        offset = error.start + len(data) - len(body)
        raise UserError(f"{path} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}; convert it, "
                        f"perhaps with: iconv -f {guess} -t utf-8") from None


def _shakespeare(path):
    """-> (text, 'shakespeare'), or (help text, 'pydoc') and a line on stderr if there is no file and no network."""
    if os.path.exists(path):
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
            raise UserError(f"{path} is not tiny Shakespeare (wrong sha256); delete it to have it downloaded again, "
                            f"or train on it as it is with --data {path}")
        return _decode(data, path), "shakespeare"
    try:
        data = _download()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        _say(f"data: cannot download tiny Shakespeare ({reason}); using pydoc, Python's own help text, instead "
             f"(for Shakespeare, put it at {path})")
        return _pydoc(), "pydoc"
    try:
        _save(path, data)
        _say(f"data: downloaded tiny Shakespeare to {path}")
    except OSError as error:                            # a read-only folder is no reason not to train
        _say(f"data: downloaded tiny Shakespeare, but could not keep it at {path}: {error.strerror}")
    return _decode(data, path), "shakespeare"


def _download():
    """-> the bytes of tiny Shakespeare, where nanoGPT gets them. Anything else, as a login page, is a ValueError."""
    with urllib.request.urlopen(SHAKESPEARE_URL, timeout=5) as reply:
        data = reply.read(SHAKESPEARE_BYTES + 1)
    if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError("what came has the wrong sha256")
    return data


def _save(path, data):
    """Write beside the target and rename, so that neither a crash nor a second process leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pydoc():
    try:
        from pydoc_data.topics import topics
    except ImportError:                                 # some distributions split the standard library
        raise UserError("this Python comes without pydoc_data; give a text of your own with --data FILE") from None
    return "\n".join(topics[name] for name in sorted(topics))


def _say(line):
    print(line, file=sys.stderr, flush=True)


# ---- tokenizers

class Tokenizer:
    """Text <-> ids. tokens[id] is the UTF-8 bytes of one id, so one table decodes all three kinds: char (the sorted
    characters of a text), byte (all 256) and gpt2 (GPT-2's 50257).
    Raises ValueError or TypeError for a table that is not of the kind it claims to be.
    """

    def __init__(self, kind, tokens):
        tokens = list(tokens)
        if kind not in KINDS:
            raise ValueError(f"unknown tokenizer {kind!r}; choose one of {', '.join(KINDS)}")
        if not tokens or any(type(t) is not bytes for t in tokens) or len(set(tokens)) < len(tokens):
            raise ValueError("tokens must be distinct byte strings")
        if kind == "byte" and tokens != EVERY_BYTE:
            raise ValueError("a byte table is the 256 bytes in order")
        # without every byte tiktoken panics, with an exception that `except Exception` does not catch
        if kind == "gpt2" and (tokens[-1] != b"<|endoftext|>" or not set(EVERY_BYTE).issubset(tokens)):
            raise ValueError("a gpt2 table holds every byte and ends with <|endoftext|>")
        self.kind, self.tokens, self.vocab_size = kind, tokens, len(tokens)
        self.lengths = np.array([len(t) for t in tokens])
        self.bpe = None                                 # gpt2: tiktoken's encoder, made when first asked to encode
        if kind == "char":
            codes = np.array([ord(t.decode("utf-8")) for t in tokens])
            self.lookup = np.full(codes.max() + 2, -1, dtype=np.int64)  # code point -> id; the last entry: all beyond
            self.lookup[codes] = np.arange(len(codes))

    def encode(self, text):
        """str -> (T,) int64 array. Raises UserError naming the characters that the vocabulary lacks."""
        if self.kind == "byte":
            return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)
        if self.kind == "gpt2":
            _utf8(text)                                 # tiktoken would turn half surrogates into U+FFFD silently
            if self.bpe is None:
                ranks = {token: rank for rank, token in enumerate(self.tokens[:-1])}     # all but <|endoftext|>
                self.bpe = _tiktoken().Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
            return np.array(self.bpe.encode_ordinary(text), dtype=np.int64)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.lookup[np.minimum(codes, len(self.lookup) - 1)]
        if (ids < 0).any():
            lacking = list(dict.fromkeys(map(chr, codes[ids < 0].tolist())))
            shown = " ".join(map(repr, lacking[:10])) + (f" and {len(lacking) - 10} more" if lacking[10:] else "")
            raise UserError(f"not in the vocabulary of {self.vocab_size} characters: {shown}; leave them out, "
                            f"or train with --tokenizer byte")
        return ids

    def decode(self, ids):
        """ids (any integer sequence, array or tensor) -> str; bytes that are not UTF-8 become U+FFFD."""
        return self._bytes(ids).decode("utf-8", "replace")

    def stream(self):
        """-> feed(ids, final=False): one id or several -> the text they complete. The first bytes of a character are
        held back until its last one comes; feed(final=True) at the end lets out what is left, as U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids=(), final=False: decoder.decode(self._bytes(ids), final)

    def bytes_in(self, ids):
        """Number of UTF-8 bytes behind these ids: nats per token -> bits per byte."""
        return int(self.lengths[self._checked(ids)].sum())

    def state(self):
        """Everything needed to rebuild it, of plain types: torch.load(weights_only=True) reads it back."""
        return {"kind": self.kind, "tokens": list(self.tokens)}

    def _bytes(self, ids):
        return b"".join([self.tokens[i] for i in self._checked(ids).tolist()])

    def _checked(self, ids):
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu().reshape(-1).numpy()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:      # -1 would decode to the last token
            raise ValueError(f"ids must lie in [0, {self.vocab_size}), got {ids.min()} .. {ids.max()}")
        return ids


def make_tokenizer(kind, text):
    """The tokenizer of this kind; text gives char its vocabulary (pass all of it, validation part too, as nanoGPT).
    Raises UserError for an unknown kind, a text without characters, and a gpt2 vocabulary that cannot be had.
    """
    if kind not in KINDS:
        raise UserError(f"unknown tokenizer '{kind}'; choose one of {', '.join(KINDS)}")
    if kind == "byte":
        return Tokenizer(kind, EVERY_BYTE)
    if kind == "gpt2":
        return Tokenizer(kind, _gpt2_tokens())
    if not text:
        raise UserError("a char tokenizer needs a text that is not empty")
    return Tokenizer(kind, [_utf8(character) for character in sorted(set(text))])


def tokenizer_from_state(state):
    """The inverse of Tokenizer.state, without network. Raises UserError for a state that is not of its making."""
    try:
        return Tokenizer(state["kind"], state["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the tokenizer inside the checkpoint is damaged ({error}); use another checkpoint") from None


def _gpt2_tokens():
    tiktoken = _tiktoken()
    # tiktoken sets no timeout: behind a firewall that drops packets this can take minutes, hence the line before it
    _say("tokenizer: asking tiktoken for GPT-2's vocabulary, a 1.5 MB download unless cached (Ctrl-C to give up)")
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:              # requests' errors are OSErrors; ValueError is a wrong hash
        raise UserError(f"cannot have GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder "
                        f"where tiktoken has cached it, or use --tokenizer byte") from None
    return [bpe.decode_single_token_bytes(i) for i in range(bpe.n_vocab)]


def _tiktoken():
    try:
        import tiktoken
    except ImportError:
        raise UserError("--tokenizer gpt2 needs tiktoken; pip install tiktoken, or use --tokenizer byte") from None
    return tiktoken


def _utf8(text):
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:                 # half a surrogate, as from a command line in another encoding
        raise UserError(f"character {error.start} of the text, {text[error.start]!r}, is not Unicode text; "
                        f"give the text as UTF-8") from None


# ---- batches

def split(ids, seq_len=1):
    """ids (N,) -> train, the first 90 %, and val, the last 10 %, as nanoGPT cuts.
    Raises UserError when either part is too short for one window of seq_len tokens and the token after it.
    """
    n = len(ids)
    cut = n * 9 // 10
    if n - cut < seq_len + 1:
        longest = max(n - cut - 1, 0)
        raise UserError(f"the text is too short: it has {n} tokens, but --seq-len {seq_len} needs {10 * seq_len + 1}, "
                        f"for a tenth of them is kept for validation; give a longer text"
                        + (f", or --seq-len {longest} at most" if longest else ""))
    return ids[:cut], ids[cut:]


@lru_cache(4)
def epoch(n, seq_len, seed, number):
    """Where the windows of an epoch start in n tokens: side by side from a random offset on, in random order."""
    count = max(1, n // seq_len - 1)
    random = np.random.default_rng([seed % 2**64, number])              # hashes the pair: (0, 1) and (1, 0) share nothing
    return random.integers(n - count * seq_len) + seq_len * random.permutation(count)


def batch(ids, seed, step, batch_size, seq_len):
    """ids (N,) -> x, y (B, T) int64, where y is x one token later. A pure function of (seed, step): every window of an epoch
    comes once, then those of the next, and no state is used or changed. Raises UserError when N < T + 1.
    """
    ids = torch.as_tensor(ids)
    if len(ids) < seq_len + 1:
        raise UserError(f"the text is too short: --seq-len {seq_len} needs {seq_len + 1} tokens, here are {len(ids)}; "
                        f"give a longer text or a smaller --seq-len")
    count = len(epoch(len(ids), seq_len, seed, 0))
    start = [epoch(len(ids), seq_len, seed, i // count)[i % count] for i in range(step * batch_size, (step + 1) * batch_size)]
    rows = ids[torch.tensor(start)[:, None] + torch.arange(seq_len + 1)].long()       # (B, T+1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def windows(ids, seq_len, batch_size):
    """Yield x, y (<= B, T) int64 that cover ids once: every token but the first is a target exactly once, N - 1 in all.
    Windows do not overlap; what is left over, shorter than T, comes last as a batch of one. Weight means by y.numel().
    Raises UserError when N < 2.
    """
    ids = torch.as_tensor(ids).long()
    if len(ids) < 2:
        raise UserError(f"a loss needs 2 tokens at least, here are {len(ids)}; give a longer text")
    whole = (len(ids) - 1) // seq_len * seq_len
    x, y = ids[:whole].view(-1, seq_len), ids[1:whole + 1].view(-1, seq_len)     # (windows, T)
    if whole:
        yield from zip(x.split(batch_size), y.split(batch_size))
    if whole < len(ids) - 1:
        yield ids[None, whole:-1], ids[None, whole + 1:]


# ---- synthetic tasks

def mqar(batch, n_pairs, n_queries, vocab, seq_len, generator):
    """Multi-query associative recall: pairs of a key and its value, then some of the keys again; answer with the value.
    After Arora et al. 2023 (Zoology, arXiv 2312.04927), as https://github.com/HazyResearch/zoology draws it.

    mqar(1, n_pairs=3, n_queries=2, vocab=12, seq_len=14, generator=torch.Generator().manual_seed(7)):

                 key  val  key  val  key  val           query               query
        tokens     5    6    3    9    4   10    0    0    5    0    0    0    3    0
        targets -100 -100 -100 -100 -100 -100 -100 -100    6 -100 -100 -100    9 -100

    -> tokens, targets (batch, seq_len) int64 on the CPU. Keys are 1 .. vocab/2 - 1, values vocab/2 .. vocab - 1, each
    at most once in a row; 0 fills the rest; targets are -100 where no answer is asked. The queries stand 0, 2, 4, .. 2g
    places behind the last pair, drawn by weights (g+1)^-0.99 (zoology's power_a = 0.01; its random filler is left out,
    as in its own experiments). A guess among the values seen is right once in n_pairs.
    Raises UserError for sizes that do not fit.
    """
    n_keys = vocab // 2 - 1
    if not (batch >= 1 and 1 <= n_queries <= n_pairs <= n_keys and 2 * (n_pairs + n_queries) <= seq_len):
        raise UserError(f"mqar needs 1 <= n_queries <= n_pairs <= vocab/2 - 1, 2 (n_pairs + n_queries) <= seq_len, not "
                        f"n_pairs {n_pairs}, n_queries {n_queries}, vocab {vocab}, seq_len {seq_len}, batch {batch}")

    def draw(n, weights):
        """n distinct indices a row, as if drawn one after another by weight: the largest u^(1/w), Efraimidis 2006."""
        u = torch.rand(batch, len(weights), generator=generator, dtype=torch.float64)
        return (u.log() / weights).topk(n).indices      # (batch, n)

    keys = 1 + draw(n_pairs, torch.ones(n_keys))
    values = vocab // 2 + draw(n_pairs, torch.ones(vocab - vocab // 2))
    asked = draw(n_queries, torch.ones(n_pairs))
    gaps = torch.arange(1, (seq_len - 2 * n_pairs) // 2 + 1, dtype=torch.float64)
    place = 2 * n_pairs + 2 * draw(n_queries, gaps ** -0.99)
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    tokens[:, 0:2 * n_pairs:2], tokens[:, 1:2 * n_pairs:2] = keys, values
    tokens.scatter_(1, place, keys.gather(1, asked))
    targets = torch.full_like(tokens, -100).scatter_(1, place, values.gather(1, asked))
    return tokens, targets
