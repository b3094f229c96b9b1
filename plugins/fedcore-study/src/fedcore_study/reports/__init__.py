"""Runs as one page: gathered into charts, which are SVG in the page and matplotlib's in files for papers.

``charts`` says what can be drawn, ``opening``, ``lines``, ``breakdowns`` and ``samples`` make charts of runs, ``svg``
and ``static`` draw them, ``build`` and ``page`` put the page together. ``static`` alone needs the extra ``report``.
"""
