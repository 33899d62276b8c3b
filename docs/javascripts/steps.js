// Pictures in steps: a range, two buttons, and the arrow keys of the range. Without this file a page shows every step.
(function () {
  function start(figure) {
    const steps = Array.from(figure.querySelectorAll(".step"));
    if (figure.classList.contains("live") || steps.length < 2) return;
    const controls = document.createElement("div");
    controls.className = "controls";
    controls.innerHTML =
      '<button type="button" aria-label="Previous step">←</button>' +
      '<input type="range" min="1" step="1" aria-label="Step of the picture">' +
      '<button type="button" aria-label="Next step">→</button>';
    const [back, range, next] = controls.children;
    range.max = steps.length;

    function show(number) {
      range.value = number;
      steps.forEach((step, i) => step.classList.toggle("now", i + 1 === number));
      range.setAttribute("aria-valuetext", steps[number - 1].querySelector("p").textContent);
      back.disabled = number === 1;
      next.disabled = number === steps.length;
    }
    range.addEventListener("input", () => show(Number(range.value)));
    back.addEventListener("click", () => show(Number(range.value) - 1));
    next.addEventListener("click", () => show(Number(range.value) + 1));
    figure.insertBefore(controls, figure.firstChild);
    figure.classList.add("live");
    show(1);
  }
  document.querySelectorAll("figure.steps").forEach(start);
})();
