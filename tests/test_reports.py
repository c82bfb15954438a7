"""`report`, `leaderboard`, `compare` over run directories: numbers, forms, bad input, and the page in a browser."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, browser_program
from PIL import Image
from report_runs import make_run

from rl_training.cli import main
from rl_training.experiment.run.stats import difference, improvement, interval, iqm
from rl_training.reports import analysis, svg
from rl_training.reports.page import page as make_page
from rl_training.reports.svg import short, ticks

GOOD = {0: 500.0, 1: 490.0, 2: 470.0, 3: 500.0, 4: 480.0}
POOR = {0: 100.0, 1: 150.0, 2: 90.0, 3: 200.0, 4: 120.0}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return run


def bad(result: tuple[int, str, str], *words: str) -> None:
    status, out, err = result
    assert status == 2, result
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0], err


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_report_of_a_study(cli: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", GOOD)
    status, out, err = cli("report", run, "--json")
    assert (status, err) == (0, "")
    data = json.loads(out)
    (env,) = data["environments"]
    (group,) = env["groups"]
    scores = list(GOOD.values())
    assert (env["env_id"], group["name"], group["steps"]) == ("CartPole-v1", "dqn", 5000)
    assert [row["value"] for row in group["scores"]] == scores
    assert group["iqm"] == {"value": iqm(scores), "ci95": pytest.approx(interval([scores]))}
    assert group["mean"]["value"] == pytest.approx(np.mean(scores))
    assert group["median"]["value"] == 490.0
    normalised = (np.array(scores) - 22) / (500 - 22)
    assert group["optimality_gap"]["value"] == pytest.approx(np.mean(1 - normalised))
    assert group["curve"]["steps"] == [1000, 2000, 3000, 4000, 5000]
    assert group["curve"]["iqm"][-1] == pytest.approx(iqm(scores))
    assert group["curve"]["low"][-1] <= iqm(scores) <= group["curve"]["high"][-1]
    assert group["clock"]["seconds"][-1] == pytest.approx(5000 / 500)
    assert group["wall_time_s"] == 10.0


def test_seeds_of_separate_runs_are_pooled(tmp_path: Path) -> None:
    make_run(tmp_path / "study", "all", GOOD)
    for seed, score in GOOD.items():
        make_run(tmp_path / "single", f"seed{seed}", {seed: score})
    study, single = (analysis.report([tmp_path / name])["environments"][0]["groups"] for name in ("study", "single"))
    assert len(single) == 1
    assert len(single[0]["runs"]) == 5
    for key in ("name", "scores", "iqm", "mean", "curve"):
        assert single[0][key] == study[0][key], key


def test_runs_with_other_settings_form_another_group(tmp_path: Path) -> None:
    make_run(tmp_path, "a", GOOD)
    make_run(tmp_path, "b", POOR, gamma=0.5)
    groups = analysis.report([tmp_path])["environments"][0]["groups"]
    assert [group["name"] for group in groups] == ["dqn (gamma=0.99)", "dqn (gamma=0.5)"]  # best first


def test_a_seed_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path, "new", {0: 7.0, 1: 8.0}, time=1.8e9)
    make_run(tmp_path, "old", {0: 1.0}, time=1.7e9)
    told: list[str] = []
    (group,) = analysis.report([tmp_path], warn=told.append)["environments"][0]["groups"]
    assert [row["value"] for row in group["scores"]] == [7.0, 8.0]
    assert len(told) == 1
    assert "twice" in told[0]


def test_scores_are_interpolated_between_evaluations(tmp_path: Path) -> None:
    make_run(tmp_path, "a", {0: 100.0}, start=0.0)
    make_run(tmp_path, "b", {1: 100.0}, start=0.0, steps=[2500, 5000])
    (group,) = analysis.report([tmp_path], at=2500)["environments"][0]["groups"]
    assert [row["value"] for row in group["scores"]] == [40.0, 50.0]
    (group,) = analysis.report([tmp_path])["environments"][0]["groups"]
    curve = group["curve"]
    assert (curve["steps"][0], curve["steps"][-1]) == (2500, 5000)
    assert np.allclose(curve["iqm"], np.array(curve["steps"]) / 50)  # both rise in a straight line


def test_wall_time_leaves_out_interruptions(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", {0: 100.0})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[-4:]:
        line["time"] += 86_400.0  # resumed a day later
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = analysis.report([run])["environments"][0]["groups"]
    assert group["wall_time_s"] == 10.0


def test_a_seed_that_ended_early_keeps_its_last_score_on_the_clock(tmp_path: Path) -> None:
    make_run(tmp_path, "fast", {0: 100.0}, speed=5000.0)
    make_run(tmp_path, "slow", {1: 300.0}, speed=500.0)
    (group,) = analysis.report([tmp_path])["environments"][0]["groups"]
    clock = group["clock"]
    assert (clock["seconds"][0], clock["seconds"][-1]) == (2.0, 10.0)
    assert set(clock["per_seed"][0]) == {100.0}  # it had ended after one second
    assert clock["iqm"][-1] == 200.0


def test_run_with_one_evaluation_shows_its_training_return(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", GOOD)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if "eval/mean_reward" not in line or line["step"] == 5000]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (group,) = analysis.report([run])["environments"][0]["groups"]
    assert group["curve"]["metric"] == "rollout/ep_rew_mean"
    assert len(group["curve"]["steps"]) == 5
    assert group["iqm"]["value"] == pytest.approx(490.0)


def test_one_seed_has_no_interval(cli: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", {3: 100.0})
    data = json.loads(cli("report", run, "--json")[1])
    group = data["environments"][0]["groups"][0]
    assert group["iqm"]["ci95"] is None
    assert group["curve"]["low"] is None
    assert "A single seed has no interval" in cli("report", run)[1]


def test_few_seeds_are_dots_and_many_a_band_within_the_possible_range(cli: Any, tmp_path: Path) -> None:
    """Three seeds of CartPole: Student's interval would reach from -336 to 846."""
    make_run(tmp_path, "few", {0: 24.0, 1: 241.0, 2: 500.0})
    make_run(tmp_path, "many", {seed: 490.0 + seed for seed in range(6)}, algo="ppo")
    data = analysis.report([tmp_path])
    groups = {group["algo"]: group for group in data["environments"][0]["groups"]}
    assert groups["dqn"]["iqm"]["ci95"] == groups["dqn"]["mean"]["ci95"] == [0.0, 500.0]
    assert groups["dqn"]["curve"]["low"] is groups["dqn"]["curve"]["high"] is None
    assert max(groups["ppo"]["curve"]["high"]) <= 500.0
    page = make_page(data, "test")
    curves = page[page.index("Sample efficiency") : page.index("Wall-clock time")]
    assert curves.count("class='band'") + curves.count('class="band"') == 1
    assert curves.count('class="dot"') == 3 * 5
    scores = page[page.index("<h3>Scores") : page.index("Performance profile")]
    assert scores.count('class="reach"') == 1


