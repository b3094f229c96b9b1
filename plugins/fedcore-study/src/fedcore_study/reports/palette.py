"""Colours of rows, parts and classes, legible on white and on black; and what tells more of them apart."""

from __future__ import annotations

COLORS = (
    "#3b82c4",
    "#e07b22",
    "#3a9d5d",
    "#d9534f",
    "#9467d8",
    "#1fa3a3",
    "#a0724e",
    "#d463a6",
    "#808a94",
    "#9a9d2a",
)
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "x", "triangle-up", "star")

SCALES = {
    "light": ("#f4f6f9", "#9cc3e6", "#3b82c4", "#1c4f86", "#0b2547"),
    "dark": ("#1c222b", "#1f4e79", "#3b82c4", "#8fc0ea", "#e3f0fc"),
}
"""Shades of numbers from none to the largest, on a light and on a dark page."""


def color(number: int) -> str:
    """Return the colour of a row's, part's or class's number."""
    return COLORS[number % len(COLORS)]


def turn(number: int) -> int:
    """Return how often the colours have been gone through: the number of a dash or a marker."""
    return number // len(COLORS)


def translucent(number: int, opacity: float) -> str:
    """Return a colour as ``rgba(...)``."""
    text = color(number)
    channels = (int(text[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({','.join(map(str, channels))},{opacity})"
