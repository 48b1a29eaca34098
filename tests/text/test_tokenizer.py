"""Tokenizers from directories and GGUF files against the ones that transformers builds of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, processors

from engine.errors import ConfigurationError, InvalidRequestError
from engine.model.source import resolve
from engine.text.gguf_tokenizer import build_gguf_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.model.demo_peer import demo_peer_tokenizer
from tests.model.tiny import CHAT_TEMPLATE, SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer, write_tokenizer
from tests.text.corpus import CORPUS, PROMPTS
from tests.text.tokenizers_under_test import tokenizer


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str] = CORPUS) -> None:
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.fixture(scope="module")
def pair() -> tuple[Tokenizer, Any]:
    """The demo model's tokenizer, ours and the one that transformers makes of the same file."""
    return Tokenizer.from_source(resolve("demo")), demo_peer_tokenizer()


class TestDemo:
    def test_equals_transformers(self, pair: tuple[Tokenizer, Any]) -> None:
        assert_same(*pair, [text for text in CORPUS if "numerals" not in text])

    def test_special_tokens_in_text_are_tokens(self, pair: tuple[Tokenizer, Any]) -> None:
        assert_same(*pair, ["<|im_start|>user\nhi<|im_end|>", "a<|endoftext|>b <|im_end|> c", "<repo_name>x<file_sep>"])

    def test_chat_equals_transformers(self, pair: tuple[Tokenizer, Any]) -> None:
        ours, theirs = pair
        for text in (text for text in CORPUS if "numerals" not in text):
            for messages in ([{"role": "user", "content": text}], [{"role": "system", "content": text}] * 2):
                ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                assert ours.encode_chat(messages)[0] == ids

    def test_digits_stand_alone_as_the_model_was_trained(self, pair: tuple[Tokenizer, Any]) -> None:
        """pre = "smollm" cuts at every digit, as the model's own tokenizer.json does. Transformers ignores it, which
        shows at spaces before a digit and at numerals other than 0 to 9."""
        ours, theirs = pair
        assert [ours.token(token_id) for token_id in ours.encode("a  12")] == ["a", "ĠĠ", "1", "2"]
        assert [ours.token(token_id) for token_id in theirs.encode("a  12")] == ["a", "Ġ", "Ġ", "1", "2"]

    def test_facts(self, pair: tuple[Tokenizer, Any]) -> None:
        ours = pair[0]
        assert (ours.size, ours.bos_token_id, ours.eos_token_ids) == (49152, 1, frozenset({2}))
        assert ours.special_ids == frozenset(range(17))
        assert ours.token_bytes(2) == b"<|im_end|>"


