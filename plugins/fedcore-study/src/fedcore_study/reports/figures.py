"""Charts as plotly figures. Texts from files are escaped here: plotly reads tags in every text that it draws."""

from __future__ import annotations

import functools
import html
import math
from typing import Any

import plotly.graph_objects as go

from fedcore_study.reports.charts import Bars, Box, Boxes, Chart, Curves, Heatmap, Line, Scatter, legible, plain
from fedcore_study.reports.palette import DASHES, MARKERS, SCALES, color, translucent, turn

PLAIN_HEIGHT = 380
_FEW = 12  # entries of a legend that help more than they hide


@functools.singledispatch
def figure(chart: Chart) -> go.Figure:
    """Draw a chart; its colours of text, lines and paper are the page's, by its template."""
    raise TypeError(f"no way to draw {type(chart).__name__}")


def themes() -> dict[str, dict[str, Any]]:
    """Return a template for a light and one for a dark page."""
    return {
        name: _template(ink, faint, SCALES[name])
        for name, ink, faint in (("light", "#1d2530", "#dde2e8"), ("dark", "#dce3ea", "#333c47"))
    }


@figure.register
def _(chart: Curves) -> go.Figure:
    drawn = go.Figure()
    for line, covers in zip(chart.lines, chart.covers, strict=True):
        # What lies on others lets them be seen: gaps in a thinner line, rings for points.
        dash = DASHES[(turn(line.color) + covers) % len(DASHES)]
        style = {"color": color(line.color), "dash": dash, "width": 2 if not covers else 1.5}
        name = _text(line.label)
        common = {"legendgroup": name, "name": name}
        low, up = line.band(chart.log)
        if len(low) > 1:
            drawn.add_scatter(
                x=[*line.x, *reversed(line.x)],
                y=[*up, *reversed(low)],
                fill="toself",
                fillcolor=translucent(line.color, 0.18),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                **common,
            )
        drawn.add_scatter(  # without points, too: it names the tails in the legend
            x=line.x,
            y=line.y,
            mode="lines+markers" if len(line.x) <= 30 else "lines",
            line=style,
            marker={"size": 5} if not covers else {"size": 7 + 2 * covers, "symbol": "circle-open"},
            customdata=_hover(line),
            hovertemplate="%{y:.4g}%{customdata}" + ("" if chart.rounds else " at %{x:.4g}"),
            **common,
        )
        for xs, ys in line.tails:
            drawn.add_scatter(
                x=xs,
                y=ys,
                mode="lines",
                line={**style, "dash": "dot", "width": 1.2},
                hovertemplate="%{y:.4g}, one run",
                showlegend=False,
                **common,
            )
    drawn.update_layout(hovermode="x unified" if chart.rounds else "closest", **_frame(chart.x_title, chart.y_title))
    last = max((x for line in chart.lines for xs in (line.x, *(xs for xs, _ in line.tails)) for x in xs), default=0)
    if chart.rounds and last <= 8:  # else the browser chooses, and chooses whole rounds
        drawn.update_xaxes(dtick=1)
    if chart.log:
        drawn.update_yaxes(type="log", exponentformat="power", dtick=1)
    return drawn


@figure.register
def _(chart: Boxes) -> go.Figure:
    drawn = go.Figure()
    for box in chart.boxes:
        name = _text(legible([box.label])[0])
        common = {"name": name, "marker": {"color": color(box.color), "size": 5, "opacity": 0.7}, "showlegend": False}
        if box.quantiles is None:
            drawn.add_box(
                y=box.values,
                text=[_text(n) for n in box.names],
                boxpoints="all" if len(box.values) <= 500 else "outliers",
                jitter=0.4,
                pointpos=0,
                hovertemplate="%{y:.4g}<br>%{text}",
                hoveron="points",
                **common,
            )
        else:
            _quantile_box(drawn, box, common)
    drawn.update_layout(**_frame("", chart.y_title))
    return drawn


def _quantile_box(drawn: go.Figure, box: Box, common: dict[str, Any]) -> None:
    assert box.quantiles is not None
    lowest, _, q1, median, q3, _, highest = box.quantiles
    drawn.add_box(
        q1=[q1], median=[median], q3=[q3], lowerfence=[lowest], upperfence=[highest], x=[common["name"]], **common
    )


