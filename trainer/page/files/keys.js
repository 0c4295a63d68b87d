// Keys of the page. None acts while a field is being filled in, or with a modifier held.

export function keys(app, panels) {
  const dialog = document.getElementById("keys");
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.closest?.("select, textarea, input:not([type=radio])")) return;
    const actions = {
      j: () => app.steps.move(1),
      k: () => app.steps.move(-1),
      n: () => app.moveGroup(1),
      p: () => app.moveGroup(-1),
      t: () => app.turnColour(),
      "?": () => dialog.showModal(),
    };
    const panel = /^[1-9]$/.test(event.key) ? panels[Number(event.key) - 1] : null;
    const action = actions[event.key] ?? (panel && (() => app.reveal(panel)));
    if (!action) return;
    event.preventDefault();
    action();
  });
}
