"""Text to ids and back with the tokenizer.json of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

# What a decoder shows for bytes that are not, or not yet, UTF-8.
_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer.json that is missing or unreadable, or a text that cannot be encoded."""


class Tokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, bos: int | None = None):
        self._tokenizer = tokenizer
        self._bos = bos

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer in a checkpoint's folder.

        Args:
          path: Folder with tokenizer.json and, optionally, tokenizer_config.json, of which `add_bos_token` is honoured.

        Returns:
          The tokenizer.

        Raises:
          TokenizerError: tokenizer.json is missing or unreadable; the message starts with the path.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{path}: the folder has no tokenizer.json, so prompts must be given as ids")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{file}: not a tokenizer ({error})") from None
        return cls(tokenizer, _bos(tokenizer, Path(path) / "tokenizer_config.json"))

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt's text.

        Args:
          text: The prompt as the model should see it; special tokens in it are recognised, no chat template is applied.

        Returns:
          The ids, with those special tokens that the checkpoint's tokenizer adds to every text.

        Raises:
          TokenizerError: The text holds a lone surrogate, which UTF-8 cannot encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text cannot be encoded as UTF-8: {error}") from None
        ids = self._tokenizer.encode(text).ids
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD, ids beyond the tokenizer's become nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """A detokenizer for the tokens of one request as they are generated."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)


def _bos(tokenizer: tokenizers.Tokenizer, path: Path) -> int | None:
    """Id that tokenizer_config.json wants before every text, or None."""
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    token = raw.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(token) if raw.get("add_bos_token") is True and token is not None else None


class Detokenizer:
    """Incremental detokenization: the pieces joined are `Tokenizer.decode` of all ids.

    A character whose bytes are spread over tokens is given out once, when it is complete. Only the tokens since the
    last complete character, and the few before it that gave the piece of text before, are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # leading ids whose text was given out; they stay because some decoders trim the first token
        self._given = 0  # characters of the text of `_ids` that were given out

    def push(self, token: int) -> str:
        """Take the next token; returns the text that became certain, "" within a character or for a special token."""
        self._ids.append(token)
        text = self._text()
        # Later bytes can only change an incomplete last character, which decodes as one replacement character.
        certain = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._given : certain]
        self._given += len(piece)
        if certain == len(text):
            if piece:
                self._ids = self._ids[self._context :]
                self._context = len(self._ids)
                self._given = len(self._text())
            else:
                self._ids.pop()
        return piece

    def finish(self) -> str:
        """The rest of the text at the end of a request: U+FFFD if it ends within a character, else ""."""
        piece = self._text()[self._given :]
        self._given += len(piece)
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
