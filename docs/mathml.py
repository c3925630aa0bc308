"""Build hook of the site: formulas become MathML when the pages are built.

Browsers draw MathML themselves, so the pages need no script, no font and no network. In the sources formulas stand
between dollar signs; ``pymdownx.arithmatex`` finds them, and this hook translates what it found.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def to_mathml(match: re.Match[str]) -> str:
    """The MathML of one formula found by ``FORMULA``."""
    display = "inline" if match["kind"] == "(" else "block"
    formula = convert(html.unescape(match["latex"]).strip(), display=display)
    return formula if display == "inline" else f'<div class="formula">{formula}</div>'


def on_page_content(page_html: str, page: Any, **_: Any) -> str:
    """Translate every formula of a page; one that is left untranslated is an error."""
    translated = FORMULA.sub(to_mathml, page_html)
    if "arithmatex" in translated:
        raise ValueError(f"{page.file.src_uri}: a formula was not translated to MathML")
    return translated
