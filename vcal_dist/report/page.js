// Draws the charts of the page: those in sight first, then the others one by one, so that printing finds all of them.
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const drawn = new Map(); // place -> {view, fits}
  const waiting = new Set(document.querySelectorAll(".chart"));

  // A chart in a closed fold has no width: it takes what it will have, as in the style sheet.
  const room = (place) => {
    if (place.clientWidth) return place.clientWidth;
    const whole = place.closest("section").querySelector(".blocks").clientWidth - 31;
    const parts = window.innerWidth <= 680 ? 1 : { half: 2, third: 3 }[place.parentElement.className] || 1;
    return Math.max(200, Math.floor((whole - 21 * (parts - 1)) / parts));
  };

  // Charts of several panels have as many side by side as there is room for.
  const arranged = (spec, width, flows) => {
    const panels = spec.spec ? [spec.spec] : spec.concat || spec.hconcat;
    if (panels && flows) {
      const aside = spec.facet && spec.resolve?.scale?.y !== "independent" ? 24 : 66; // axes between panels
      const most = spec.columns || panels.length;
      const columns = Math.max(1, Math.min(most, Math.floor((width - 40) / (panels[0].width + aside))));
      const each = Math.floor((width - 40) / columns) - aside;
      panels.forEach((panel) => (panel.width = Math.max(120, Math.min(440, each))));
      if (spec.hconcat) {
        spec.concat = spec.hconcat;
        delete spec.hconcat;
      }
      spec.columns = columns;
    }
    if (width < 420) spec.config.legend = { ...spec.config.legend, columns: 2 };
    if (typeof spec.height === "number" && spec.width === "container") {
      spec.height = Math.min(spec.height, Math.max(170, Math.round(0.62 * width)));
    }
    return spec;
  };

  const draw = async (place) => {
    if (!waiting.delete(place)) return;
    const width = room(place);
    const spec = arranged(specs[place.id], width, "flows" in place.dataset);
    const fits = spec.width === "container";
    if (fits) Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
    try {
      const { view } = await window.vegaEmbed(place, spec, {
        mode: "vega-lite",
        renderer: "svg",
        ast: true, // no code is made of texts
        tooltip: { theme: "report" },
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: place.dataset.name,
      });
      drawn.set(place, { view, fits });
      place.dataset.state = "drawn";
    } catch (error) {
      place.dataset.state = "failed";
      place.textContent = "This chart could not be drawn.";
      console.error(place.id, error);
    }
  };

  const fit = async (within) => {
    const wide = [...drawn].filter(([place, { fits }]) => fits && within.contains(place) && place.clientWidth);
    const changed = wide
      .map(([place, { view }]) => [view, place.clientWidth]) // all are measured before one changes
      .filter(([view, width]) => Math.abs(view.width() - width) > 4);
    for (const [view, width] of changed) await view.width(width).runAsync();
  };

  const idle = window.requestIdleCallback || ((work) => setTimeout(work, 20));
  const drawRest = async () => {
    for (const place of waiting) {
      await draw(place);
      return new Promise((done) => idle(() => drawRest().then(done)));
    }
    document.documentElement.dataset.drawn = drawn.size;
  };

  const inSight = new IntersectionObserver(
    (seen) => seen.forEach((entry) => entry.isIntersecting && draw(entry.target)),
    { rootMargin: "300px" },
  );
  waiting.forEach((place) => inSight.observe(place));
  document.querySelectorAll("details.fold").forEach((fold) => fold.addEventListener("toggle", () => fit(fold)));

  let later;
  window.addEventListener("resize", () => {
    clearTimeout(later);
    later = setTimeout(() => fit(document.body), 150);
  });

  // On paper nothing is folded.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")].filter((fold) => !fold.closest(".chart"));
    opened.forEach((fold) => (fold.open = true));
  });
  window.addEventListener("afterprint", () => opened.forEach((fold) => (fold.open = false)));

  // The table of contents shows where one is.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const here = new IntersectionObserver(
    (seen) =>
      seen.forEach((entry) => {
        if (!entry.isIntersecting) return;
        links.forEach((link) => link.removeAttribute("aria-current"));
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }),
    { rootMargin: "-10% 0px -80% 0px" },
  );
  document.querySelectorAll("main > section").forEach((section) => here.observe(section));

  setTimeout(drawRest, 50);
})();
