// Parts of the page as tabs: arrow keys, Home and End move, and the address names the open one.
const Tabs = (() => {
  const nav = document.getElementById("tabs");
  const tabs = [...nav.querySelectorAll("a")];
  const panels = tabs.map((tab) => document.querySelector(tab.getAttribute("href")));
  const open = (index, focus = false) => {
    tabs.forEach((tab, i) => { tab.setAttribute("aria-selected", i === index); tab.tabIndex = i === index ? 0 : -1; });
    panels.forEach((panel, i) => panel.classList.toggle("open", i === index));
    if (focus) tabs[index].focus();
    tabs[index].scrollIntoView({ block: "nearest", inline: "nearest" });
    window.page.draw();
  };
  // A link to a part inside a tab opens that tab.
  const follow = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const index = target ? panels.findIndex((panel) => panel.contains(target)) : 0;
    open(Math.max(0, index));
    if (target && !panels.includes(target)) target.scrollIntoView();
  };
  const show = (id) => { const index = panels.findIndex((panel) => panel.id === id || panel.querySelector(`#${id}`)); if (index >= 0) { history.replaceState(null, "", `#${id}`); open(index); } };
  nav.setAttribute("role", "tablist");
  tabs.forEach((tab, i) => {
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[i].id);
    panels[i].setAttribute("role", "tabpanel");
    tab.addEventListener("click", (event) => { event.preventDefault(); history.replaceState(null, "", tab.getAttribute("href")); open(i); });
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = (to + tabs.length) % tabs.length;
      history.replaceState(null, "", tabs[next].getAttribute("href"));
      open(next, true);
    });
  });
  document.body.classList.add("tabbed");
  addEventListener("hashchange", follow);
  return { follow, show };
})();
