"""Pictures of a draft tree: in the terminal (rich) and as a self-contained SVG.

Both show the same thing: every node's token, role, weight and path score; the probe's two probabilities; the path the
verification walk accepted, and the bonus token at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from xml.sax.saxutils import escape, quoteattr

from rich.cells import cell_len
from rich.text import Text
from rich.tree import Tree

from reference.api import VerifyResult
from reference.tree import DraftTree, law_without

TextOf = Callable[[int], str]  # token id -> its text, a decoder's ``tokenizer.decode``


class Role(StrEnum):
    """What a node is to its parent."""

    ROOT = "root"
    LEAD = "lead"
    PROBE = "probe"
    FILL = "fill"
    BONUS = "bonus"


GLYPHS = {Role.ROOT: "■", Role.LEAD: "●", Role.PROBE: "◆", Role.FILL: "○", Role.BONUS: "★"}
TERMINAL_STYLES = {Role.ROOT: "bold", Role.LEAD: "blue", Role.PROBE: "dark_orange", Role.FILL: "grey58"}
BONUS_STYLE = "bold green"
MEANINGS = {
    Role.LEAD: "lead, a top token",
    Role.PROBE: "probe, the sampled token",
    Role.FILL: "fill, a next best token",
    Role.BONUS: "bonus, the target's own token",
}


@dataclass(frozen=True)
class Node:
    """What is drawn of one node.

    Attributes:
        role: lead, probe, fill, root or bonus.
        label: the token's text, made visible.
        token_id: target id; -1 for a root whose token is not known.
        weight: path score over the parent's; for the probe that is its proxy. None for root and bonus.
        sampling: q~ of the probe's token, None for every other role.
        score: path score, None for the bonus token.
        accepted: whether the verification walk went through it; true for the root and the bonus token of a walk.
        children: rows of the children, the bonus token (row ``len(tree)``) last.
    """

    role: Role
    label: str
    token_id: int
    weight: float | None
    sampling: float | None
    score: float | None
    accepted: bool
    children: tuple[int, ...]

    @property
    def numbers(self) -> str:
        """Weight and path score in a few characters; for the probe its proxy and its sampling probability first."""
        if self.weight is None or self.score is None:
            return ""
        weight = short_number(self.weight)
        if self.sampling is not None:
            weight = f"proxy {weight}, q~ {short_number(self.sampling)}"
        return f"{weight} → {short_number(self.score)}"


def node_roles(tree: DraftTree) -> tuple[Role, ...]:
    """The role of every row.

    The tree alone tells: a probe's place comes before its fills' in the total order, so where a parent's probes are not
    in the tree its children can only be leads, or the top-K slots of a parent that offers no probe at all.
    """
    probe_slots = {tree.parents[row]: tree.slots[row] for row in range(1, len(tree)) if tree.is_probe[row]}

    def role(row: int) -> Role:
        if tree.is_probe[row]:
            return Role.PROBE
        return Role.LEAD if tree.slots[row] < probe_slots.get(tree.parents[row], math.inf) else Role.FILL

    return (Role.ROOT, *(role(row) for row in range(1, len(tree))))


def tree_nodes(
    tree: DraftTree, text_of: TextOf, walk: VerifyResult | None = None, root_token: int | None = None
) -> list[Node]:
    """Everything that is drawn, by tree row; with a walk, the bonus token is one row more at the end.

    Args:
        tree: the draft tree.
        text_of: token id -> text.
        walk: what verification made of it; None draws the bare tree.
        root_token: id of the last committed token, which the tree itself does not hold.
    """
    path = {0, *walk.accepted_nodes} if walk else set()
    last = (walk.accepted_nodes or (0,))[-1] if walk else -1
    nodes = []
    for row, role in enumerate(node_roles(tree)):
        token = tree.token_ids[row] if row else (-1 if root_token is None else root_token)
        weight = sampling = None
        if row:
            above = float(tree.scores[tree.parents[row]])
            weight = float(tree.scores[row]) / above if above > 0 else math.nan
        if role is Role.PROBE:
            probe_law = tree.probe_laws[tree.parents[row]]
            for earlier in tree.probe_children(tree.parents[row]):
                if earlier < row:
                    probe_law = law_without(probe_law, tree.token_ids[earlier])
            sampling = float(probe_law[1][probe_law[0].index(token)])
        nodes.append(
            Node(
                role=role,
                label=visible(text_of(token), token) if token >= 0 else "root",
                token_id=token,
                weight=weight,
                sampling=sampling,
                score=float(tree.scores[row]),
                accepted=row in path,
                children=(*tree.children(row), *([len(tree)] if row == last else [])),
            )
        )
    if walk:
        token = walk.token_ids[-1]
        nodes.append(Node(Role.BONUS, visible(text_of(token), token), token, None, None, None, True, ()))
    return nodes


def visible(text: str, token_id: int) -> str:
    """A token's text with its blanks and control characters made visible; its id where the text says nothing."""
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return f"#{token_id}"
    shown = {" ": "␣", "\n": "↵", "\t": "⇥"}
    return "".join(shown.get(char, char if char.isprintable() else rf"\u{ord(char):04x}") for char in text)


