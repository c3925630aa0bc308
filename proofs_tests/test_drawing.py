"""Pictures of draft trees: roles, numbers and labels exactly, on one tree made by hand; the SVG as parsed XML."""

import io
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from optimized.drawing import Role, draw_tree, node_roles, short_number, terminal_legend, tree_nodes, tree_svg, visible
from reference import grow_tree
from reference.api import DraftLaw, GrowthNoise, RheoConfig, VerifyResult
from reference.tree import DraftTree, root_only

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {7: "x<&", 1: " a", 2: "b", 3: "\n", 4: " ", 5: "日本", 6: "e\x07", 9: ""}

# The root offers lead 1, probe 2, fill 3; row 1 two leads, its probe is not in the tree; row 2 probe 6, then fill 2.
TREE = DraftTree(
    token_ids=(-1, 1, 2, 3, 4, 5, 6, 2),
    parents=(-1, 0, 0, 0, 1, 1, 2, 2),
    depths=(0, 1, 1, 1, 2, 2, 2, 2),
    slots=(0, 0, 1, 2, 0, 1, 0, 1),
    is_probe=(False, False, True, False, False, False, True, False),
    scores=(1.0, 0.5, 0.25, 0.125, 0.4, 0.05, 0.125, 0.0625),
    probe_laws={0: ((2, 3), np.array([0.75, 0.25])), 2: ((6, 2), np.array([0.0625, 0.9375]))},
)
WALK = VerifyResult(token_ids=(2, 6, 9), accepted_nodes=(2, 6))


def text_of(token: int) -> str:
    return WORDS[token]


def shown(tree: DraftTree, walk: VerifyResult | None = None, root_token: int | None = None) -> list[str]:
    console = Console(width=120, record=True, color_system=None, file=io.StringIO())
    console.print(draw_tree(tree, text_of, walk, root_token))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_node_roles_of_a_tree_made_by_hand() -> None:
    lead, probe, fill = Role.LEAD, Role.PROBE, Role.FILL
    assert node_roles(TREE) == (Role.ROOT, lead, probe, fill, lead, lead, probe, fill)


