"""Render reports/README.md and the pages of reports/kernels and reports/profile: `python reports/render.py`.

Every row is one run; its folder holds the summary, the recipe, the environment and, for a calibration, the metrics.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import chdir
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import render_kernels
import render_patterns
import render_profile
import render_regrouped
import render_sweep
import yaml
from render_kernels import table

from widecli.report import plots
from widecli.report.find import find_runs
from widecli.report.flops import gross_and_net
from widecli.report.report import Report, build, html_page, markdown_page
from widecli.report.scaling import scaling_points
from widecli.report.scaling_view import scaling_table
from widecli.report.tables import markdown

HERE = Path(__file__).parent
PLAIN, ARTICLES, PATTERNS = "smollm2-h200", "smollm2-h200-articles", "smollm2-h200-patterns"
SWEEP, SCALING, OUTVOTED = "smollm2-h200-sweep", "scaling", "smollm2-h200-outvoted"
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
REGROUPED = "smollm2-h200-regrouped"
KERNELS = ("h200", "h200_decode")  # of the README's table, later ones last
GROSS = "prunable FLOPs skipped, gross, %"
HEAD = """# Measured results

Written by `reports/render.py` from the records in this folder; no figure is typed by hand. Each row names its runs:
`<folder>/calibrate-NAME` and `<folder>/eval-NAME` hold `summary.json`, `recipe.yaml` and `environment.json` (command,
versions, device), the calibration also `metrics.jsonl`. `page/` is the page, and some of the plots, that `wide report
reports/smollm2-h200-sweep reports/smollm2-h200-patterns reports/profile reports/scaling` makes of them.

A record made on a checkout with changes on top names the revision below them and `dirty`. The sweep and `scaling` ran
the code of 8ca0ab6; `kernels/h200_patterns` and the `late` runs at S = 50 % that of 4d7c123; the profile `ttft` that of
c1b18c1; `hf`, `patterns` and `smollm2` that of 6e40197; `tpot`, `tpot-library`, both sweeps of profiles and
`kernels/h200` that of 1ef91ae.

[`smollm2-h200-sweep`](smollm2-h200-sweep/README.md): sparsity 0.1 to 0.7 for groups and for whole parts, G from 16 to
512, and what LoRA adds to groups: `wide sweep smollm2_sparsity`, `smollm2_groups` and `smollm2_lora --modes wide`, as
`wide report` renders them.
"""
PLAIN_HEAD = """## SmolLM2-135M on one H200: what is kept

G = 64, one head group = 3 query heads, rank 32, 32 x 1024 tokens a step, perplexity windows of 2048. The text is public
(web pages, Stack Exchange, arXiv, Wikipedia, textbooks, speeches, books: 8.0M tokens) and holds nothing of WikiText-2.
`s50` is the best of three candidates by its training loss (the others: `s50-scaled`, `s50-scaled-6e-3`); its record
calls it `runs/calibrate-s50-bare`. Folder: `smollm2-h200`. FLOPs skipped are gross in the tables of this page: what
routers themselves cost is not subtracted. These records have no other figure; those of later versions have both.
"""
ARTICLES_HEAD = """## The same, repeated, and with WikiText-2's own training articles in the text