def short_number(value: float) -> str:
    """A probability with two significant digits: 1.0, 0.42, 0.070, 2.1e-05; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:#.2g}"


def draw_tree(
    tree: DraftTree, text_of: TextOf, walk: VerifyResult | None = None, root_token: int | None = None
) -> Tree:
    """The tree for a terminal; arguments as for ``tree_nodes``. Print it with a rich console."""
    nodes = tree_nodes(tree, text_of, walk, root_token)

    def line(node: Node) -> Text:
        style = BONUS_STYLE if node.role is Role.BONUS else TERMINAL_STYLES[node.role]
        emphasis = " bold reverse" if node.accepted and node.role is not Role.ROOT else ""
        text = Text(f"{GLYPHS[node.role]} ", style=style).append(f" {node.label} ", style=style + emphasis)
        if node.role is Role.BONUS:
            return text.append(" bonus", style="green")
        if node.numbers:
            text.append(f" {node.numbers}", style="dim" if not node.accepted else "")
        return text.append(" ✓", style="green") if emphasis else text

    def branch(parent: Tree, row: int) -> Tree:
        child = parent.add(line(nodes[row])) if row else parent
        child.guide_style = "bold" if nodes[row].accepted else "grey39"
        for below in nodes[row].children:
            branch(child, below)
        return child

    return branch(Tree(line(nodes[0])), 0)


def terminal_legend(nodes: list[Node]) -> Text:
    """One line that explains glyphs, colours and numbers of the roles present."""
    present = [role for role in MEANINGS if any(node.role is role for node in nodes)]
    legend = Text()
    for role in present:
        style = BONUS_STYLE if role is Role.BONUS else TERMINAL_STYLES[role]
        legend.append(f"{GLYPHS[role]} {role}", style=style).append("   ")
    return legend.append("weight → path score", style="dim")


@dataclass(frozen=True)
class _Paint:
    strong: str  # badge of an accepted node, and text on the pale badge
    pale: str


PAINTS = {
    Role.ROOT: _Paint("#24292f", "#eaecef"),
    Role.LEAD: _Paint("#1f6feb", "#e3eefc"),
    Role.PROBE: _Paint("#bc5a00", "#fdecd8"),
    Role.FILL: _Paint("#656d76", "#eef0f2"),
    Role.BONUS: _Paint("#1a7f37", "#dff3e4"),
}
CHAR, SMALL_CHAR = 7.9, 6.5  # advance of a monospace character at 13 and 10.5 px, with a little to spare
BADGE, ROW, FAMILY, GAP = 22, 29, 7, 54  # badge height, row pitch, extra room after siblings, gap between levels, px
MARGIN, HEADER, LEAST_WIDTH = 28, 112, 890
NUMBERS = "numbers: weight → path score; for a probe proxy, sampling probability q~ → path score"

STYLE = """
.rheo-tree text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
.rheo-tree .number{font-size:10.5px;fill:#57606a}
.rheo-tree .level{font-size:10.5px;fill:#8c959f}
.rheo-tree .title{font-size:16px;font-weight:700;fill:#1f2328}
.rheo-tree .token{font-weight:600}
.rheo-tree .edge{fill:none;stroke:#c9d1d9;stroke-linecap:round}
.rheo-tree .edge.accepted{stroke:#24292f;stroke-width:3.2}
.rheo-tree .accepted .number{fill:#1f2328;font-weight:700}
""".strip()


def tree_svg(
    tree: DraftTree,
    text_of: TextOf,
    walk: VerifyResult | None = None,
    root_token: int | None = None,
    title: str | None = None,
) -> str:
    """The tree as one SVG document without scripts, links or fonts of its own; levels run from left to right.

    Args:
        tree, text_of, walk, root_token: as for ``tree_nodes``.
        title: the headline; None counts nodes and tokens.

    Returns:
        The document. Every node is a ``<g class="node ...">`` with ``data-row``, its role and, on the walk,
        ``accepted`` among its classes; edge widths show path scores; each node's tooltip spells out its numbers.
    """
    nodes = tree_nodes(tree, text_of, walk, root_token)
    levels = [*tree.depths, *([len(walk.token_ids)] if walk else [])]
    widths = [_badge_width(node) for node in nodes]
    left = _columns(levels, widths)
    middle = _rows(nodes)
    width = max(max(left[level] + size for level, size in zip(levels, widths, strict=True)) + MARGIN, LEAST_WIDTH)
    height = max(middle) + BADGE / 2 + MARGIN

    links = [(row, child) for row, node in enumerate(nodes) for child in node.children]
    links.sort(key=lambda link: nodes[link[1]].accepted)  # the accepted path is painted last, over the others
    edges = [
        _edge(left[levels[row]] + widths[row], middle[row], left[levels[child]], middle[child], nodes[child])
        for row, child in links
    ]
    badges = [
        _badge(row, node, left[levels[row]], middle[row], size)
        for row, (node, size) in enumerate(zip(nodes, widths, strict=True))
    ]
    headline = _headline(tree, walk) if title is None else title
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="rheo-tree" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(headline)}>',
            f"<style>{STYLE}</style>",
            '<rect width="100%" height="100%" rx="10" fill="#ffffff"/>',
            f'<text class="title" x="{MARGIN}" y="34">{escape(headline)}</text>',
            *_legend(nodes),
            *(
                f'<text class="level" x="{x:.1f}" y="{HEADER - 8}">{"root" if level == 0 else f"level {level}"}</text>'
                for level, x in enumerate(left)
            ),
            *edges,
            *badges,
            "</svg>",
            "",
        ]
    )


def _headline(tree: DraftTree, walk: VerifyResult | None) -> str:
    size = len(tree) - 1
    text = f"Draft tree of {size} node{'s' * (size != 1)}"
    if walk:
        text += f": {len(walk.accepted_nodes)} accepted, 1 bonus token"
    return text


def _badge_width(node: Node) -> float:
    numbers = SMALL_CHAR * len(node.numbers) + 13 if node.numbers else 0
    return CHAR * cell_len(node.label) + 16 + numbers


def _columns(levels: list[int], widths: list[float]) -> list[float]:
    """Left edge of every level's column, as wide as its widest badge."""
    left = [float(MARGIN)]
    for level in range(max(levels)):
        widest = max(size for at, size in zip(levels, widths, strict=True) if at == level)
        left.append(left[-1] + widest + GAP)
    return left


def _rows(nodes: list[Node]) -> list[float]:
    """Vertical centre of every node: leaves in schedule order one below the other, parents amid their children."""
    middle = [0.0] * len(nodes)
    free = HEADER + BADGE / 2

    def place(row: int) -> None:
        nonlocal free
        children = nodes[row].children
        for child in children:
            place(child)
        if children:
            middle[row] = (middle[children[0]] + middle[children[-1]]) / 2
            free += FAMILY
        else:
            middle[row] = free
            free += ROW

    place(0)
    return middle


def _edge(x0: float, y0: float, x1: float, y1: float, child: Node) -> str:
    bend = (x1 - x0) / 2
    if child.accepted:
        look = ' class="edge accepted"'
    else:
        look = f' class="edge" stroke-width="{0.8 + 2.4 * math.sqrt(child.score or 0):.2f}"'
    curve = f"M{x0:.1f},{y0:.1f} C{x0 + bend:.1f},{y0:.1f} {x1 - bend:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
    return f'<path{look} d="{curve}"/>'


def _badge(row: int, node: Node, x: float, middle: float, width: float) -> str:
    """The token on the role's colour, the numbers on a white inset."""
    paint = PAINTS[node.role]
    strong = node.accepted or node.role is Role.ROOT
    inset = x + CHAR * cell_len(node.label) + 16
    parts = [
        f'<g class="node {node.role}{" accepted" if node.accepted else ""}" data-row="{row}">',
        f"<title>{escape(_tooltip(node))}</title>",
        f'<rect x="{x:.1f}" y="{middle - BADGE / 2:.1f}" width="{width:.1f}" height="{BADGE}" rx="6" '
        f'fill="{paint.strong if strong else paint.pale}" stroke="{paint.strong}"/>',
        f'<text class="token" x="{x + 8:.1f}" y="{middle + 4.5:.1f}" '
        f'fill="{"#ffffff" if strong else paint.strong}">{escape(node.label)}</text>',
    ]
    if node.numbers:
        parts.append(
            f'<rect x="{inset:.1f}" y="{middle - BADGE / 2 + 2:.1f}" width="{x + width - inset - 2:.1f}" '
            f'height="{BADGE - 4}" rx="4" fill="#ffffff"/>'
            f'<text class="number" x="{inset + 6:.1f}" y="{middle + 3.8:.1f}">{escape(node.numbers)}</text>'
        )
    return "".join([*parts, "</g>"])


def _tooltip(node: Node) -> str:
    facts = [f"{node.role} “{node.label}”", f"token {node.token_id}" if node.token_id >= 0 else ""]
    if node.weight is not None:
        facts.append(f"{'proxy' if node.role is Role.PROBE else 'weight'} {node.weight:.6g}")
    if node.sampling is not None:
        facts.append(f"sampling probability {node.sampling:.6g}")
    if node.score is not None and node.role is not Role.ROOT:
        facts.append(f"path score {node.score:.6g}")
    if node.accepted and node.role not in (Role.ROOT, Role.BONUS):
        facts.append("accepted")
    return ", ".join(fact for fact in facts if fact)


def _legend(nodes: list[Node]) -> list[str]:
    x, y = float(MARGIN), 58
    parts = [f'<text class="level" x="{MARGIN}" y="{y + 20}">{NUMBERS}</text>']
    for role in (role for role in MEANINGS if any(node.role is role for node in nodes)):
        paint, text = PAINTS[role], MEANINGS[role]
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="3" '
            f'fill="{paint.pale}" stroke="{paint.strong}"/>'
            f'<text class="number" x="{x + 18:.1f}" y="{y}">{text}</text>'
        )
        x += 18 + SMALL_CHAR * len(text) + 18
    if any(node.accepted for node in nodes):
        parts.append(
            f'<path class="edge accepted" d="M{x:.1f},{y - 4} h20"/>'
            f'<text class="number" x="{x + 28:.1f}" y="{y}">accepted</text>'
        )
    return parts
