"""The page: nothing but itself, and, in a headless browser where there is one, hover and sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stored_runs import write_pair
from widecli.report.heatmap import HeatMap
from widecli.report.html import Section, page
from widecli.report.report import build, html_page
from widecli.report.tables import Column, Table

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

# Runs inside the page: hovers a point and a heat map's cell, sorts, switches the theme, and says what came of it.
PROBE = """
<script>
const said = { errors: window.wideErrors };
const move = (target, x, y) => target.dispatchEvent(
  new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
const tip = document.getElementById("tip");
const mark = document.querySelector("figure .mark[data-tip]");
said.hidden = getComputedStyle(tip).display;
move(mark, 50, 50);
said.tip = tip.textContent;
said.shown = getComputedStyle(tip).display;
const heat = document.querySelector("svg.heat");
if (heat) {
  const box = heat.querySelector("rect").getBoundingClientRect();
  move(heat, box.x + box.width / 2, box.y + box.height / 2);
  said.heat = tip.textContent;
}
const table = document.querySelector("table");
const head = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.startsWith("perplexity"));
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[head].dataset.v);
if (head >= 0) {
  table.tHead.rows[0].cells[head].querySelector("button").click();
  said.up = column();
  table.tHead.rows[0].cells[head].querySelector("button").click();
  said.down = column();
}
const ground = () => getComputedStyle(document.body).backgroundColor;
const before = ground();
document.querySelector("button.theme").click();
said.themes = [before, ground()];
said.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
document.body.textContent = "PROBE" + JSON.stringify(said) + "END";
</script>
"""


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.seen


def in_browser(text: str, folder: Path) -> dict[str, object]:
    if BROWSER is None:
        pytest.skip("no chromium here to open the page with")
    early = '<script>window.wideErrors = []; addEventListener("error", (e) => wideErrors.push(e.message));</script>'
    path = folder / "page.html"
    path.write_text(text.replace("<style>", f"{early}<style>", 1).replace("</body>", f"{PROBE}</body>"))
    switches = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    done = subprocess.run(
        [
            *(BROWSER, *switches.split(), "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"PROBE(.*)END", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert isinstance(said, dict)
    return said


def test_the_page_names_nothing_outside_itself(runs: Path) -> None:
    text = html_page(build([runs]))
    for tag, attributes in tags(text):
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, value)
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    (policy,) = [a["content"] for t, a in tags(text) if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")


def test_every_figure_leads_to_its_runs(runs: Path) -> None:
    seen = tags(html_page(build([runs])))
    anchors = {a["id"] for tag, a in seen if tag == "tr" and "id" in a}
    links = {str(a["href"])[1:] for tag, a in seen if tag == "a"}
    assert links and links <= anchors
    assert {"run-eval-dense", "run-eval-s50-seed2", "run-profile-s25"} <= anchors
    tips = [str(a["data-tip"]) for _, a in seen if "data-tip" in a]
    assert tips and all("run: " in tip or "runs: " in tip or "published" in tip for tip in tips)


def test_every_cell_knows_its_head_which_narrow_pages_show_beside_it(runs: Path) -> None:
    columns = (Column("a", 'head\n"one"'), Column("b", "b", "figure"))
    text = page("t", "l", [Section("s", (Table("n", "n", columns, ({"a": "x", "b": 1.0}, {"a": "y"})),))])
    cells = [attributes.get("data-h") for tag, attributes in tags(text) if tag == "td"]
    assert cells == ['head "one"', "b"] * 2
    assert all("data-h" in attributes for tag, attributes in tags(html_page(build([runs]))) if tag == "td")
    assert "content: attr(data-h)" in text


def test_names_from_runs_cannot_become_markup(tmp_path: Path) -> None:
    write_pair(tmp_path, "x", perplexity=30.0, model='<script>alert("1")</script>&')
    text = html_page(build([tmp_path]))
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    heat = HeatMap("h", "t", "x", "y", "v", ("0",), ("</script><b>",), [[0.5]], columns_vertical=True)
    shown = page("t", "l", [Section("s", (heat,))])
    assert [tag for tag, _ in tags(shown)].count("b") == 0
    stored = re.search(r'<script type="application/json">(.*?)</script>', shown)
    assert stored and json.loads(stored[1])["columns"] == ["</script><b>"]


def test_in_a_browser_it_loads_without_error_or_request_and_hover_sort_and_theme_work(
    runs: Path, tmp_path: Path
) -> None:
    said = in_browser(html_page(build([runs])), tmp_path)
    assert said["errors"] == [] and said["loaded"] == []
    assert said["hidden"] == "none" and said["shown"] == "block"
    assert str(said["tip"]).startswith("dense") and "run: eval-dense" in str(said["tip"])
    up = [float(value) for value in said["up"]]  # type: ignore[attr-defined]
    assert up == sorted(up) == [20.0, 24.0, 53.0, 200.0]
    assert said["down"] == said["up"][::-1]  # type: ignore[index]
    assert len(set(said["themes"])) == 2  # type: ignore[call-overload]


def test_in_a_browser_a_heat_maps_cell_says_its_value(tmp_path: Path) -> None:
    heat = HeatMap("h", "t", "token", "layer", "share", ("7", "8"), ("the", "fox"), [[0.25, 1.0], [0.0, None]])
    table = Table("n", "n", (Column("a", "a"),), ({"a": "x"},))
    text = page("t", "l", [Section("s", (heat, table))])
    said = in_browser(
        text.replace("</section>", '<figure><svg><g class="mark" data-tip="m"></g></svg></figure></section>'), tmp_path
    )
    assert said["errors"] == [] and said["heat"] == "layer 7, token the\nshare: 0.25"