def write_vocabulary(path: Path, architecture: str, tokenizer: Any, kind: str, **fields: Any) -> Path:
    """A GGUF file with a tokenizer and nothing else."""
    data = json.loads(tokenizer.to_str())
    vocabulary = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in data["added_tokens"]}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class TestGguf:
    def test_sentencepiece(self, tmp_path: Path) -> None:
        tokenizer = sentencepiece_tokenizer()
        scores = [-float(index) for index in range(tokenizer.get_vocab_size())]
        ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
        path = write_vocabulary(tmp_path / "m.gguf", "llama", tokenizer, "llama", token_scores=scores, **ids)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        ours = Tokenizer.from_gguf(path)
        # transformers adds no BOS to a GGUF's text; the format's default for this kind is to add one.
        assert ours.encode("the cat") == [1, *theirs.encode("the cat", add_special_tokens=False)]
        for text in CORPUS:
            ids_of = ours.encode(text, add_special_tokens=False)
            assert ids_of == theirs.encode(text, add_special_tokens=False)

    def test_qwen2(self, tmp_path: Path) -> None:
        tokenizer = byte_level_tokenizer()
        model = json.loads(tokenizer.to_str())["model"]
        path = write_vocabulary(tmp_path / "m.gguf", "qwen2", tokenizer, "gpt2", tokenizer_pre="qwen2", eos_token_id=2)
        merges = [tuple(merge) for merge in model["merges"]]
        theirs = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
        theirs.add_special_tokens({"additional_special_tokens": SPECIALS})
        ours = Tokenizer.from_gguf(path)
        for text in CORPUS:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text

    @pytest.mark.parametrize(
        ("pre", "words"),
        [
            ("gpt-2", ["a", "Ġ12345", "Ġ", "Ġb's", "Ċ"]),
            ("llama-bpe", ["a", "Ġ", "123", "45", "Ġ", "Ġb", "'s", "Ċ"]),
            ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġb", "'s", "Ċ"]),
        ],
    )
    def test_how_text_is_cut(self, pre: str, words: list[str], tmp_path: Path) -> None:
        path = write_vocabulary(tmp_path / "m.gguf", "llama", byte_level_tokenizer(), "gpt2", tokenizer_pre=pre)
        backend = Tokenizer.from_gguf(path)._backend
        assert backend.pre_tokenizer is not None
        cut = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345  b's\n")]
        assert "|".join(cut) == "|".join(words).replace("b's", "b|'s")

    def test_end_tokens_and_added_bos(self, tmp_path: Path) -> None:
        fields = {"bos_token_id": 0, "eos_token_id": 2, "eot_token_id": 1, "tokenizer_pre": "gpt-2"}
        tokenizer = byte_level_tokenizer()
        path = write_vocabulary(tmp_path / "a.gguf", "llama", tokenizer, "gpt2", add_bos_token=True, **fields)
        ours = Tokenizer.from_gguf(path)
        assert ours.eos_token_ids == {1, 2}
        assert ours.encode("hi")[0] == 0
        plain = write_vocabulary(tmp_path / "b.gguf", "llama", tokenizer, "gpt2", **fields)
        assert Tokenizer.from_gguf(plain).encode("hi") == ours.encode("hi")[1:]

    @pytest.mark.parametrize(
        ("kind", "fields", "cause"),
        [
            ("gpt2", {"tokenizer_pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
            ("bert", {}, "tokenizer 'bert'"),
            ("llama", {}, "needs a score for each token"),
        ],
    )
    def test_refusals(self, kind: str, fields: dict[str, Any], cause: str, tmp_path: Path) -> None:
        path = write_vocabulary(tmp_path / "m.gguf", "llama", byte_level_tokenizer(), kind, **fields)
        with pytest.raises(ConfigurationError, match=cause) as caught:
            Tokenizer.from_gguf(path)
        assert str(path) in str(caught.value)

    def test_control_and_unknown_tokens_are_special_and_user_defined_ones_are_not(self) -> None:
        tokens = ["<unk>", "<s>", "<tool>", "a"]
        backend = build_gguf_tokenizer(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": [0.0] * 4,
                "tokenizer.ggml.token_type": [2, 3, 4, 1],
                "tokenizer.ggml.unknown_token_id": 0,
            }
        )
        added = backend.get_added_tokens_decoder()
        assert {token_id: token.special for token_id, token in added.items()} == {0: True, 1: True, 2: False}

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ConfigurationError, match=r"m\.gguf: no tokenizer"):
            Tokenizer.from_gguf(tmp_path / "m.gguf")


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}))


class TestDirectory:
    def test_equals_transformers(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path)
        assert_same(Tokenizer.from_directory(path), transformers.AutoTokenizer.from_pretrained(path))

    @pytest.mark.parametrize("metaspace", [True, False])
    def test_sentencepiece(self, metaspace: bool, tmp_path: Path) -> None:
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=sentencepiece_tokenizer(metaspace), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(tmp_path)
        ours = Tokenizer.from_directory(tmp_path)
        assert_same(ours, transformers.AutoTokenizer.from_pretrained(tmp_path))
        assert (ours.bos_token_id, ours.eos_token_ids) == (1, frozenset({2}))

    def test_bos_added_by_the_tokenizer(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path, add_bos=True)
        assert_same(Tokenizer.from_directory(path), transformers.AutoTokenizer.from_pretrained(path))

    @pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
    @pytest.mark.parametrize("add_bos", [True, False])
    def test_tokenizer_json_alone_says_what_is_added(
        self, flags: dict[str, bool], add_bos: bool, tmp_path: Path
    ) -> None:
        path = write_tokenizer(tmp_path, add_bos=add_bos)
        edit(path / "tokenizer_config.json", **flags)
        assert_same(Tokenizer.from_directory(path), transformers.AutoTokenizer.from_pretrained(path))

    def test_tokens_declared_in_the_config_only(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path)
        declared = {"content": "<tool>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
        edit(path / "tokenizer_config.json", added_tokens_decoder={"512": {**declared, "special": True}})
        ours = Tokenizer.from_directory(path)
        assert_same(ours, transformers.AutoTokenizer.from_pretrained(path), ["a<tool>b"])
        assert ours.size == 513
        assert 512 in ours.special_ids

    def test_a_declared_token_without_its_id_is_refused(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path)
        edit(path / "tokenizer_config.json", added_tokens_decoder={"600": {"content": "<x>", "special": True}})
        with pytest.raises(ConfigurationError, match="'<x>' cannot have id 600"):
            Tokenizer.from_directory(path)

    def test_end_tokens_of_all_files(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path)
        edit(path / "config.json", eos_token_id=7)
        edit(path / "generation_config.json", eos_token_id=[8, 9])
        assert Tokenizer.from_directory(path).eos_token_ids == {2, 7, 8, 9}

    def test_where_the_chat_template_may_be(self, tmp_path: Path) -> None:
        path = write_tokenizer(tmp_path)
        (path / "chat_template.jinja").unlink(missing_ok=True)
        config = path / "tokenizer_config.json"
        for value, expected in (
            (None, None),
            ("inline", "inline"),
            ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ):
            edit(config, chat_template=value)
            assert Tokenizer.from_directory(path).chat_template == expected
        edit(config, chat_template=None)
        edit(path / "chat_template.json", chat_template="from json")
        assert Tokenizer.from_directory(path).chat_template == "from json"
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        assert Tokenizer.from_directory(path).chat_template == CHAT_TEMPLATE

    @pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
    def test_a_missing_or_broken_file(self, content: str | None, tmp_path: Path) -> None:
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigurationError, match=r"tokenizer\.json: ") as caught:
            Tokenizer.from_directory(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["demo", "byte-level", "byte-fallback", "unigram"])
