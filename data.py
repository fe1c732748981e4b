"""Text and synthetic tasks: everything that becomes tokens.

    python data.py --data corpus --tokenizer gpt2 --out tokens      a text too large for memory -> files of token ids

read finds a text or files of token ids, make_tokenizer makes text ids, split / batch / windows / streams cut the ids up for
training and for the validation loss, mqar draws a synthetic recall task. There is no loader object and so no loader state: a
batch is a function of (seed, step), all that an exact resume must know. A text is held in memory whole, token files are not.
"""
import codecs
import hashlib
import heapq
import http.client
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import urllib.request
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from machine import Halt, Parser, UserError, claim, exit_code, tell

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 1_115_394
TOKENIZERS = ("char", "byte", "bpe", "gpt2")
EVERY_BYTE = [bytes([b]) for b in range(256)]
END = b"<|endoftext|>"                                  # GPT-2's last token, which no text becomes
BLOCK = 2**20                                           # ids that are checked and counted together
# how GPT-2 cuts text into words; here, so that no checkpoint can bring a regular expression of its own
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# ---- text

class Corpus(NamedTuple):
    """What a name stands for: a text, or token files."""
    used: str                                           # the name of what was really read
    sha256: str
    text: str = ""
    tokens: tuple = ()                                  # Tokens to train and to validate on

    def splits(self, tokenizer, seq_len):
        """-> ids to train and to validate on. Raises UserError for a text too short, or token files of another vocabulary."""
        if not self.tokens:
            return split(tokenizer.encode(self.text), seq_len, self.used)
        if tokenizer.kind not in ("byte", "gpt2"):
            raise UserError(f"{self.used} holds token files, of bytes or of GPT-2's tokens, but this model's vocabulary was made of a text "
                            f"(--tokenizer {tokenizer.kind}); give a text")
        train, val = map(len, self.tokens)
        if min(train, val) < seq_len + 1:
            raise UserError(f"{self.used} has {train:,} tokens to train and {val:,} to validate, but windows of {seq_len} need "
                            f"{seq_len + 1} of each; give longer files")
        for path, greatest in (pair for part in self.tokens for pair in part.greatest):
            if greatest >= tokenizer.vocab_size:
                raise UserError(f"{path} holds id {greatest}, but a {tokenizer.kind} vocabulary has {tokenizer.vocab_size:,} "
                                "tokens; give the --tokenizer that made the file")
        return self.tokens


def read(name):
    """A name as --data takes it -> Corpus: of token files if it is a folder that has some (token_files), else of load_text."""
    groups = token_files(name)
    if not groups:
        text, used = load_text(name)
        return Corpus(used, hashlib.sha256(text.encode("utf-8")).hexdigest(), text)
    digest = hashlib.sha256()
    tokens = tuple(Tokens(group, digest) for group in groups)
    return Corpus(str(name), digest.hexdigest(), tokens=tokens)


def load_text(name, folder="data"):
    """-> (text, used), where `used` is the name of what was really read: 'shakespeare', 'pydoc' or the path as given.

    'shakespeare' is FOLDER/shakespeare.txt (FOLDER relative to this file), downloaded if missing, pydoc if that fails.
    'pydoc' is the help text inside CPython; it differs between Python versions, so it is no benchmark.
    Anything else is the path of a UTF-8 file, or of a folder: all its *.txt files, those of subfolders and linked ones, too, ordered by path, a
    newline between two of them. A byte order mark is dropped, line ends are kept as they are.
    Raises UserError for what is missing, empty, unreadable, not a regular file or not UTF-8.
    """
    if name == "shakespeare":
        return _shakespeare(Path(__file__).resolve().parent / folder / "shakespeare.txt")
    if name == "pydoc":
        return _pydoc(), "pydoc"
    text = "".join(_pieces(name))
    if not text.strip("\n"):
        raise UserError(f"{name} is empty, or nothing but line ends; --data needs a file or folder with text in it")
    return text, str(name)


