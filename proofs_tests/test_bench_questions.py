"""Files of questions and lists of methods: what is read, and how what is wrong is told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from optimized.bench.methods import SETTINGS, Grid, Method, methods_of, topology_text
from optimized.bench.questions import read_set, read_sets, spread_order
from optimized.cli.bench import duration, integers, numbers, support_sizes
from reference.api import RheoConfig


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "question.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def question(question_id: int | str, *turns: str, category: str = "c") -> str:
    return json.dumps({"question_id": question_id, "category": category, "turns": turns or ["hello"]})


def test_a_set_is_called_as_its_folder(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mt_bench", question(81, "first", "second"), "", question("b", "  padded ", category="x\ny")
    )
    one = read_set(path)
    assert one.name == "mt_bench"
    assert read_set(path.parent) == one
    by_id = {item.question_id: item for item in one.questions}
    assert by_id["81"].turns == ("first", "second")
    assert by_id["b"].turns == ("  padded ",)  # what is asked is left as it is
    assert by_id["b"].category == "x y"
    assert {item.set_name for item in one.questions} == {"mt_bench"}
    other = tmp_path / "special.jsonl"
    other.write_bytes(path.read_bytes())
    assert (read_set(other).name, read_set(other).digest) == ("special", one.digest)
    write(tmp_path / "mt_bench", question(81, "first", "third"))
    assert read_set(path).digest != one.digest


def test_an_order_whose_beginnings_are_spread() -> None:
    for count in (1, 2, 3, 7, 10, 80):
        assert sorted(spread_order(count)) == list(range(count))
    assert spread_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    first = sorted(spread_order(80)[:10])
    assert max(b - a for a, b in pairwise(first)) <= 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", 'this is no JSON .*; a line would be {"question_id"'),
        ("[1, 2]", r"a JSON object is wanted, got \[1, 2\]"),
        ('{"turns": ["a"]}', '"question_id" is missing; a number or a text is wanted'),
        ('{"question_id": 1.5, "turns": ["a"]}', '"question_id" is 1.5; a number or a text is wanted'),
        ('{"question_id": true, "turns": ["a"]}', '"question_id" is true'),
        ('{"question_id": 1, "category": 3, "turns": ["a"]}', '"category" is 3; a text is wanted'),
        ('{"question_id": 1}', '"turns" is missing; a list of at least one text is wanted'),
        ('{"question_id": 1, "turns": []}', r'"turns" is \[\]; a list of at least one text is wanted'),
        ('{"question_id": 1, "turns": "a"}', '"turns" is "a"; a list'),
        ('{"question_id": 1, "turns": ["a", " "]}', 'turn 2 is " "; a text that is not empty is wanted'),
        ('{"question_id": 1, "turns": ["a", 7]}', "turn 2 is 7; a text"),
        (question(5), "question_id 5 stands in line 1 already; ids are unique"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad", question(5), "", line)
    with pytest.raises(ValueError, match=rf"bad/question.jsonl, line 3: {message}"):
        read_set(path)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file of questions"):
        read_set(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="holds no questions"):
        read_set(write(tmp_path / "empty", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(question(1).encode() + b"\n\xe9")
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: the file is not UTF-8"):
        read_set(tmp_path / "latin.jsonl")
    paths = [write(tmp_path / "a", question(1)), write(tmp_path / "a", question(1)).parent]
    with pytest.raises(ValueError, match="are both the set 'a'"):
        read_sets(paths)
    with pytest.raises(ValueError, match="no file of questions"):
        read_sets([])


def test_every_method_goes_through_the_settings_that_it_has() -> None:
    grid = Grid(lead_tokens=(0, 1), branching=(4,), depth=(3,), tree_size=(8, 16), draft_support=(32,))
    found = methods_of(["plain", "topk", "rheo", "rrsw", "chain", "generate", "rheo"], grid)
    assert [method.name for method in found] == (
        ["plain"] + ["topk"] * 2 + ["rheo"] * 4 + ["rrsw"] * 4 + ["chain", "generate"]
    )
    assert len(set(found)) == len(found)
    assert Method("rheo", 1, 1, 4, 3, 16, 32) in found
    assert Method("chain", depth=3, draft_support=32) in found
    assert {method.label(["lead_tokens", "tree_size"]) for method in found if method.name == "topk"} == {
        "topk R=8",
        "topk R=16",
    }


def test_what_a_method_stands_for() -> None:
    shape = {"branching": 4, "depth": 3, "tree_size": 8, "draft_support": 32}
    assert Method("rheo", 2, 1, **shape).config() == RheoConfig(2, 4, 3, 8, None, 32)
    assert Method("rrsw", 2, 3, **shape).config() == RheoConfig(2, 4, 3, 8, None, 32, "rheo", "rrsw", probes=3)
    static = Method("static", draft_support=32, topology=topology_text(((0,), (1,), (0, 0))))
    assert static.topology == "0_1_0.0"
    assert static.config() == RheoConfig.static([[0], [1], [0, 0]], draft_support=32)
    assert static.label(["topology"]).startswith("static 3 nodes #")
    assert Method("topk", **shape).config() == RheoConfig(1, 4, 3, 8, None, 32, proposal="topk")
    assert Method("chain", depth=3, draft_support=32).config() == RheoConfig(0, 1, 3, 3, 1, 32)
    assert Method("plain").config() is Method("generate").config() is None


def test_bad_methods() -> None:
    with pytest.raises(ValueError, match=f"unknown method 'eagle'; there are {', '.join(SETTINGS)}"):
        methods_of(["plain", "eagle"], Grid())
    with pytest.raises(ValueError, match="tree_size must be an integer >= 1, got 0"):
        methods_of(["rheo"], Grid(tree_size=(0,)))
    with pytest.raises(ValueError, match="method static needs a value for topology"):
        methods_of(["static"], Grid())


def test_lists_of_options() -> None:
    assert integers("--depths", "1, 2,3") == (1, 2, 3)
    assert numbers("--temperatures", "0,0.5,0") == (0.0, 0.5)
    assert support_sizes("32,full") == (32, None)
    with pytest.raises(ValueError, match="--depths 1,x: integers with commas are wanted, as in --depths 1,2"):
        integers("--depths", "1,x")
    for bad in ("a", "-1", "nan", "inf", ""):
        with pytest.raises(ValueError, match=r"--temperatures .*: numbers"):
            numbers("--temperatures", bad)
    with pytest.raises(ValueError, match="a support is at least 1, or full"):
        support_sizes("0")
    assert [duration(seconds) for seconds in (0, 89, 91, 3600, 11_100)] == [
        "0 s",
        "89 s",
        "2 min",
        "60 min",
        "3 h 05 min",
    ]