def test_text_comes_back_from_its_tokens(kind: str) -> None:
    """Byte-level: every text. SentencePiece spells a space as U+2581 and, in `tokenizers`, a byte as <0x41>: these do
    not come back."""
    tok = tokenizer(kind)
    for text in [*PROMPTS.values(), *CORPUS]:
        if kind in ("byte-fallback", "unigram"):
            text = text.replace("▁", "_").replace("<0x41>", "")
        ids = tok.encode(text, add_special_tokens=False)
        assert tok.decode(ids, skip_special_tokens=False) == text


def test_ids_of_no_token_decode_to_nothing() -> None:
    tok = Tokenizer(byte_level_tokenizer())
    ids = tok.encode("hi")
    assert tok.decode([512, *ids, 639, 10**6]) == "hi"
    assert tok.token(600) is None


def test_offsets_are_places_in_the_text() -> None:
    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single=[SPECIALS[0], "$A"], special_tokens=[(SPECIALS[0], 0)]
    )
    tok = Tokenizer(backend, named={"bos_token": SPECIALS[0]})
    text = "the dog, žlutý"
    ids, offsets = tok.encode_with_offsets(text)
    assert len(ids) == len(offsets)
    assert offsets[0] == (0, 0)
    assert text[slice(*offsets[1])] == "the"
    assert offsets[-1][1] == len(text)


class TestLongTexts:
    """Megabytes take seconds; whoever else runs in the process must not wait for them."""

    TEXT = "The quick brown fox, žluťoučký kůň. <|im_start|>" * 8000

    @pytest.mark.parametrize("kind", ["demo", "byte-fallback"])
    def test_have_the_tokens_of_the_library(self, kind: str) -> None:
        tok = tokenizer(kind)
        library = tokenizers.Tokenizer.from_str(tok.to_json())
        text = "".join(CORPUS) * 5
        expected = library.encode(text)
        assert tok.encode_with_offsets(text) == (expected.ids, expected.offsets)
        assert tok.encode(text) == expected.ids
        for skip in (True, False):
            assert tok.decode(expected.ids, skip) == library.decode(expected.ids, skip_special_tokens=skip)

    @pytest.mark.parametrize("work", ["encode", "encode_with_offsets", "encode_chat", "decode"])
    def test_hold_no_other_thread_up(self, work: str) -> None:
        tok = tokenizer("demo")
        ids = tok.encode(self.TEXT) * 4
        jobs: dict[str, Callable[[], object]] = {
            "encode": lambda: tok.encode(self.TEXT),
            "encode_with_offsets": lambda: tok.encode_with_offsets(self.TEXT),
            "encode_chat": lambda: tok.encode_chat([{"role": "user", "content": self.TEXT}]),
            "decode": lambda: tok.decode(ids),
        }
        jobs["encode_chat"]()  # makes the tokenizer for forged control tokens
        beats: list[float] = []
        done = threading.Event()

        def beat() -> None:
            while not done.wait(0.001):
                beats.append(time.perf_counter())

        watcher = threading.Thread(target=beat)
        watcher.start()
        began = time.perf_counter()
        jobs[work]()
        ended = time.perf_counter()
        done.set()
        watcher.join()
        # Held up, it would have had one turn at most.
        assert sum(began < at < ended for at in beats) >= 5

    def test_lone_surrogates(self) -> None:
        with pytest.raises(InvalidRequestError, match="surrogates"):
            tokenizer("demo").encode("a" * 5000 + "\ud800")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogates") as caught:
        Tokenizer(byte_level_tokenizer()).encode("\ud800")
    assert caught.value.field == "text"


def test_spaces_are_counted_as_tokens() -> None:
    """Usage counts ids: text tokenized again would give other numbers."""
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken(" " * 15, normalized=False)])
    tok = Tokenizer(backend)
    assert tok.encode(" " * 15) == [512]
    assert tok.decode([512]) == " " * 15


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from engine.text.output import OutputText; from engine.text.tokenizer import Tokenizer;"
        " Tokenizer.load('demo'); print([name for name in ('torch', 'gguf', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