def test_normalised_over_environments(tmp_path: Path) -> None:
    for algo, scores in (("dqn", GOOD), ("ppo", POOR)):
        make_run(tmp_path, f"{algo}c", scores, algo=algo)
        make_run(tmp_path, f"{algo}p", {s: v - 1000 for s, v in scores.items()}, algo=algo, env_id="Pendulum-v1")
    make_run(tmp_path, "extra", GOOD, algo="sac", env_id="Pendulum-v1")
    data = analysis.report([tmp_path], normalize=True)
    overall = data["overall"]
    assert [group["name"] for group in overall["groups"]] == ["dqn", "ppo"]
    assert overall["left_out"] == ["sac"]
    cart, pendulum = (np.array(list(GOOD.values())) + shift for shift in (0, -1000))
    strata = [(cart - 22) / 478, (pendulum + 1200) / (1200 - 151)]
    best = overall["groups"][0]
    assert best["iqm"]["value"] == pytest.approx(iqm(np.concatenate(strata)))
    assert best["iqm"]["ci95"] == pytest.approx(interval(strata))
    certain = improvement([[0] * 5] * 2, [[1] * 5] * 2)[1:]
    pair = overall["improvement"][0]
    assert pair == {"first": "dqn", "second": "ppo", "value": 1.0, "ci95": pytest.approx(certain)}
    other = analysis.report([tmp_path], normalize=True, bounds=analysis.known_bounds(["Pendulum-v1=-2000:0"]))
    assert other["overall"]["groups"][0]["iqm"]["value"] != best["iqm"]["value"]


def test_leaderboard_ranks_each_environment(cli: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "deep", "a", POOR)
    make_run(tmp_path / "deep", "b", GOOD, algo="ppo")
    make_run(tmp_path, "c", GOOD, env_id="Pendulum-v1")
    make_run(tmp_path, "unfinished", GOOD, algo="sac", status="interrupted")
    status, out, err = cli("leaderboard", tmp_path, "--json")
    data = json.loads(out)
    assert status == 0
    assert {e["env_id"]: [g["name"] for g in e["groups"]] for e in data["environments"]} == {
        "CartPole-v1": ["ppo", "dqn"], "Pendulum-v1": ["dqn"],
    }  # fmt: skip
    assert err.startswith("warning: skipped")
    assert "interrupted" in err
    assert "sac" in cli("leaderboard", tmp_path, "--partial")[1]


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_is_usable_in_ci(cli: Any, tmp_path: Path) -> None:
    a, b = make_run(tmp_path, "a", GOOD), make_run(tmp_path, "b", POOR, algo="ppo")
    status, out, _ = cli("compare", a, b, "--json")
    result = json.loads(out)
    value, low, high = difference([list(GOOD.values())], [list(POOR.values())])
    assert (status, result["verdict"]) == (1, "worse")
    assert result["difference"] == {"value": pytest.approx(value), "ci95": pytest.approx([low, high])}
    assert cli("compare", b, a)[0] == 0
    assert "better" in cli("compare", b, a)[1]
    assert cli("compare", a, a)[0] == 0
    assert cli("compare", a, b, "--tolerance", 450)[0] == 0
    assert cli("compare", a, b, "--statistic", "mean")[0] == 1
    assert cli("compare", a, b, "--metric", "eval/std_reward")[0] == 0  # equal


