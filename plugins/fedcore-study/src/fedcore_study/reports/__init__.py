"""Runs as one page: gathered into charts, which plotly draws for the browser and matplotlib for papers.

``charts`` says what can be drawn, ``gather`` and ``samples`` make charts of runs, ``figures`` and ``static`` draw them,
``page`` puts the page together. What needs the extra ``fedcore[report]`` is imported by ``figures``, ``static`` and
``page`` alone.
"""