@figure.register
def _(chart: Heatmap) -> go.Figure:
    drawn = go.Figure()
    for number, grid in enumerate(chart.layers.values()):
        drawn.add_heatmap(
            z=[[chart.shade(value) for value in row] for row in grid],
            x=list(range(len(chart.columns))),
            y=list(range(len(chart.rows))),
            customdata=[
                [
                    f"{_text(chart.y_title)} {_text(row_name)}, {_text(chart.x_title)} {_text(column)}"
                    for column in chart.columns
                ]
                for row_name in chart.rows
            ],
            text=[[chart.written(value) for value in row] for row in grid],
            texttemplate="%{text}" if chart.roomy else None,
            hovertemplate=f"%{{customdata}}<br>%{{text}} {chart.unit}<extra></extra>",
            coloraxis="coloraxis",
            xgap=1 if len(chart.columns) <= 60 else 0,
            ygap=1 if len(chart.rows) <= 60 else 0,
            visible=number == 0,
        )
    ticks = chart.ticks or []
    drawn.update_layout(
        **_frame(chart.x_title, chart.y_title, max(220, min(900, 150 + 30 * len(chart.rows)))),
        coloraxis={
            "cmin": chart.scale[0],
            "cmax": chart.scale[1],
            "showscale": not chart.roomy,
            "colorbar": {
                "thickness": 10,
                "tickvals": [chart.shade(tick) for tick in ticks] or None,
                "ticktext": [f"{tick:.0f}" for tick in ticks] or None,
            },
        },
    )
    drawn.update_xaxes(showgrid=False, zeroline=False, **_names(chart.columns, 30))
    drawn.update_yaxes(showgrid=False, zeroline=False, autorange="reversed", **_names(chart.rows, 60))
    if len(chart.layers) > 1:
        buttons = [
            {
                "label": _text(label),
                "method": "restyle",
                "args": [{"visible": [i == n for i in range(len(chart.layers))]}],
            }
            for n, label in enumerate(chart.layers)
        ]
        drawn.update_layout(
            updatemenus=[
                {"buttons": buttons, "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 6}}
            ],
            margin_t=56,
        )
    return drawn


@figure.register
def _(chart: Bars) -> go.Figure:
    drawn = go.Figure()
    for number, part in enumerate(chart.parts):
        drawn.add_bar(
            x=part.values,
            y=list(range(len(chart.bars))),
            orientation="h",
            name=_text(part.label),
            marker={"color": color(number), "line": {"width": 0}},
            hovertemplate="%{x:.4g}",
            showlegend=True,
        )
    drawn.update_layout(
        barmode="stack",
        hovermode="y unified",
        **_frame(chart.x_title, "", 170 + 32 * len(chart.bars)),
    )
    drawn.update_yaxes(showgrid=False, autorange="reversed", **_names(chart.bars, 60))
    return drawn


@figure.register
def _(chart: Scatter) -> go.Figure:
    drawn = go.Figure()
    for number, group in enumerate(chart.groups):
        name = _text(legible([group.label], 16)[0])
        drawn.add_scatter(
            x=group.x,
            y=group.y,
            mode="markers",
            name=name,
            marker={"color": color(number), "symbol": MARKERS[turn(number) % len(MARKERS)], "size": 6, "opacity": 0.85},
            hovertemplate="%{fullData.name}<extra></extra>",
            showlegend=len(chart.groups) <= _FEW,
        )
    drawn.update_layout(**_frame("", ""))
    for axes in (drawn.update_xaxes, drawn.update_yaxes):
        axes(visible=False)
    return drawn


def _frame(x_title: str, y_title: str, height: int = PLAIN_HEIGHT) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 30, "b": 8},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0,
            "x": 0,
            "traceorder": "normal",
        },
        "xaxis": {"title": {"text": _text(x_title), "standoff": 6}, "automargin": True},
        "yaxis": {"title": {"text": _text(y_title), "standoff": 6}, "automargin": True},
        "dragmode": "zoom",
    }


def _template(ink: str, faint: str, scale: tuple[str, ...]) -> dict[str, Any]:
    axis = {"gridcolor": faint, "linecolor": faint, "zerolinecolor": faint, "ticks": ""}
    shades = [[i / (len(scale) - 1), shade] for i, shade in enumerate(scale)]
    return {
        "layout": {
            "font": {"color": ink, "family": "system-ui, sans-serif", "size": 13},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "coloraxis": {"colorscale": shades},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8a94a0", "activecolor": ink},
            "hoverlabel": {"bgcolor": scale[0], "bordercolor": faint, "font": {"color": ink}},
            "updatemenudefaults": {"bgcolor": scale[0], "bordercolor": faint, "font": {"color": ink}},
        }
    }


def _names(names: list[str], most: int) -> dict[str, Any]:
    """Name the ticks of an axis of numbered places; of many every so-manieth."""
    step = max(1, math.ceil(len(names) / most))
    short = legible(names, 24)
    return {"tickvals": list(range(0, len(names), step)), "ticktext": [_text(name) for name in short[::step]]}


def _hover(line: Line) -> list[str]:
    seeds = f", {line.runs} seeds" if line.runs > 1 else ""
    return [f" ± {s:.2g}{seeds}" for s in line.std] or [seeds] * len(line.x)


def _text(value: str) -> str:
    return html.escape(plain(value), quote=False)
