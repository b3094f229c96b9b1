"""A page about runs. Its charts are SVG; matplotlib draws the same charts as files for papers.

``charts`` has the kinds of charts. ``opening``, ``lines``, ``breakdowns`` and ``samples`` make charts of runs, ``svg``
and ``static`` draw them, ``build`` and ``page`` make the page. Only ``static`` needs the extra ``report``.
"""
