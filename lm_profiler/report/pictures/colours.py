"""One colour for each part of a step, the same in every plot, page and browser view.

From palettes made for colour-blind readers: five of Okabe & Ito's eight ("Color Universal Design", 2008; its black
vanishes on a dark page and its yellow on a white one), and for the two smallest phases the olive and the purple of
Paul Tol's "muted" and "bright" ("Colour Schemes", SRON/EPS/TN/09-002, issue 3.2, 2021). The order was chosen so that
parts that touch in a stack stay apart under protanopia, deuteranopia and tritanopia; a test holds it.
"""

from __future__ import annotations

PART_COLOURS = {
    "data": "#D55E00",  # Okabe-Ito vermillion
    "transfer": "#CC79A7",  # Okabe-Ito reddish purple
    "forward": "#0072B2",  # Okabe-Ito blue
    "zero_grad": "#999933",  # Tol muted olive
    "backward": "#56B4E9",  # Okabe-Ito sky blue
    "clip": "#AA3377",  # Tol bright purple
    "optimizer": "#E69F00",  # Okabe-Ito orange
    "other": "#888888",
}

SERIES_COLOURS = ("#44AA99", "#AA4499", "#CC6677", "#117733")
"""For lines that are not parts of a step (Tol muted teal, purple, rose, green): none means a phase. Markers tell
more of them apart."""

PALE = "#888888"
"""Shading, grids and what has no figure: readable on white and on dark."""

_MULTIPLY, _EACH, _ROWS, _MOVE = SERIES_COLOURS

KIND_LOOKS = {
    "matmul": (_MULTIPLY, ""),
    "attention": (_MULTIPLY, "/"),
    "elementwise": (_EACH, ""),
    "softmax": (_ROWS, ""),
    "normalization": (_ROWS, "/"),
    "reduction": (_ROWS, "x"),
    "copies": (_MOVE, ""),
    "host_copies": (_MOVE, "/"),
    "communication": (_MOVE, "x"),
    "other": (PALE, ""),
    "idle": (PALE, "/"),
}
"""Colour and hatching (as matplotlib and plotly name it) of what a kernel does, in the order of a stack: kinds that
work alike share a colour."""