def _pieces(name, size=2**24):
    """The text of a file, or of a folder's *.txt files, in pieces of whole lines, of about `size` bytes."""
    paths = [name]
    if str(name).endswith(".bin") and not os.path.isdir(name):
        raise UserError(f"{name} is named like a token file; --data takes their folder, with train and val in the names of those in it: "
                        f"--data {shlex.quote(os.path.dirname(name) or '.')}")
    if os.path.isdir(name):
        paths = sorted((p for p in _texts(name) if p.is_file() or p.is_symlink()), key=lambda p: p.as_posix())
        if not paths:
            raise UserError(f"the folder {name} holds no .txt file; --data takes a text file, a folder of .txt files, or one of "
                            "token files with train and val in their names, as train.bin and val.bin")
    for path in paths:
        if path is not paths[0]:
            yield "\n"
        with _open(path) as file:
            offset = 0
            while data := b"".join(file.readlines(size)):
                yield _decode(data, path, offset)
                offset += len(data)


def _texts(folder):
    """The paths of all that is named *.txt, or *.TXT, in a folder and its subfolders, linked ones too; of a folder that is met again only once."""
    seen = set()
    for root, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()                                  # which of its names a folder is met by does not depend on the file system
        yield from (Path(root, file) for file in files if file.lower().endswith(".txt"))


def _refuse(error):
    raise UserError(f"cannot read {error.filename}: {error.strerror}; check the path and its permissions")


def _open(path):
    """-> the file, to read its bytes. A FIFO or device is refused before it is opened: opening could wait for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError(f"{path} is not a regular file; save the text in a file and give its path")
        return open(path, "rb")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no such file: '{path}'; --data takes a text file or a folder (in train.py also the names shakespeare and pydoc)") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None


# byte order marks; that of UTF-32 begins with that of UTF-16
MARKS = {"utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}


def _decode(data, path, offset=0):
    """UTF-8 bytes, those of the file from `offset` on -> text; a byte order mark at the file's beginning is dropped."""
    body = data if offset else data.removeprefix(codecs.BOM_UTF8)
    try:
        text = body.decode("utf-8")
        if 10 * body.count(0) > len(body):              # some may be in a text; but of English in UTF-16 they are half
            raise UnicodeDecodeError("utf-8", body, body.index(0), len(body), "many NUL bytes")
        return text
    except UnicodeDecodeError as error:
        guess = next((name for name, marks in MARKS.items() if not offset and data.startswith(marks)), "latin1")
        at = error.start + len(data) - len(body)
        if error.reason == "unexpected end of data":
            raise UserError(f"{path} is not UTF-8: it ends within a character, at offset {offset + at}; if it was cut there, leave that "
                            f"character out, perhaps with: truncate -s {offset + at} {shlex.quote(str(path))}") from None
        fault = f"{path} is not UTF-8: byte 0x{data[at]:02x} at offset {offset + at}"
        if guess == "latin1" and 0 in data:
            raise UserError(f"{fault}, and it holds NUL bytes; unpack it if it is compressed, or give its text as UTF-8") from None
        raise UserError(f"{fault}; convert it, perhaps with: iconv -f {guess} -t utf-8") from None


def _shakespeare(path):
    """-> (text, 'shakespeare'), or (help text, 'pydoc') and a line on stderr if there is no file and no network."""
    if os.path.exists(path):
        with _open(path) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
            raise UserError(f"{path} is not tiny Shakespeare (wrong sha256); delete it to have it downloaded again, "
                            f"or train on it as it is with --data {shlex.quote(str(path))}")
        return _decode(data, path), "shakespeare"
    try:
        data = _download()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        tell(f"data: cannot download tiny Shakespeare ({reason}); using pydoc, Python's own help text, instead "
             f"(for Shakespeare, put it at {path})")
        return _pydoc(), "pydoc"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(data)
        tell(f"data: downloaded tiny Shakespeare to {path}")
    except OSError as error:                            # a read-only folder is no reason not to train
        tell(f"data: downloaded tiny Shakespeare, but could not keep it at {path}: {error.strerror}")
    return _decode(data, path), "shakespeare"


def _download():
    """-> the bytes of tiny Shakespeare, where nanoGPT gets them. Anything else, as a login page, is a ValueError."""
    with urllib.request.urlopen(SHAKESPEARE_URL, timeout=5) as reply:
        data = reply.read(SHAKESPEARE_BYTES + 1)
    if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError("what came has the wrong sha256")
    return data