The runs named `wt-` add 118 articles of WikiText-2's train and validation splits (2.1 MB, about 6 % of the text; the
test split stays unseen). Perplexity on WikiText-2 depends on it far more than accuracy does. The other runs repeat the
ones above with the same recipe and seed: on a GPU the order of sums is not fixed, and this is how far runs then differ.
Folder: `smollm2-h200-articles`.
"""


def load(records: str, kind: str) -> dict[str, dict[str, Any]]:
    """Summaries of one command by run name."""
    found = {}
    for path in sorted((HERE / records).glob(f"{kind}-*/summary.json")):
        found[path.parent.name.removeprefix(f"{kind}-")] = json.loads(path.read_text())
    return found


def percent(value: float | None) -> str:
    """A fraction as percent."""
    return "" if value is None else f"{100 * value:.1f}"


def figure(value: float | None) -> str:
    """A perplexity."""
    return "" if value is None else f"{value:.2f}"


def quality(evals: dict[str, dict[str, Any]], runs: dict[str, dict[str, Any]]) -> str:
    """One row a run with tasks: what was skipped and what was kept."""
    rows = []
    for name, found in evals.items():
        if not found["tasks"]:
            continue
        skip, flops = found["skip_rate"] or {}, found["flops_skipped"] or {}
        run = runs.get(name.removesuffix("-400"), {})  # a second evaluation of one calibration
        limit = found["protocol"]["limit"]
        rows.append(
            [
                f"`{name}`",
                run.get("plan", {}).get("mode", "dense"),
                percent(run.get("budget", {}).get("sparsity")),
                str(found["steps"] or ""),
                percent(skip.get("attention")),
                percent(skip.get("ffn")),
                percent(gross_and_net(flops)[0]),
                figure(found["perplexity"].get("wikitext2/token_ppl")),
                figure(found["perplexity"].get("wikitext2@60/token_ppl")),
                percent(found["average"]),
                percent(found["retention"]),
                "all" if limit is None else str(limit),
            ]
        )
    head = ["run", "mode", "S, %", "steps", "attention skipped, %", "FFN skipped, %", GROSS]
    head += ["WikiText-2", "first 60 windows", "seven tasks, %", "kept, %", "items a task"]
    return table(head, rows)


def tasks(evals: dict[str, dict[str, Any]]) -> str:
    """Accuracy by task (acc_norm where the task has it)."""
    names = next(list(e["tasks"]) for e in evals.values() if e["tasks"])
    rows = []
    for name, found in evals.items():
        if found["tasks"]:
            values = [found["tasks"][t].get("acc_norm,none", found["tasks"][t]["acc,none"]) for t in names]
            rows.append([f"`{name}`", *map(percent, values)])
    return table(["run", *names], rows)


def starts(evals: dict[str, dict[str, Any]], runs: dict[str, dict[str, Any]]) -> str:
    """Perplexity by start and steps, mean and spread over the seeds."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, run in runs.items():
        recipe = run["settings"]
        if name in evals and run["plan"]["mode"] == "wide" and run["budget"]["sparsity"] == 0.5:
            key = (recipe["warm_start"], recipe["scale_features"], recipe["learning_rate"], run["steps"])
            groups[key].append(name)
    rows = []
    for key in sorted(groups, key=lambda k: (k[3], str(k))):
        values = [evals[n]["perplexity"]["wikitext2@60/token_ppl"] for n in groups[key]]
        whole = [evals[n]["perplexity"]["wikitext2/token_ppl"] for n in groups[key]]
        skip = [evals[n]["skip_rate"]["mean"] for n in groups[key]]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        start, scaled, rate, steps = key
        temperature = runs[groups[key][0]]["settings"]["temperature_start"]
        rows.append(
            [
                f"{start}, {'scaled' if scaled else 'bare'} features, lr {rate:g}, temperature {temperature:g}",
                str(steps),
                str(len(values)),
                f"{mean(values):.2f}{spread}",
                f"{mean(whole):.2f}",
                percent(mean(skip)),
                ", ".join(f"`{n}`" for n in groups[key]),
            ]
        )
    return table(["start", "steps", "seeds", "first 60 windows", "WikiText-2", "skipped, %", "runs"], rows)


def speed() -> str:
    """Training speed: all documents of `python -m widecli.train.speed` here, as `wide report` shows them."""
    return markdown(scaling_table(scaling_points(find_runs([HERE]).documents))).removeprefix("#")  # a section


def settings(name: str) -> dict[str, Any]:
    """The few recipe values that the tables group by, from the run's own recipe."""
    import yaml

    recipe = yaml.safe_load((HERE / PLAIN / f"calibrate-{name}" / "recipe.yaml").read_text())
    train = recipe["train"]
    return {
        "warm_start": recipe["routing"]["warm_start"],
        "scale_features": train["scale_features"],
        "learning_rate": train["learning_rate"],
        "temperature_start": train["temperature_start"],
    }


def regrouped_recipe(name: str) -> dict[str, Any]:
    """The recipe of one of those runs."""
    return recipe_at(HERE / REGROUPED / f"calibrate-{name}" / "recipe.yaml")


def recipe_at(path: Path) -> dict[str, Any]:
    """A stored recipe as it stands."""
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    return recipe


def short(records: str, names: tuple[str, ...], text: str) -> list[list[str]]:
    """Rows for the project's README: runs with tasks, few columns."""
    evals, runs = load(records, "eval"), load(records, "calibrate")
    rows = []
    for name in names:
        found = evals[name]
        skip, flops = found["skip_rate"] or {}, found["flops_skipped"] or {}
        limit = found["protocol"]["limit"]
        label = "dense"
        if name in runs:
            target = percent(runs[name]["budget"]["sparsity"])
            label = f"{runs[name]['plan']['mode']}, S = {target} %, {found['steps']} steps{text}"
        rows.append(
            [
                label,
                f"`{name}`",
                percent(skip.get("attention")),
                percent(skip.get("ffn")),
                percent(gross_and_net(flops)[0]),
                figure(found["perplexity"]["wikitext2/token_ppl"]),
                f"{percent(found['average'])} ({'all' if limit is None else limit})",
                percent(found["retention"]),
            ]
        )
    return rows