def test_compare_rejects_runs_that_cannot_be_compared(cli: Any, tmp_path: Path) -> None:
    a, one = make_run(tmp_path, "a", GOOD), make_run(tmp_path, "one", {0: 1.0})
    other = make_run(tmp_path, "other", GOOD, env_id="Pendulum-v1")
    make_run(tmp_path / "two", "x", GOOD)
    make_run(tmp_path / "two", "y", GOOD, algo="ppo")
    bad(cli("compare", a, one), "one seed", "at least two")
    bad(cli("compare", a, other), "CartPole-v1", "Pendulum-v1")
    bad(cli("compare", a, tmp_path / "two"), "B must have one algorithm", "ppo")
    bad(cli("compare", a, a, "--statistic", "mode"), "mode", "iqm, mean or median")


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence(cli: Any, tmp_path: Path) -> None:
    good = make_run(tmp_path, "good", GOOD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "killed" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    bad(cli("report", tmp_path / "nowhere"), "nowhere", "does not exist")
    bad(cli("report", tmp_path / "file"), "not a directory")
    bad(cli("report", tmp_path / "empty"), "is empty", "config.yaml")
    bad(cli("report", tmp_path / "killed"), "contains no run", "config.yaml")
    bad(cli("leaderboard", tmp_path / "empty"), "is empty")
    bad(cli("report", good, "--metric", "eval/mean_rewrad"), "eval/mean_rewrad", "'eval/mean_reward'", "rollout/")
    bad(cli("report", good, "--at", "10"), "up to step 10")
    bad(cli("report", good, "--bounds", "CartPole-v1"), "ENV=LOW:HIGH")
    bad(cli("report", good, "--bounds", "CartPole-v1=5:1"), "ENV=LOW:HIGH")
    bad(cli("report", good, "--html", tmp_path / "no" / "x.html"), "Cannot write")


def test_mixed_environments_are_refused(cli: Any, tmp_path: Path) -> None:
    a, b = make_run(tmp_path, "a", GOOD), make_run(tmp_path, "b", GOOD, env_id="Mine-v0")
    bad(cli("report", a, b), "CartPole-v1, Mine-v0", "--normalize", "leaderboard")
    bad(cli("report", a, b, "--normalize"), "no reference scores", "--bounds Mine-v0=LOW:HIGH")
    assert cli("report", a, b, "--bounds", "Mine-v0=0:500")[0] == 0


def test_unfinished_runs_are_refused(cli: Any, tmp_path: Path) -> None:
    running = make_run(tmp_path, "running", GOOD, status="running")
    bad(cli("report", running), "unfinished run", "'running'", "resume --checkpoint", "--partial")
    assert cli("report", running, "--partial")[0] == 0
    bad(cli("report", tmp_path), "no finished run")
    (running / "metrics.jsonl").write_text("")
    bad(cli("report", running, "--partial"), "unknown metric")
    (running / "metrics.jsonl").unlink()
    bad(cli("report", running, "--partial"), "unfinished run", "metrics.jsonl")
    cut = make_run(tmp_path, "cut", GOOD)
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines if '"seed": 4' not in line))
    bad(cli("report", cut), "unfinished run", "seed 4")


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", "algo: [1"), ("config.yaml", "algo: 3\n"), ("config.yaml", "seeds: {a: 1}\nalgo: x\nenv_id: y\n"),
     ("metrics.jsonl", "{}\n"), ("metrics.jsonl", "[1]\n"), ("metrics.jsonl", "nonsense\n"),
     ("metrics.jsonl", '{"step": "x", "time": 1}\n')],
)  # fmt: skip
def test_damaged_files_are_named(cli: Any, tmp_path: Path, name: str, text: str) -> None:
    run = make_run(tmp_path, "a", GOOD)
    (run / name).write_text(text)
    bad(cli("report", run), name)


# --- forms ------------------------------------------------------------------------------------------------------------