@contextmanager
def replacing(path):
    """A name beside `path` to write to, renamed to it at the end: neither a crash nor a second process leaves half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pydoc():
    try:
        from pydoc_data.topics import topics
    except ImportError:                                 # some distributions split the standard library
        raise UserError("this Python comes without pydoc_data; give a text of your own with --data FILE") from None
    return "\n".join(topics[name] for name in sorted(topics))


# ---- tokenizers

class Tokenizer:
    """Text <-> ids. tokens[id] is the UTF-8 bytes of one id, so one table decodes all kinds: char (the sorted characters of
    a text), byte (all 256), bpe (these, then pairs of tokens in the order in which they merge) and gpt2 (GPT-2's 50257).
    Raises ValueError or TypeError for a table that is not of the kind it claims to be.
    """

    def __init__(self, kind, tokens):
        tokens = list(tokens)
        if kind not in TOKENIZERS:
            raise ValueError(f"unknown tokenizer {kind!r}; choose one of {', '.join(TOKENIZERS)}")
        if not tokens or any(type(t) is not bytes for t in tokens) or len(set(tokens)) < len(tokens):
            raise ValueError("tokens must be distinct byte strings")
        if kind == "byte" and tokens != EVERY_BYTE:
            raise ValueError("a byte table is the 256 bytes in order")
        # without every byte tiktoken panics, with an exception that `except Exception` does not catch
        if kind == "bpe" and tokens[:256] != EVERY_BYTE:
            raise ValueError("a bpe table begins with the 256 bytes in order")
        if kind == "gpt2" and (tokens[-1] != END or not set(EVERY_BYTE).issubset(tokens)):
            raise ValueError("a gpt2 table holds every byte and ends with <|endoftext|>")
        self.kind, self.tokens, self.vocab_size = kind, tokens, len(tokens)
        self.lengths = np.array([len(t) * (kind != "gpt2" or t != END) for t in tokens])      # of text: END stands between texts
        self.bpe = None                                 # bpe, gpt2: tiktoken's encoder, made when first asked to encode
        if kind == "char":
            codes = np.array([ord(t.decode("utf-8")) for t in tokens])
            self.lookup = np.full(codes.max() + 2, -1, dtype=np.int64)  # code point -> id; the last entry: all beyond
            self.lookup[codes] = np.arange(len(codes))

    def encode(self, text):
        """str -> (T,) int64 array. Raises UserError naming the characters that the vocabulary lacks."""
        if self.kind == "byte":
            return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)
        if self.kind in ("bpe", "gpt2"):
            _utf8(text)                                 # tiktoken would turn half surrogates into U+FFFD silently
            if self.bpe is None:
                ranks = {token: rank for rank, token in enumerate(self.tokens) if token != END}
                self.bpe = _tiktoken().Encoding(self.kind, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
            try:
                return np.array(self.bpe.encode_ordinary(text), dtype=np.int64)
            except BaseException as error:              # a panic of its regular expressions, which is no Exception
                if type(error).__name__ != "PanicException":
                    raise
                raise UserError("tiktoken cannot encode the text, perhaps for a million spaces or line ends in a row; take some out, "
                                "or use --tokenizer byte") from None
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.lookup[np.minimum(codes, len(self.lookup) - 1)]
        if (ids < 0).any():
            lacking = list(dict.fromkeys(map(chr, codes[ids < 0].tolist())))
            shown = " ".join(map(repr, lacking[:10])) + (f" and {len(lacking) - 10} more" if lacking[10:] else "")
            raise UserError(f"not in the vocabulary of {self.vocab_size} characters: {shown}; leave them out, "
                            f"or train a model from the start with --tokenizer byte")
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
        """Number of UTF-8 bytes behind these ids."""
        return sum(int(self.lengths[self._checked(ids[i: i + BLOCK])].sum()) for i in range(0, len(ids), BLOCK))

    def bytes_a_token(self, ids):
        """The mean of what a model that reads these ids predicts, all but the first: nats per token -> bits per byte."""
        return (self.bytes_in(ids) - self.bytes_in(ids[:1])) / (len(ids) - 1)

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


def make_tokenizer(kind, text, size=1024):
    """The tokenizer of this kind; text gives char its vocabulary (pass all of it, validation part too, as nanoGPT), and bpe
    its merges, up to `size` tokens in all (of the part to train on alone: what `split` gives, but cut by characters).
    Raises UserError for an unknown kind, a text without characters, and a gpt2 vocabulary that cannot be had.
    """
    if kind not in TOKENIZERS:
        raise UserError(f"unknown tokenizer '{kind}'; choose one of {', '.join(TOKENIZERS)}")
    if kind == "byte":
        return Tokenizer(kind, EVERY_BYTE)
    if kind == "gpt2":
        return Tokenizer(kind, _gpt2_tokens())
    if not text:
        raise UserError(f"there is no text to make a {kind} vocabulary from; for token files give the tokenizer that made them: "
                        "--tokenizer gpt2 or byte")
    if kind == "bpe":
        return Tokenizer(kind, train_bpe(text[:len(text) * 9 // 10], size))
    return Tokenizer(kind, [_utf8(character) for character in sorted(set(text))])


def train_bpe(text, size):
    """Byte-pair encoding (Sennrich et al. 2016): all bytes, then again and again the two neighbours that occur most often as
    one more token, inside of GPT-2's words -> at most `size` tokens; fewer where no two neighbours occur twice.

    Neighbours are counted by the bytes that they make, whichever two they are, for so tiktoken merges them; of equal counts
    the first in the order of bytes wins.
    """
    _tiktoken()
    import regex                                        # which tiktoken brings along

    times = Counter(match.group() for match in regex.finditer(GPT2_PATTERN, text))
    words = [([bytes([b]) for b in _utf8(word)], n) for word, n in times.items()]
    counts, where = Counter(), defaultdict(set)         # of each pair: how often it occurs, in which words
    for i, (word, n) in enumerate(words):
        for pair in neighbours(word):
            counts[pair] += n
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in counts.items()]
    heapq.heapify(heap)
    tokens = list(EVERY_BYTE)
    while heap and len(tokens) < size:
        minus_n, token = heapq.heappop(heap)
        if counts[token] != -minus_n:                   # no longer: its count of today is in the heap, too
            continue
        if minus_n > -2:
            break
        tokens.append(token)
        changed = set()
        for i in where.pop(token):
            before, n = words[i]
            after = merge(before, token)
            for word, m in ((before, -n), (after, n)):
                for pair in neighbours(word):
                    counts[pair] += m
                    changed.add(pair)
                    where[pair].add(i)
            words[i] = after, n
        for pair in changed - {token}:
            heapq.heappush(heap, (-counts[pair], pair))
    return tokens


def neighbours(word):
    return [a + b for a, b in zip(word, word[1:])]


def merge(word, token):
    """A word as a list of tokens, with all neighbours that make `token` joined, from the left."""
    joined = []
    for part in word:
        if joined and joined[-1] + part == token:
            joined[-1] = token
        else:
            joined.append(part)
    return joined


def tokenizer_from_state(state):
    """The inverse of Tokenizer.state, without network. Raises UserError for a state that is not of its making."""
    try:
        return Tokenizer(state["kind"], state["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the tokenizer inside the checkpoint is damaged ({error}); use another checkpoint") from None


def _gpt2_tokens():
    tiktoken = _tiktoken()
    # tiktoken sets no timeout: behind a firewall that drops packets this can take minutes, hence the line before it
    tell("tokenizer: asking tiktoken for GPT-2's vocabulary, a 1.5 MB download unless cached (Ctrl-C to give up)")
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:              # requests' errors are OSErrors; ValueError is a wrong hash
        raise UserError(f"cannot have GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder where tiktoken "
                        f"has cached it, or make tokens of your text without it: --tokenizer byte, in train.py also bpe") from None
    return [bpe.decode_single_token_bytes(i) for i in range(bpe.n_vocab)]


def _tiktoken():
    try:
        import tiktoken
    except ImportError:
        raise UserError("--tokenizer bpe and gpt2 need tiktoken; pip install tiktoken, or use --tokenizer byte") from None
    return tiktoken


def _utf8(text):
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:                 # half a surrogate, as from a command line in another encoding
        raise UserError(f"character {error.start} of the text, {text[error.start]!r}, is not Unicode text; "
                        f"give the text as UTF-8") from None


# ---- token files

LLM_C, LLM_C_HEADER = 20240520, 1024                    # the number that begins llm.c's files; the bytes before their ids
LLM_C_LLAMA = 20240801                                  # begins those of Llama 3's tokens, too many for 2 bytes


def token_files(name):
    """-> paths to train and to validate on: the *.bin in a folder with `train`, else `val`, in their names; or None.

    Raises UserError beside nanoGPT's meta.pkl, which is a vocabulary of their own.
    """
    paths = sorted(Path(name).glob("*.bin")) if os.path.isdir(name) else []
    train = [path for path in paths if "train" in path.name]
    val = [path for path in paths if "val" in path.name and path not in train]
    if train and val and (meta := Path(name, "meta.pkl")).exists():
        raise UserError(f"{meta}: the ids of these token files are of a vocabulary of their own (nanoGPT's characters), which is not read; give "
                        f"--data the text that they are made of, perhaps {Path(name, 'input.txt')}")
    return (train, val) if train and val else None


class Tokens:
    """The ids of token files, end to end, as an array that stays on the disk: ids[a:b] -> (b - a,) int64.

    Each file is read once to check it: what is wrong should show at once, and not days into a run.
    """

    def __init__(self, paths, digest):
        self.parts, self.greatest, self.starts, self.length = [], [], [], 0
        for path in paths:
            part = _token_file(path)
            if len(part) > 2**29:
                tell(f"data: reading all {len(part):,} ids of {path} once, to check them")
            greatest = 0
            for i in range(0, len(part), BLOCK):
                block = np.asarray(part[i: i + BLOCK])
                digest.update(block)
                greatest = max(greatest, int(block.max()))
            self.greatest.append((path, greatest))
            self.parts.append(part)
            self.starts.append(self.length)
            self.length += len(part)

    def __len__(self):
        return self.length

    def __getitem__(self, span):
        a, b, _ = span.indices(self.length)
        parts = [part[max(a - i, 0): b - i] for i, part in zip(self.starts, self.parts) if i < b and a < i + len(part)]
        return np.concatenate([np.empty(0, np.int64), *parts])


def _token_file(path):
    """-> (n,) uint16 on the disk: of nanoGPT's files, which are ids and nothing else, or llm.c's, which begin with a header."""
    with _open(path) as file:
        magic, version, n = [*np.fromfile(file, "<i4", 3).tolist(), 0, 0, 0][:3]       # of Python: 2 n may be beyond 32 bits
    size, header = os.path.getsize(path), LLM_C_HEADER if magic == LLM_C else 0
    if magic == LLM_C_LLAMA:
        raise UserError(f"{path} holds llm.c's tokens of Llama 3, of 4 bytes each; take files of GPT-2's, of 2 bytes")
    if header and (version != 1 or size != header + 2 * n):
        raise UserError(f"{path} has {size} bytes and a header of version {version} with {n} ids; it should be version 1 and "
                        f"{header} bytes and 2 an id: download it again")
    if size % 2 or size == header:
        raise UserError(f"{path} has {size} bytes, so it is empty or not made of ids of 2 bytes each; make it again")
    ids = np.memmap(path, "<u2", "r", header)
    if len(ids) >= 1000 and ids[: 2**20: 2].any() and not ids[1: 2**20: 2].any():
        raise UserError(f"{path} has a 0 at every other place, as if its ids had 4 bytes each; make it again, of ids of 2 bytes (uint16)")
    return ids


def make_token_files(name, kind, out):
    """The text of a file or folder, however large -> OUT/train.bin and OUT/val.bin, cut by `split`; like nanoGPT's, 2 bytes an id.

    The text is encoded in pieces of whole lines: of gpt2, white space may become other tokens there than it would in one piece.
    Raises UserError for what split and, of files and folders, load_text refuse, and where such a file is already.
    """
    tokenizer, out = make_tokenizer(kind, ""), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with claim(out), tempfile.TemporaryDirectory(dir=out) as folder:
        for path in (out / "train.bin", out / "val.bin"):
            if path.exists():
                raise UserError(f"{path} is already there; give another --out")
        train, val, n = Path(folder, "train.bin"), Path(folder, "val.bin"), 0
        with open(train, "wb") as file:
            for piece in _pieces(name):
                ids = tokenizer.encode(piece)
                ids.astype("<u2").tofile(file)
                n += len(ids)
                tell(f"data: {n:,} ids")
        cut = len(split(range(n))[0])
        with open(train, "rb") as every, open(val, "wb") as file:
            every.seek(2 * cut)
            shutil.copyfileobj(every, file)
        os.truncate(train, 2 * cut)
        os.replace(val, out / "val.bin")
        os.replace(train, out / "train.bin")
    tell(f"{cut:,} ids to train, {n - cut:,} to validate; python train.py --data {shlex.quote(str(out))} --tokenizer {kind}")


# ---- batches

def split(ids, seq_len=1, name="the text"):
    """ids (N,) -> train, the first 90 %, and val, the last 10 %, as nanoGPT cuts.
    Raises UserError, in which the text is called `name`, when either part is too short for one window of seq_len tokens and the token after it.
    """
    n = len(ids)
    cut = n * 9 // 10
    if n - cut < seq_len + 1:
        longest = max(n - cut - 1, 0)
        raise UserError(f"{name} is too short: it has {n} tokens, and windows of {seq_len} need {10 * seq_len + 1}, "
                        f"for a tenth of them is kept for validation; give a longer text"
                        + (f", or --seq-len {longest} at most" if longest else ""))
    return ids[:cut], ids[cut:]


@lru_cache(4)
def epoch(n, seq_len, seed, number):
    """Where the windows of an epoch start in n tokens: side by side from a random offset on, in random order."""
    count = max(1, n // seq_len - 1)
    random = np.random.default_rng([seed % 2**64, number])              # hashes the pair: (0, 1) and (1, 0) share nothing
    return random.integers(n - count * seq_len) + seq_len * random.permutation(count)


def inputs_and_targets(ids, starts, length):
    """-> x, y (B, length) int64: ids from each start on, and y one token later."""
    rows = torch.stack([torch.as_tensor(ids[i: i + length + 1]) for i in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(ids, seed, step, batch_size, seq_len):
    """ids (N,) -> x, y (B, T) int64, where y is x one token later. A pure function of (seed, step): every window of an epoch
    comes once, then those of the next, and no state is used or changed. N is at least T + 1 (Corpus.splits).
    """
    count = len(epoch(len(ids), seq_len, seed, 0))
    start = [epoch(len(ids), seq_len, seed, i // count)[i % count] for i in range(step * batch_size, (step + 1) * batch_size)]
    return inputs_and_targets(ids, start, seq_len)


def windows(ids, seq_len, batch_size, every=1):
    """Yield x, y (<= B, T) int64 that cover ids once: every token but the first is a target exactly once, N - 1 in all.
    Windows do not overlap; what is left over, shorter than T, comes last as a batch of one. Weight means by y.numel().
    every > 1: only each `every`-th window, and nothing that is left over.
    """
    whole = (len(ids) - 1) // seq_len * seq_len
    starts = range(0, whole, every * seq_len)
    for i in range(0, len(starts), batch_size):
        yield inputs_and_targets(ids, starts[i: i + batch_size], seq_len)
    if every == 1 and whole < len(ids) - 1:
        yield inputs_and_targets(ids, [whole], len(ids) - 1 - whole)


def streams(ids, seq_len, n):
    """The same text as n streams side by side, in pieces of seq_len: x, y (n, seq_len or fewer); fewer than n tokens are left out.

    A text of fewer tokens than that makes fewer streams.
    """
    n = min(n, len(ids) - 1)
    length = (len(ids) - 1) // n
    for i in range(0, length, seq_len):
        yield inputs_and_targets(ids, range(i, i + n * length, length), min(seq_len, length - i))


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


# ---- main

def parse(argv=None):
    parser = Parser(prog="data.py", description="A text, however large, as files of token ids, which train.py reads from the disk: "
                    "OUT/train.bin\nand, of its last tenth, OUT/val.bin. Two bytes an id, as nanoGPT's.")
    parser.add_argument("--data", required=True, help="a text file, or a folder: all its .txt files, in subfolders, too")
    parser.add_argument("--tokenizer", default="gpt2", choices=("byte", "gpt2"), help="what a token is [gpt2]")
    parser.add_argument("--out", default="tokens", help="folder for train.bin and val.bin [tokens]")
    args = parser.parse_args(argv)
    if not args.out:
        parser.error("--out is empty; name a folder")
    return args


def write_files(args):
    """make_token_files of the flags. Halt where the disk refuses."""
    try:
        make_token_files(args.data, args.tokenizer, args.out)
    except OSError as fault:
        raise Halt(f"cannot write to --out {args.out} ({fault.strerror or f'{fault}: disk full?'}); choose another folder, or make room") from None


def main(argv=None):
    args = parse(argv)
    return exit_code(lambda: write_files(args), "stopped; no file was made")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # like Ctrl-C: what is half made goes
    sys.exit(main())
