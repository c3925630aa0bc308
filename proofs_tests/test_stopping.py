"""TextStream and Detokenizer: where a text ends, and that ids, text and streamed pieces agree, whatever the steps."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optimized.sampling_params import SamplingParams
from optimized.stopping import Detokenizer, TextStream

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: token i < 256 is byte i; 256 is the special <eos>; 257.. are a few pairs of bytes."""
    by_byte = byte_characters()
    vocab = {by_byte[byte]: byte for byte in range(256)} | {"<eos>": EOS}
    merges = []
    for pair in (b"ab", b"\xf0\x9f", b"\x98\x80", b" S", b"TO", b"a\xe2"):
        left, right = (by_byte[byte] for byte in pair)
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="module")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's manner: words carry their space, unknown characters are spelled in bytes."""
    words = ["<unk>", "<eos>", "▁", "▁He", "llo", "▁world", ".", "▁."]
    vocab = {word: i for i, word in enumerate(words)} | {f"<0x{b:02X}>": len(words) + b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokenizer: Any, steps: Sequence[Sequence[int]], **params: Any) -> tuple[TextStream, list[str]]:
    """Push every step; returns the stream and what each push gave out."""
    params = {"max_new_tokens": 1000} | params
    text_stream = TextStream(tokenizer, SamplingParams(**params), [EOS])
    pieces = [text_stream.push(step) for step in steps]
    assert text_stream.text == "".join(pieces)
    return text_stream, pieces


def test_the_fixture_spells_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    assert decoded(tokenizer, [*bytes_of("añ😀"), EOS]) == "añ😀"
    assert decoded(tokenizer, [257, 258, 259]) == "ab😀"


def test_eos_is_kept_as_a_token_and_absent_from_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    result, pieces = stream(tokenizer, [bytes_of("hi"), [33, EOS, 34, 35]])
    assert pieces == ["hi", "!"]
    assert (result.token_ids, result.text, result.finish_reason) == ([*bytes_of("hi!"), EOS], "hi!", "eos")
    assert result.kept == 2
    assert result.push([40]) == ""
    assert (result.kept, len(result.token_ids)) == (0, 4)


def test_a_stop_token_ends_the_text_as_eos_does(tokenizer: PreTrainedTokenizerFast) -> None:
    result, _ = stream(tokenizer, [bytes_of("a;b")], stop_token_ids=[ord(";")])
    assert (result.token_ids, result.text, result.finish_reason, result.kept) == (bytes_of("a;"), "a", "stop", 2)
    both, _ = stream(tokenizer, [[97, EOS]], stop_token_ids=[EOS])
    assert both.finish_reason == "eos"


def test_length_ends_the_text_in_the_middle_of_an_accepted_path(tokenizer: PreTrainedTokenizerFast) -> None:
    result, pieces = stream(tokenizer, [bytes_of("abc"), bytes_of("defg")], max_new_tokens=5)
    assert pieces == ["abc", "de"]
    assert (result.kept, result.finish_reason, result.token_ids, result.remaining) == (
        2,
        "length",
        bytes_of("abcde"),
        0,
    )


def test_eos_on_the_last_allowed_token_is_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    result, _ = stream(tokenizer, [[97, EOS]], max_new_tokens=2)
    assert result.finish_reason == "eos"


def test_the_context_limit_counts_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    result = TextStream(tokenizer, SamplingParams(max_new_tokens=50), [EOS], prompt_length=7, max_length=10)
    assert result.remaining == 3
    assert result.push(bytes_of("abcdef")) == "abc"
    assert (result.finish_reason, result.kept) == ("length", 3)
    with pytest.raises(ValueError, match="10 tokens; it must be shorter than the context, 10"):
        TextStream(tokenizer, SamplingParams(), [EOS], prompt_length=10, max_length=10)


def test_a_stop_string_across_tokens_and_steps(tokenizer: PreTrainedTokenizerFast) -> None:
    result, pieces = stream(tokenizer, [bytes_of("go ST"), bytes_of("OP now")], stop="STOP")
    assert pieces == ["go ", ""]
    assert (result.token_ids, result.text, result.finish_reason) == (bytes_of("go STOP"), "go ", "stop")
    assert result.kept == 2  # "O" and "P"; " now" is dropped