def paper_table() -> str:
    """The paper's form and its rivals, few columns."""
    head = ["model", "run", "attention skipped, %", "FFN skipped, %", "prunable FLOPs skipped, %", "WikiText-2"]
    rows = short(PLAIN, ("dense", "s25", "s50", "dense-400", "s50-1000", "s50-token", "s50-layer"), "")
    rows += short(ARTICLES, ("wt-s25", "wt-s50", "wt-s50-1000"), ", WikiText-2 articles in the text")
    return table([*head, "seven tasks, % (items a task)", "kept, %"], rows)


def insert(path: Path, mark: str, text: str) -> None:
    """Put `text` between the two marks of that name that a document has for it."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}{end}{after}")


def write_pages() -> None:
    """What `wide report` makes of the records here: the sweep's tables, and the page and the README's plot in `page`.

    Without matplotlib the plot stays as it is.
    """
    with chdir(HERE.parent):  # paths in the page are as seen from there
        everything = (SWEEP, PATTERNS, REGROUPED, "profile", SCALING)
        sweep, whole = (build([f"reports/{name}" for name in names]) for names in ((SWEEP,), everything))
    (HERE / SWEEP / "README.md").write_text(markdown_page(sweep))
    (HERE / "page" / "index.html").write_text(html_page(whole))
    draw_first(whole, "pareto-smollm2-135m-perplexity-wikitext2-60-flops-gross", "pareto.png")


def draw_first(report: Report, name: str, picture: str) -> None:
    """The first plot whose name begins with `name`, where matplotlib is installed."""
    chart = next(chart for chart in report.charts() if chart.name.startswith(name))
    if plots.available():
        (HERE / "page" / picture).write_bytes(plots.draw(chart, "png"))


def main() -> None:
    """Write README.md here, all pages below, and the tables of the project's README and documentation."""
    evals, runs = load(PLAIN, "eval"), load(PLAIN, "calibrate")
    for name, run in runs.items():
        run["settings"] = settings(name)
    again = load(ARTICLES, "eval")
    parts = [
        HEAD,
        PLAIN_HEAD,
        quality(evals, runs),
        ARTICLES_HEAD,
        quality(again, load(ARTICLES, "calibrate")),
        render_regrouped.HEAD,
        render_regrouped.finished(load(REGROUPED, "eval"), load(REGROUPED, "calibrate"), regrouped_recipe),
        render_regrouped.SECOND_HEAD,
        render_regrouped.second(
            HERE / REGROUPED / "second", recipe_at, regrouped_recipe("distill-fast-compensation-lr4e-3")
        ),
        render_regrouped.SEARCH_HEAD,
        render_regrouped.search(HERE / REGROUPED / "search.json"),
        render_regrouped.CUT_HEAD,
        render_regrouped.cut_off(HERE / REGROUPED / "cut-off"),
        render_patterns.HEAD,
        render_patterns.quality(load(PATTERNS, "eval") | load(OUTVOTED, "eval")),
        render_patterns.PICTURE,
        "\n## By task, %\n",
        tasks(evals),
        tasks(again),
        "\n## The start of the routers, S = 0.5\n",
        starts(evals, runs),
        "",
        speed(),
    ]
    (HERE / "README.md").write_text("\n".join(parts))
    regrouped = render_regrouped.short(HERE / REGROUPED, evals["s50"])
    insert(README, "regrouped", regrouped)
    insert(DOCS / "evaluation.md", "regrouped", regrouped)
    insert(DOCS / "evaluation.md", "results", paper_table())
    insert(DOCS / "sweeps.md", "sweep", render_sweep.sweep(HERE / SWEEP))
    insert(DOCS / "training.md", "scaling", render_sweep.scaling(HERE / SCALING))
    write_pages()
    render_kernels.render(HERE / "kernels")
    records = [json.loads((HERE / "kernels" / f"{name}.json").read_text()) for name in KERNELS]
    insert(DOCS / "operators.md", "kernels", render_kernels.short(*records))
    if profiles := render_profile.render(HERE / "profile"):
        insert(DOCS / "profiling.md", "profile", render_profile.short(profiles))
        insert(README, "speed", render_profile.headline(profiles))


if __name__ == "__main__":
    main()
