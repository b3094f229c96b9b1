"use strict";
// Shows the values of a figure's marks, which are their titles, beside the pointer or where a finger touched.
(function () {
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove(); // or the browser would show it, too
  }
  function show(event) {
    const mark = event.target.closest("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - 10;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  }
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
})();
