// Marks tables of short cells, and tables that are wider than the page: see wide.css.
function mark() {
  for (const wrapper of document.querySelectorAll(".table-wrapper")) {
    const cells = [...wrapper.querySelectorAll("td")];
    const short = cells.every((cell) => cell.textContent.length < 48);
    wrapper.querySelector("table").classList.toggle("figures", short);
    wrapper.classList.toggle("scrolls", wrapper.scrollWidth > wrapper.clientWidth + 1);
  }
}
addEventListener("load", mark);
addEventListener("resize", mark);
