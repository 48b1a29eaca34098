"""Text to token ids and back, as the model's own tokenizer does it. No torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigurationError, InvalidRequestError
from engine.model.gguf_file import gguf_end_tokens, read_gguf
from engine.model.json_file import read_json
from engine.model.source import ModelSource, SourceKind, resolve
from engine.text.chat_template import RESERVED, ChatTemplate, ControlTokens, aliased_tokenizer_json, strip_mark
from engine.text.decoding import DecoderKind, decoder_rules, fallback_byte, token_to_bytes
from engine.text.gguf_tokenizer import build_gguf_tokenizer

# `tokenizers` keeps the interpreter's lock in `encode` and `decode`, for seconds if a text has megabytes, and lets go
# of it in their batched forms, which cost a short text more. In characters and in ids.
_LONG = 2048
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class WholeTexts(dict[int, str | None]):
    """The text of each token that has the same text wherever it stands; None for one that is special, part of a
    character, or nothing. Filled as it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._tokenizer.whole_text(token_id)
        return text


class Tokenizer:
    """Thread-safe, and other threads run while a long text is tokenized. Ids at or above `size` belong to no token:
    they decode to nothing and must not be sampled."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        end_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """named: the text of bos_token, eos_token and others. end_ids: ids that end a text, besides eos_token's."""
        self._backend = backend
        self._named = dict(named or {})
        self._serialised = backend.to_str()
        self.rules = decoder_rules(self._serialised)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = self._id_of("bos_token")
        own_end = self._id_of("eos_token")
        self.eos_token_ids = frozenset(end_ids) | (frozenset() if own_end is None else {own_end})
        self._template = None if chat_template is None else ChatTemplate(chat_template, self._named)
        self._control = ControlTokens([added[token_id].content for token_id in self.special_ids])
        self._aliased: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._bytes: dict[int, bytes] = {}
        self.whole_texts = WholeTexts(self)

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """The tokenizer of what `--model` names. Raises ConfigurationError."""
        return cls.from_source(resolve(model))

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        if source.kind is SourceKind.GGUF:
            return cls.from_gguf(source.path)
        return cls.from_directory(source.path)

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        metadata = read_gguf(path).metadata
        try:
            backend = build_gguf_tokenizer(metadata)
            ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_NAMES.items()}
            texts = {name: backend.id_to_token(item) for name, item in ids.items() if item is not None}
            named = {name: text for name, text in texts.items() if text is not None}
            template = metadata.get("tokenizer.chat_template")
            return cls(backend, named=named, end_ids=gguf_end_tokens(metadata), chat_template=template)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json, generation_config.json, config.json and
        chat_template.jinja."""
        backend = _read_backend(path / "tokenizer.json")
        config = _optional_json(path / "tokenizer_config.json")
        named = _named_tokens(config, _optional_json(path / "special_tokens_map.json"))
        _add_declared_tokens(backend, config, named)
        end_ids = [
            item
            for name in ("config.json", "generation_config.json")
            for item in _as_ids(_optional_json(path / name).get("eos_token_id"))
        ]
        try:
            return cls(backend, named=named, end_ids=end_ids, chat_template=_chat_template(path, config))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written in `text` become their ids, as in Hugging Face; for untrusted text use `encode_chat`.
        A text that begins with the BOS token gets no second one. Raises InvalidRequestError for lone surrogates."""
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Also each token's place in `text`, as (start, end) in characters; added tokens have (0, 0)."""
        encoding = self._encode(self._backend, text, add_special_tokens, "text")
        ids, offsets = encoding.ids, encoding.offsets
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:], offsets[1:]
        return ids, offsets

    def encode_plain(self, text: str) -> list[int]:
        """Every character as text: what spells a special token stays text, in ordinary tokens."""
        return self._encode(self._guarded(), text, False, "text").ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], str]:
        """The ids of a chat and the text they stand for. Special tokens come from the template only: the same
        characters in a message or an argument stay text. Nothing is added to what the template writes, so there is as
        much BOS as it has. Raises InvalidRequestError."""
        if self._template is None:
            raise InvalidRequestError("chat", "this model has no chat template; send text or token ids")
        arguments = dict(template_arguments or {})
        if taken := sorted(arguments.keys() & (RESERVED | self._named.keys())):
            raise InvalidRequestError("chat.template_arguments_json", f"{', '.join(taken)} cannot be set")
        mark = self._control.choose_mark([list(messages), arguments])
        marked = self._template.render(
            self._control.mark(list(messages), mark), add_generation_prompt, self._control.mark(arguments, mark)
        )
        rendered = strip_mark(marked, mark)
        if rendered == marked:
            return self._encode(self._backend, rendered, False, "chat.messages").ids, rendered
        aliased = self._control.alias(marked, mark)
        return self._encode(self._guarded(), aliased, False, "chat.messages").ids, rendered

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        if len(ids) > _LONG:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds inside a text; may be part of a character. Special tokens give their name."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.token(token_id)
            known = b"" if token is None else token_to_bytes(token, self.rules)
            self._bytes[token_id] = known
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text if nothing around it can change that, apart from the start of a text; else None."""
        token = self.token(token_id)
        if not token or token_id in self.special_ids:
            return None
        if self.rules.kind is DecoderKind.BYTE_FALLBACK and fallback_byte(token) is not None:
            return None
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """The whole tokenizer in the `tokenizers` library's format."""
        return self._serialised

    def _id_of(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self.token_id(text)

    def _guarded(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._aliased is None:
                data = aliased_tokenizer_json(self._serialised, self._control.aliases)
                self._aliased = tokenizers.Tokenizer.from_str(data)
            return self._aliased

    def _encode(self, backend: tokenizers.Tokenizer, text: str, special: bool, field: str) -> tokenizers.Encoding:
        try:
            if len(text) > _LONG:
                return backend.encode_batch([text], add_special_tokens=special)[0]
            return backend.encode(text, add_special_tokens=special)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(field, "the text has lone surrogates, which no UTF-8 text can have") from None


_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigurationError(f"{path}: missing; a model directory needs its tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"{path}: not a tokenizer: {str(error).splitlines()[0]}") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name, special_map.get(name))) for name in _NAMED}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, and the special flag of those with a name."""
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    known = backend.get_added_tokens_decoder()
    for index, fields in declared:
        if int(index) not in known and isinstance(fields, dict):
            flags = {key: bool(fields.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            backend.add_tokens([AddedToken(fields["content"], **flags)])
            if backend.token_to_id(fields["content"]) != int(index):
                raise ConfigurationError(f"tokenizer_config.json: token {fields['content']!r} cannot have id {index}")
    known = backend.get_added_tokens_decoder()
    plain = [text for text in named.values() if (item := backend.token_to_id(text)) is not None and item not in known]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in plain])


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None:
        template = _optional_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