def test_ticks_and_number_formats() -> None:
    assert ticks(0, 50_000) == [0, 10_000, 20_000, 30_000, 40_000, 50_000]
    assert ticks(-0.03, 1.03) == pytest.approx([0, 0.5, 1.0])
    assert ticks(3, 3) == [3]
    assert [short(x) for x in (0.0, 0.25, 999.0, 50_000.0, 1.5e6, -2000.0)] == [
        "0",
        "0.25",
        "999",
        "50k",
        "1.5M",
        "-2k",
    ]


def test_markdown(cli: Any, tmp_path: Path) -> None:
    make_run(tmp_path, "a", GOOD)
    make_run(tmp_path, "b", POOR, algo="ppo")
    status, out, _ = cli("report", tmp_path / "a", tmp_path / "b", "--markdown", tmp_path / "r.md")
    assert status == 0
    assert "490.0" in out
    text = (tmp_path / "r.md").read_text()
    low, high = interval([list(GOOD.values())])
    assert f"| 1 | dqn | 490.0 [{low:.1f}, {high:.1f}] | 488.0 | 490.0 | 0.03 | 100 % | 5 | 5,000 | 10 s |" in text
    assert "| 2 | ppo |" in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program, reason = browser_program()
    if program is None:
        pytest.skip(reason)
    driver = Browser(program, tmp_path_factory.mktemp("profile"))
    yield driver
    driver.close()


@pytest.mark.slow
def test_page_in_a_browser(cli: Any, browser: Browser, tmp_path: Path) -> None:
    """Opened from disk, at the width of a desk and of a phone, light and dark: nothing in the console, plots drawn."""
    hostile = "<img src=x onerror=alert(1)></script>"
    for algo, scores in (("dqn", GOOD), ("ppo", POOR)):
        make_run(tmp_path, f"{algo}c", scores, algo=algo)
        make_run(tmp_path, f"{algo}p", {s: v - 1000 for s, v in scores.items()}, algo=algo, env_id="Pendulum-v1")
    make_run(tmp_path, "bad", POOR, algo=hostile)
    page = tmp_path / "report.html"
    assert cli("leaderboard", tmp_path, "--normalize", "--html", page, "--json")[0] == 0
    colours = {}
    for width, dark in ((1200, False), (390, False), (390, True)):
        browser.open(page, width, 800, dark)
        assert browser.problems == []
        assert browser.requests == [page.as_uri()]  # nothing else was asked for
        assert browser.value("document.documentElement.scrollWidth") <= width  # no sideways scrolling
        assert browser.value("document.querySelectorAll('img').length") == 0
        # Two environments with four plots each, and two plots over both.
        assert browser.value("document.querySelectorAll('figure svg').length") == 10
        sizes = browser.value(
            "[...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
            " s.getBoundingClientRect().height, s.querySelectorAll('polyline.line, circle.mark').length])"
        )
        assert all(w > 250 and h > 100 and drawn >= 2 for w, h, drawn in sizes), sizes
        smallest = browser.value(
            "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
        )
        assert smallest >= 9  # readable
        image = np.array(Image.open(io.BytesIO(browser.screenshot(tmp_path / f"{width}{dark}.png"))).convert("RGB"))
        assert image.shape[1] == width
        colours[width, dark] = image[2, 2].tolist()
        second = [int((svg.DARK if dark else svg.LIGHT)[1][i : i + 2], 16) for i in (1, 3, 5)]
        assert (image == second).all(-1).sum() > 500  # the lines of the second group were painted
    assert colours == {(1200, False): [255, 255, 255], (390, False): [255, 255, 255], (390, True): [15, 19, 24]}


@pytest.mark.slow
def test_page_hides_groups_and_shows_values_under_the_pointer(cli: Any, browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path, "a", GOOD)
    make_run(tmp_path, "b", POOR, algo="ppo")
    page = tmp_path / "report.html"
    cli("report", tmp_path, "--html", page)
    browser.open(page, 1200, 900, False)
    hidden = "getComputedStyle(document.querySelector('figure svg [data-group=\"0\"]')).display"
    assert browser.value(hidden) != "none"
    browser.value("document.querySelector('[data-toggle=\"0\"]').click()")
    assert browser.value(hidden) == "none"
    browser.value("document.querySelector('[data-toggle=\"0\"]').click()")
    browser.value(
        "(() => { const plot = document.querySelector('svg[data-hover]'), b = plot.getBoundingClientRect();"
        " plot.dispatchEvent(new PointerEvent('pointermove',"
        " {clientX: b.left + b.width * 383.5 / 400, clientY: b.top + b.height / 2})); })()"
    )
    told = browser.value("document.getElementById('tip').innerText")
    assert "dqn: 490.0 [" in told
    assert "ppo:" in told
    assert browser.problems == []
