import json

import numpy as np
import pytest

from taut.data import SOURCES, Corpus, build_corpus, read_source

TEXTS = [f"The quick brown fox number {i} jumps over {i * 7} lazy dogs." for i in range(300)]


def build(folder, texts=TEXTS, **options):
    return build_corpus(folder, texts, "here", **{"vocab_size": 400, "longest": 12} | options)


def test_texts_come_back(tmp_path):
    corpus = build(tmp_path / "c", longest=64)
    assert len(corpus) == len(TEXTS)
    assert corpus.vocab_size <= 400
    for i in (0, 7, 299):
        ids = corpus[i]
        assert ids.dtype == np.int64
        assert [int(ids[0]), int(ids[-1])] == [2, 3]
        words = corpus.tokenizer.decode(ids.tolist()).replace(" ", "")
        assert words == TEXTS[i].lower().replace(" ", "")
    assert corpus.lengths.sum() == len(corpus.tokens)


def test_long_texts_are_cut_and_nothing_is_lost(tmp_path):
    whole, cut = build(tmp_path / "a", longest=64), build(tmp_path / "b", longest=12)
    assert cut.lengths.max() <= 12
    assert len(cut) > len(whole)
    inner = [corpus.tokens[corpus.tokens > 4].astype(int) for corpus in (whole, cut)]
    # of pieces with a single word nothing can be learnt: they alone are left out
    assert 0 <= len(inner[0]) - len(inner[1]) <= len(TEXTS)


def test_is_made_once_and_anew_where_it_changed(tmp_path):
    folder = tmp_path / "c"
    stages = []
    first = build(folder)
    written = (folder / "tokens.npy").stat().st_mtime_ns
    build(folder, progress=lambda stage, count: stages.append(stage))
    assert (folder / "tokens.npy").stat().st_mtime_ns == written
    assert "tokenising" not in stages
    for change in ({"texts": [*TEXTS, "one more text"]}, {"longest": 20}, {"vocab_size": 350}):
        again = build(folder, **change)
        made_of = json.loads((folder / "corpus.json").read_text())["made_of"]
        assert made_of["longest"] == change.get("longest", 12)
        assert len(again) != len(first) or again.vocab_size != first.vocab_size or "texts" in change
    assert [x.name for x in tmp_path.iterdir()] == ["c"]  # nothing half-written is left


def test_damage_is_found(tmp_path):
    folder = tmp_path / "c"
    build(folder)
    raw = bytearray((folder / "tokens.npy").read_bytes())
    raw[-1] ^= 1
    (folder / "tokens.npy").write_bytes(raw)
    with pytest.raises(ValueError, match=r"tokens\.npy is damaged"):
        Corpus.open(folder)
    with pytest.raises(ValueError, match="holds no corpus"):
        Corpus.open(tmp_path / "none")


def test_nothing_to_learn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no texts"):
        build(tmp_path / "c", texts=[])
    with pytest.raises(ValueError, match="longer than one word"):
        build(tmp_path / "c", texts=["a", "b"])
    assert not list(tmp_path.iterdir())


def test_python_carries_its_documentation():
    texts = list(read_source("stdlib-docs"))
    assert len(texts) > 5000
    assert sum(map(len, texts)) > 1_000_000
    assert any("Return a list of the words in the string" in text for text in texts)
    assert texts == list(SOURCES["stdlib-docs"]())


def test_files_folders_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\nmore\r\n\r\ntwo ü\n\n\n\nthree".encode())
    assert list(read_source(str(tmp_path / "a.txt"))) == ["one\nmore", "two ü", "three"]
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.md").write_text("bee\n\nstill bee")
    (folder / "a.md").write_text("ay")
    assert list(read_source(str(folder))) == ["ay", "bee\n\nstill bee"]
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "one", "body": "eins"}\n{"text": "two", "body": "zwei"}\n')
    assert list(read_source(str(lines), field="body")) == ["eins", "zwei"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"other": "x"}', "line 2, has no text in the field 'text'"),
        (b'{"text": 3}', "line 2, has no text in the field 'text'"),
        (b"{nonsense", "line 2, is not UTF-8, or not JSON"),
        (b'{"text": "\xff"}', "line 2, is not UTF-8, or not JSON"),
        (b'{"text": "a\\u0000b"}', "line 2, holds a NUL"),
        (b'{"text": "' + b"x" * 10_000_001 + b'"}', "line 2, is longer than 10,000,000"),
    ],
)
def test_bad_records_are_named_or_skipped(line, message, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "too"}\n')
    with pytest.raises(ValueError, match=message):
        list(read_source(str(path)))
    assert list(read_source(str(path), policy="skip")) == ["good", "too"]


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="one of stdlib-docs, stdlib-code, or a file or folder"):
        list(read_source("stdlib-dosc"))
    with pytest.raises(ValueError, match="policy must be raise or skip"):
        list(read_source("stdlib-docs", policy="guess"))
