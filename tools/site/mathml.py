r"""Formulas as MathML, made while the site is built: browsers show it without a script, readers hear it.

Arithmatex marks ``\(...\)`` and ``\[...\]``; what stands between is LaTeX.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL
)


def typeset(page: str) -> str:
    """Return HTML with every marked formula as MathML, its LaTeX kept for those who copy it."""

    def replaced(found: re.Match[str]) -> str:
        latex = html.unescape(found["latex"]).strip()
        display = "block" if found["open"] == "[" else "inline"
        made = convert(latex, display=display)
        return made.replace("<math ", f'<math alttext="{html.escape(latex, quote=True)}" ', 1)

    return MARKED.sub(replaced, page)
