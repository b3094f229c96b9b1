"use strict";
// Draws every figure from the JSON beside it, in the page's colours, and again when these change.
(function () {
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = !window.matchMedia("(hover: hover)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };
  const theme = () => themes[dark.matches ? "dark" : "light"];
  const plots = [];

  for (const source of document.querySelectorAll("script[data-plot]")) {
    const place = document.getElementById(source.dataset.plot);
    const { data, layout } = JSON.parse(source.textContent);
    layout.template = theme();
    if (touch) layout.dragmode = false; // a finger on a figure scrolls the page
    place.style.height = layout.height + "px";
    Plotly.newPlot(place, data, layout, config);
    plots.push(place);
  }
  dark.addEventListener("change", () => {
    for (const place of plots) Plotly.relayout(place, { template: theme() });
  });
})();