@pytest.mark.parametrize("lead_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("tree_size", [1, 7, 40])
def test_node_roles_are_those_of_the_schedule(lead_tokens: int, tree_size: int) -> None:
    """Slot m is the probe's, the slots before it the leads', those after it the fills'; with m >= K all are leads."""

    def draft(path: tuple[int, ...]) -> DraftLaw:
        return DraftLaw.from_logits(np.random.default_rng([11, *path]).normal(size=9))

    config = RheoConfig(lead_tokens=lead_tokens, branching=4, depth=3, tree_size=tree_size)
    tree = grow_tree(config, draft, GrowthNoise(np.random.default_rng(5).random((3, 4))))
    for row, role in list(enumerate(node_roles(tree)))[1:]:
        slot = tree.slots[row]
        if lead_tokens >= config.branching or slot < lead_tokens:
            assert role is Role.LEAD
        else:
            assert role is (Role.PROBE if slot == lead_tokens else Role.FILL)


def test_each_of_several_probes_is_shown_with_the_law_that_drew_it() -> None:
    law = DraftLaw([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])
    config = RheoConfig(lead_tokens=1, branching=4, depth=1, tree_size=4, probes=2)
    tree = grow_tree(config, lambda path: law, GrowthNoise(np.full((1, 4, 2), 0.6)))
    assert tree.token_ids == (-1, 0, 2, 1, 3)
    assert node_roles(tree) == (Role.ROOT, Role.LEAD, Role.PROBE, Role.PROBE, Role.FILL)
    nodes = tree_nodes(tree, str)
    assert [node.sampling for node in nodes] == [None, None, pytest.approx(2 / 6), pytest.approx(3 / 4), None]


def test_top_k_trees_have_leads_only() -> None:
    law = DraftLaw([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    tree = grow_tree(RheoConfig(branching=3, depth=2, tree_size=9, proposal="topk"), lambda path: law, _noise(2, 3))
    assert set(node_roles(tree)[1:]) == {Role.LEAD}


def _noise(depth: int, beam: int) -> GrowthNoise:
    return GrowthNoise(np.full((depth, beam), 0.5))


def test_tree_nodes_numbers() -> None:
    nodes = tree_nodes(TREE, text_of, WALK, root_token=7)
    assert [node.weight for node in nodes] == [None, 0.5, 0.25, 0.125, 0.8, 0.1, 0.5, 0.25, None]
    assert [node.sampling for node in nodes] == [None, None, 0.75, None, None, None, 0.0625, None, None]
    assert [node.score for node in nodes[:-1]] == list(TREE.scores)
    assert [node.label for node in nodes] == ["x<&", "␣a", "b", "↵", "␣", "日本", r"e\u0007", "b", "#9"]
    assert [row for row, node in enumerate(nodes) if node.accepted] == [0, 2, 6, 8]
    assert [node.children for node in nodes] == [(1, 2, 3), (4, 5), (6, 7), (), (), (), (8,), (), ()]


def test_tree_nodes_without_a_walk_has_no_bonus_and_accepts_nothing() -> None:
    nodes = tree_nodes(TREE, text_of)
    assert len(nodes) == len(TREE)
    assert not any(node.accepted for node in nodes)
    assert nodes[0].label == "root"


def test_tree_nodes_shows_no_weight_below_a_score_that_underflowed() -> None:
    tree = DraftTree((-1, 1, 2), (-1, 0, 1), (0, 1, 2), (0, 0, 0), (False,) * 3, (1.0, 0.0, 0.0))
    assert math.isnan(tree_nodes(tree, text_of)[2].weight or 0)
    assert "– → 0.0" in shown(tree)[2]


def test_draw_tree_line_by_line() -> None:
    assert shown(TREE, WALK, root_token=7) == [
        "■  x<&",
        "┣━━ ●  ␣a  0.50 → 0.50",
        "┃   ┣━━ ●  ␣  0.80 → 0.40",
        "┃   ┗━━ ●  日本  0.10 → 0.050",
        "┣━━ ◆  b  proxy 0.25, q~ 0.75 → 0.25 ✓",
        r"┃   ┣━━ ◆  e\u0007  proxy 0.50, q~ 0.062 → 0.12 ✓",
        "┃   ┃   ┗━━ ★  #9  bonus",
        "┃   ┗━━ ○  b  0.25 → 0.062",
        "┗━━ ○  ↵  0.12 → 0.12",
    ]


def test_draw_tree_of_the_root_alone() -> None:
    assert shown(root_only()) == ["■  root"]
    assert shown(root_only(), VerifyResult((1,), ())) == ["■  root", "┗━━ ★  ␣a  bonus"]


def test_terminal_legend_names_the_roles_present() -> None:
    legend = terminal_legend(tree_nodes(TREE, text_of, WALK)).plain
    assert legend == "● lead   ◆ probe   ○ fill   ★ bonus   weight → path score"
    assert terminal_legend(tree_nodes(root_only(), text_of)).plain == "weight → path score"


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.0"), (0.42, "0.42"), (0.07, "0.070"), (2.1e-5, "2.1e-05"), (math.nan, "–")]
)
def test_short_number(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("text", "label"), [(" a b", "␣a␣b"), ("\n\t", "↵⇥"), ("\x1b[31m", r"\u001b[31m"), ("", "#5"), ("\ufffd", "#5")]
)
def test_visible(text: str, label: str) -> None:
    assert visible(text, 5) == label


def groups(svg: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if "node" in group.attrib["class"].split()]


def test_tree_svg_has_every_node_once_with_its_role_and_the_accepted_path() -> None:
    nodes = groups(tree_svg(TREE, text_of, WALK, root_token=7))
    assert [int(node.attrib["data-row"]) for node in nodes] == list(range(len(TREE) + 1))
    assert [node.attrib["class"].split()[1] for node in nodes] == [
        "root", "lead", "probe", "fill", "lead", "lead", "probe", "fill", "bonus"
    ]  # fmt: skip
    accepted = [int(node.attrib["data-row"]) for node in nodes if "accepted" in node.attrib["class"].split()]
    assert accepted == [0, 2, 6, 8]
    texts = [[text.text for text in node.iter(f"{SVG}text")] for node in nodes]
    assert texts[0] == ["x<&"]
    assert texts[2] == ["b", "proxy 0.25, q~ 0.75 → 0.25"]
    titles = [node.findtext(f"{SVG}title") for node in nodes]
    assert titles[6] == "probe “e\\u0007”, token 6, proxy 0.5, sampling probability 0.0625, path score 0.125, accepted"


def test_tree_svg_edges() -> None:
    root = ElementTree.fromstring(tree_svg(TREE, text_of, WALK))
    curves = [path for path in root.iter(f"{SVG}path") if "C" in path.attrib["d"]]
    assert len(curves) == len(TREE)  # every draft node and the bonus token hang on one edge
    assert sum(path.attrib["class"] == "edge accepted" for path in curves) == 3
    assert [path.attrib["class"] for path in curves[-3:]] == ["edge accepted"] * 3  # painted over the others


@pytest.mark.parametrize("tree_size", [1, 8, 60])
def test_tree_svg_badges_lie_inside_and_apart(tree_size: int) -> None:
    def draft(path: tuple[int, ...]) -> DraftLaw:
        return DraftLaw.from_logits(np.random.default_rng([2, *path]).normal(size=99))

    config = RheoConfig(branching=5, depth=6, tree_size=tree_size)
    tree = grow_tree(config, draft, GrowthNoise(np.random.default_rng(5).random((6, 5))))
    svg = tree_svg(tree, lambda token: "w" * (token % 12), VerifyResult((tree.token_ids[1], 4), (1,)))
    document = ElementTree.fromstring(svg)
    nodes = groups(svg)
    assert len(nodes) == tree_size + 2
    boxes = []
    for node in nodes:
        rect = next(node.iter(f"{SVG}rect"))
        boxes.append([float(rect.attrib[name]) for name in ("x", "y", "width", "height")])
    for x, y, width, height in boxes:
        assert 0 <= x <= x + width <= float(document.attrib["width"])
        assert 0 <= y <= y + height <= float(document.attrib["height"])
    for i, (x, y, width, height) in enumerate(boxes):
        for x2, y2, width2, height2 in boxes[:i]:
            assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


def test_tree_svg_is_self_contained() -> None:
    svg = tree_svg(TREE, text_of, WALK, title='"<T>" & co')
    assert not any(word in svg for word in ("href", "script", "@import", "url(", "@font-face"))
    assert ElementTree.fromstring(svg).attrib["aria-label"] == '"<T>" & co'
