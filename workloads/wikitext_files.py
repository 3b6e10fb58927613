"""WikiText-2: finding, reading and numbering its words, and fetching it.

The data set is plain text whose words and marks stand apart, rare words replaced by ``<unk>`` already (Merity et al.
2017, arXiv:1609.07843). As in their work a line's end counts as one word, ``<eos>``.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError

__all__ = ["END", "UNKNOWN", "Vocabulary", "download", "find_text", "read_words"]

END, UNKNOWN = "<eos>", "<unk>"

CACHE = Path.home() / ".cache" / "rex_ray" / "wikitext-2"
# The address of the original publication is gone; this is its first author's own. Old loaders state the same digest.
URL = "https://wikitext.smerity.com/wikitext-2-v1.zip"
SHA256 = "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"
_LIMIT_S = 60.0

_PARTS = ("train", "valid", "test")
_NAMES = ("wiki.{}.tokens", "{}.txt", "wikitext2_{}.txt")


def find_text(data_dir: Path, part: str) -> Path:
    """Return the file of ``"train"``, ``"valid"`` or ``"test"`` under any name that it is passed around by.

    Raises:
        ConfigError: there is none.
    """
    for folder in (data_dir, data_dir / "wikitext-2"):
        for name in _NAMES:
            if (path := folder / name.format(part)).is_file():
                return path
    raise ConfigError(
        f"data_dir {data_dir} holds no wiki.{part}.tokens (or {part}.txt); it must hold the word-level WikiText-2, on "
        f"every node. Without data_dir it is downloaded from {URL}"
    )


def read_words(path: Path) -> list[str]:
    """Return the words of a file in order, each line's end as ``<eos>``.

    Raises:
        ConfigError: the file is not UTF-8 text, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no UTF-8 text ({error}); download it again or point data_dir elsewhere"
        ) from error
    # Only a line feed ends a line: str.splitlines would cut at separators that stand inside articles.
    words = [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), END)]
    if set(words) <= {END}:
        raise ConfigError(f"{path} holds no words; download it again or point data_dir elsewhere")
    return words


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Numbers of words, the most frequent first.

    Attributes:
        words: each once, ``<unk>`` among them.
    """

    words: tuple[str, ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {word: k for k, word in enumerate(self.words)})

    @classmethod
    def of(cls, words: Sequence[str]) -> Vocabulary:
        """Number what occurs in a text, by falling frequency, then by the alphabet: same text, same numbers."""
        counts = Counter(words)
        counts.setdefault(UNKNOWN, 0)
        counts.setdefault(END, 0)
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of words, that of ``<unk>`` for those which are none of this vocabulary; same length."""
        unknown = self._index[UNKNOWN]
        return np.array([self._index.get(word, unknown) for word in words], dtype=np.int64)


def download(folder: Path = CACHE) -> Path:
    """Fetch the archive, check it and unpack its three parts, unless they are there; return the folder.

    Raises:
        ConfigError: no answer, or a file other than the published one.
    """
    if all((folder / f"wiki.{part}.tokens").is_file() for part in _PARTS):
        return folder
    try:
        with urllib.request.urlopen(URL, timeout=_LIMIT_S) as answer:  # a constant https address
            archive = answer.read()
    except (OSError, http.client.HTTPException) as error:  # also an answer that is cut off
        raise ConfigError(f"{URL} gave no answer ({error}); fetch WikiText-2 elsewhere and give data_dir") from error
    unpack(archive, folder, SHA256)
    return folder


def unpack(archive: bytes, folder: Path, sha256: str) -> None:
    """Write the three parts of an archive to a folder.

    Raises:
        ConfigError: its digest is another.
    """
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{URL} sent a file with SHA-256 {found}, not {sha256}; fetch WikiText-2 elsewhere and give data_dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for part in _PARTS:
            name = f"wiki.{part}.tokens"
            # In two moves and each process for itself, so that half a file is never taken for one.
            partial = folder / f"{name}.{os.getpid()}.partial"
            partial.write_bytes(files.read(f"wikitext-2/{name}"))
            partial.replace(folder / name)
