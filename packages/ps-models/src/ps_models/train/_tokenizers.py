"""Convert texts to token numbers and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_core._install_hints import how_to_install
from ps_models.train._folder_tokenizer import FolderTokenizer

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of tokenizers for the end of a document, the likeliest first."""
_MASKS = ("[MASK]", "<mask>", "<|mask|>")
"""Their names for a word that is to be guessed."""
_FIRSTS = ("[CLS]", "<s>", "<cls>", "<bos>")
"""Their names for the token that represents a whole sequence."""


class Tokenizer(Protocol):
    """Protocol that converts documents to tokens and back."""

    vocabulary: int
    """The number of tokens, the end of a document included."""
    end: int
    """The token after each document."""
    mask: int | None
    """The token that hides another one; None: there is none."""
    first: int | None
    """The token that represents a whole sequence; None: there is none."""
    start: tuple[int, ...]
    """The tokens before each document; with most tokenizers none."""
    digest: str
    """A text that is equal for equal tokenizers."""

    def encode(self, document: bytes) -> Tensor:
        """Return a document's tokens without the end, in the smallest integer type that suffices."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, without ends."""

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], asked: int, template: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Return a conversation's tokens, and for each whether it is of an answer.

        ``asked`` messages are the prompt, and all others the answer; 0: the assistant's are. ``template``: what the
        chat template gets besides. Raise `ValueError` if this tokenizer cannot. (Any: as chat templates take messages.)
        """


class _WithoutTemplate:
    """A tokenizer that has no chat template."""

    start: tuple[int, ...] = ()

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], asked: int, template: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        """Raise `ValueError`; see `Tokenizer`."""
        raise ValueError(
            "conversations need a chat template, which this tokenizer has not; allowed is --hf, or --tokenizer, with a "
            "folder whose tokenizer has one"
        )


class Bytes(_WithoutTemplate):
    """Use each byte as a token; three more end a document, hide a byte, and stand for a whole sequence."""

    end = 256
    mask: int | None = 257
    first: int | None = 258
    vocabulary = 264
    """259, rounded up to a multiple of 8, which suits matrix units."""
    digest = "bytes"

    def encode(self, document: bytes) -> Tensor:
        """Encode a document; see `Tokenizer`."""
        if not document:
            return torch.empty(0, dtype=torch.int16)
        return torch.frombuffer(bytearray(document), dtype=torch.uint8).to(torch.int16)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 are shown as such."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "backslashreplace")


class HuggingFace(_WithoutTemplate):
    """Use a ``tokenizer.json``, by the package ``tokenizers``."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise InvalidInput(
                f"--tokenizer: {str(path)!r} needs the package tokenizers; allowed without it is bytes; to have it: "
                f"{how_to_install('tokenizers')}"
            ) from None
        try:
            written = path.read_bytes()
            # The package's own exceptions are plain `Exception`s.
            self._tokenizer: Any = Loaded.from_str(written.decode("utf-8"))
        except Exception as error:
            raise InvalidInput(
                f"--tokenizer: cannot read {str(path)!r}: {' '.join(str(error).split())}; allowed is bytes, or a "
                "Hugging Face tokenizer.json"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.digest = hashlib.sha256(written).hexdigest()
        known = self._tokenizer.get_vocab_size()
        end = self._token(_ENDS)
        self.end = known if end is None else end
        self.mask, self.first = self._token(_MASKS), self._token(_FIRSTS)
        self.vocabulary = max(known, self.end + 1)
        self._type = torch.int16 if self.vocabulary <= 2**15 else torch.int32

    def _token(self, names: Sequence[str]) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def encode(self, document: bytes) -> Tensor:
        """Encode a document; see `Tokenizer`."""
        text = document.decode("utf-8", "replace")
        return torch.tensor(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=self._type)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; see `Tokenizer`."""
        text: str = self._tokenizer.decode([token for token in tokens if token != self.end])
        return text


def tokenizer(name: str, model: str | None = None) -> Tokenizer:
    """Return the tokenizer of bytes, or the one in the file or folder of that name; for ``bytes`` the ``model``'s."""
    if name == "bytes" and model is not None:
        return FolderTokenizer(Path(model), "--hf")
    if name == "bytes":
        return Bytes()
    return FolderTokenizer(Path(name), "--tokenizer") if Path(name).is_dir() else HuggingFace(Path(name))