def test_a_token_that_goes_beyond_the_stop_string_is_kept_and_its_rest_is_not_shown(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    result, _ = stream(tokenizer, [[120, 257]], stop="a")  # 257 is "ab"
    assert (result.token_ids, result.text, result.finish_reason) == ([120, 257], "x", "stop")


def test_text_that_only_looked_like_a_stop_string_is_given_out_late(tokenizer: PreTrainedTokenizerFast) -> None:
    _, pieces = stream(tokenizer, [[byte] for byte in bytes_of("aabaac")], stop=["aabaad", "xx"])
    assert pieces == ["", "", "", "", "", "aabaac"]
    overlap, pieces = stream(tokenizer, [[byte] for byte in bytes_of("aaab")], stop="aab")
    assert pieces == ["", "", "a", ""]
    assert overlap.text == "a"


def test_held_text_comes_out_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    result, pieces = stream(tokenizer, [bytes_of("x ST"), [EOS]], stop="STOP")
    assert pieces == ["x ", "ST"]
    assert result.finish_reason == "eos"
    cut, pieces = stream(tokenizer, [bytes_of("ST")], stop="STOP", max_new_tokens=2)
    assert (pieces, cut.finish_reason) == (["ST"], "length")
    ended, _ = stream(tokenizer, [bytes_of("ST")], stop="STOP")
    assert (ended.finish("length"), ended.text, ended.finish("stop")) == ("ST", "ST", "")
    assert ended.finish_reason == "length"


def test_of_several_stop_strings_the_first_completed_wins_however_the_text_is_cut(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    # 257 is "ab": one token completes both "b" and "ab" in "ab", and "b" ends no later than "abc".
    for steps in ([[257, 99]], [[97], [98], [99]]):
        result, _ = stream(tokenizer, steps, stop=["abc", "b"])
        assert result.text == "a"
    result, _ = stream(tokenizer, [[120, 257]], stop=["b", "ab"])
    assert result.text == "x"


def test_min_new_tokens_postpones_every_stop(tokenizer: PreTrainedTokenizerFast) -> None:
    early, _ = stream(tokenizer, [[97, EOS, 59, 98, 99, EOS]], min_new_tokens=3, stop_token_ids=[59], stop="b")
    assert early.token_ids == [97, EOS, 59, 98]  # "b" is the fourth token: three are there
    assert (early.text, early.finish_reason) == ("a;", "stop")
    eos, _ = stream(tokenizer, [[EOS, EOS, EOS]], min_new_tokens=2)
    assert (len(eos.token_ids), eos.finish_reason, eos.text) == (3, "eos", "")
    completed, _ = stream(tokenizer, [bytes_of("bab")], min_new_tokens=3, stop="b")
    assert (completed.token_ids, completed.text) == (bytes_of("bab"), "ba")
    # The stop string starts inside the first three tokens, overlapping one that was let pass.
    overlap, _ = stream(tokenizer, [bytes_of("aaaa")], min_new_tokens=3, stop="aa")
    assert overlap.text == "a"
    assert overlap.token_ids == bytes_of("aaa")


def test_a_stop_string_that_was_let_pass_is_not_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    _, pieces = stream(tokenizer, [[98], [122], [97]], min_new_tokens=9, stop=["b", "zzz"])
    assert pieces == ["b", "", "za"]


def test_half_a_character_is_never_given_out(tokenizer: PreTrainedTokenizerFast) -> None:
    steps = [[byte] for byte in bytes_of("é😀!")]
    _, pieces = stream(tokenizer, steps)
    assert pieces == ["", "é", "", "", "", "😀", "!"]
    _, merged = stream(tokenizer, [[258], [259], [33]])
    assert merged == ["", "😀", "!"]
    _, shared = stream(tokenizer, [[262], [0x82], [0xAC]])  # "a" and the first byte of "€" in one token
    assert shared == ["a", "", "€"]


def test_text_before_half_a_character_is_not_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    # 0xC3 right after "STOP" in one token would otherwise make the next token the one that completes the stop string.
    text_stream = TextStream(Chunks(["S", "TOP\ufffd", "é"]), SamplingParams(stop="STOP"), [])
    assert text_stream.push([0, 1, 2]) == ""
    assert (text_stream.finish_reason, text_stream.kept) == ("stop", 2)
    assert Detokenizer(Chunks(["ab\ufffd"])).push(0) == "ab"


class Chunks:
    """A stand-in whose token i is a piece of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    result, pieces = stream(tokenizer, [[97, 0xF0, 0x9F], [EOS]])
    assert pieces == ["a", "\ufffd"]
    assert result.text == decoded(tokenizer, result.token_ids)


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    result, pieces = stream(None, [[5, 6], [7, EOS, 8]], stop_token_ids=[9])
    assert pieces == ["", ""]
    assert (result.token_ids, result.finish_reason, result.text) == ([5, 6, 7, EOS], "eos", "")
    with pytest.raises(ValueError, match="need a tokenizer"):
        TextStream(None, SamplingParams(stop="a"), [])


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_the_pieces_joined_are_the_full_decode(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    rng = random.Random(7)
    alphabet = ["a", " ", "é", "😀", "👩‍👧", "語", "€", "STOP", "\ufffd", "\n"]
    for case in range(200):
        if kind == "characters":
            ids = tokenizer.encode("".join(rng.choices(alphabet, k=rng.randint(0, 30))), add_special_tokens=False)
            ids = [token for i in ids for token in ([i, EOS] if rng.random() < 0.1 else [i])]
        else:
            ids = [rng.choice([rng.randrange(263), 0xF0, 0x9F, 0x98, 0xE2, 97]) for _ in range(rng.randint(0, 30))]
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
        assert "".join(pieces) == decoded(tokenizer, ids), (case, ids)
        if kind == "characters":
            assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in decoded(tokenizer, ids)


def test_byte_fallback_vocabularies_and_leading_spaces(fallback_tokenizer: PreTrainedTokenizerFast) -> None:
    first_byte = 8
    ids = [3, 4, 5, *[first_byte + b for b in bytes_of("😀é")], 2, 3, 1, 6, 7]
    assert decoded(fallback_tokenizer, ids) == "Hello world😀é  He. ."
    detokenizer = Detokenizer(fallback_tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == decoded(fallback_tokenizer, ids)
    assert detokenizer.flush() == ""
    assert pieces[:3] == ["He", "llo", " world"]
    assert not any("\ufffd" in piece for piece in pieces)


def test_streams_do_not_depend_on_how_the_tokens_come(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(8)
    for _ in range(150):
        text = "".join(rng.choices(["a", "b", "é", "😀", "ST", "OP", " "], k=25))
        ids = tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.5:
            ids.insert(rng.randrange(len(ids)), EOS)
        params = {
            "stop": rng.choice([(), ("STOP",), ("ba", "b 😀"), ("aab", "OPa")]),
            "min_new_tokens": rng.choice([0, 9]),
        }
        whole, _ = stream(tokenizer, [ids], **params)
        cuts = sorted(rng.choices(range(len(ids) + 1), k=6))
        steps = [ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        split, _ = stream(tokenizer, steps, **params)
        for text_stream in (whole, split):
            text_stream.finish("length")
        assert (whole.token_ids, whole.text, whole.finish_reason) == (split.token_ids, split.text, split.finish_reason)
        full = decoded(tokenizer, whole.token_ids)
        assert full.startswith(whole.text)
        if whole.finish_reason != "stop":
            assert full == whole.text
        else:
            assert any(full[len(whole.text) :].startswith(stop) for stop in params["stop"])


def test_the_window_stays_small(tokenizer: PreTrainedTokenizerFast) -> None:
    class Counting:
        longest = 0

        def decode(self, ids: Sequence[int], **options: Any) -> str:
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(list(ids), **options)

    counting = Counting()
    detokenizer = Detokenizer(counting)
    for token in bytes_of("a😀é" * 300):
        detokenizer.push(token)
    assert counting.longest == 4 + 2  # two neighbouring characters
