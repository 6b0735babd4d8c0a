"""Text to ids and back, whole and in pieces."""

import json
import random
import re

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from dsa_jax.tiny import write_tiny
from dsa_jax.tokenizer import Tokenizer, TokenizerError

TEXT = "Grüße, 漢字 🚀 naïve\u0301\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "glm5")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def merged():
    """Byte-level BPE with tokens that end within a character, begin within one, or span two of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pick = random.Random(0)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = split.pre_tokenize_str(TEXT * 20)[0][0]
    starts = [pick.randrange(len(text) - 4) for _ in range(100)]
    tokens = [text[start : start + pick.randint(2, 4)] for start in starts]
    tokens += ["".join(pick.choices(letters, k=pick.randint(2, 4))) for _ in range(100)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*letters, *tokens]))}
    built = Library(models.BPE(vocab=vocab, merges=[]))
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<eos>"])
    return Tokenizer(built)


def pieces_of(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert len(ids) == 3 and ids[1] == 256
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"
    assert pieces_of(tokenizer, ids) == ["a", "", "b", ""]
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=False)) == "a<|endoftext|>b"


def test_ids_without_a_token_are_nothing(tokenizer):
    a, b = tokenizer.encode("ab")
    assert tokenizer.decode([a, 259, b]) == "ab"
    assert pieces_of(tokenizer, [259, a, 259, b]) == ["", "a", "", "b", ""]


def test_characters_come_out_whole(tokenizer):
    pieces = pieces_of(tokenizer, tokenizer.encode(TEXT))
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_unfinished_character(tokenizer):
    ids = tokenizer.encode("x漢")[:-1]
    assert pieces_of(tokenizer, ids) == ["x", "", "", "\ufffd"]
    # It was not a character after all once something else follows.
    assert pieces_of(tokenizer, ids + tokenizer.encode("y")) == ["x", "", "", "\ufffdy", ""]


def test_character_split_by_a_special_token(tokenizer):
    first, *rest = tokenizer.encode("漢")
    assert pieces_of(tokenizer, [first, 256, *rest]) == ["", "", "", "漢", ""]


def test_replacement_character_itself_is_text(tokenizer):
    assert "".join(pieces_of(tokenizer, tokenizer.encode("a\ufffd\ufffdb\ufffd"))) == "a\ufffd\ufffdb\ufffd"


@pytest.mark.parametrize("which", ["tokenizer", "merged"])
def test_pieces_of_any_ids_join_to_the_whole(which, request):
    """Random ids are mostly not UTF-8: nothing may be lost, repeated or given out before it is certain."""
    tokenizer = request.getfixturevalue(which)
    size = 260 if which == "tokenizer" else 400
    pick = random.Random(1)
    for length in [*range(12), *[40] * 60]:
        ids = [pick.randrange(size) for _ in range(length)]
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=skip)) == whole


def test_work_of_a_step_is_bounded(tokenizer, monkeypatch):
    stream = tokenizer.stream()
    longest = 0
    decode = tokenizer.decode

    def counted(ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for token in [*tokenizer.encode(TEXT * 20), *[259] * 50, *[256] * 50]:
        stream.push(token)
    assert longest <= 8


def test_decoder_that_trims_the_first_token():
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    library = Library(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    assert tokenizer.decode([1, 2, 3]) == "a bc"
    assert pieces_of(tokenizer, [1, 2, 3, 2]) == ["a", " b", "c", " b", ""]


def test_missing_and_broken_files(tmp_path):
    path = re.escape(str(tmp_path))
    with pytest.raises(TokenizerError, match=rf"{path}: the folder has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=rf"{path}/tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(str(tmp_path))


def test_lone_surrogate(tokenizer):
    with pytest.raises(TokenizerError, match="UTF-8"):
        tokenizer.encode("a\udc80")


@pytest.mark.parametrize("bos", ["<|user|>", {"content": "<|user|>", "lstrip": False}])
def test_bos_of_the_tokenizer_config(folder, tmp_path, bos):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    plain = Tokenizer.from_folder(tmp_path).encode("ab")
    for wanted, prefix in ((True, [257]), (False, [])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": wanted, "bos_token": bos}))
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.encode("ab") == prefix + plain
        assert tokenizer.encode("<|user|>ab") == [257, *plain]
    for broken in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)
