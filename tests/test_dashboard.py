"""The dashboard: what it serves, what it refuses, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import PATIENCE, Browser, browser_program
from report_runs import make_run

from rl_training.cli import main
from rl_training.envs.video import VideoFile
from rl_training.reports.dashboard import Dashboard
from rl_training.reports.live import POINTS, LiveRun, LiveRuns

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Dashboard]:
    with Dashboard(tmp_path) as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield dashboard
        dashboard.shutdown()
        thread.join()


def get(server: Dashboard, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as answer:
        return json.loads(answer.read())


def status_of(server: Dashboard, path: str, method: str = "GET", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request(method, path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


# --- what it serves ---------------------------------------------------------------------------------------------------


def test_overview_has_status_progress_and_score(server: Dashboard, tmp_path: Path) -> None:
    make_run(tmp_path, "done", {0: 100.0, 1: 300.0})
    now = make_run(tmp_path, "now", {0: 50.0}, status="running", speed=100.0, time=time.time() - 50)
    config = (now / "config.yaml").read_text().replace("total_timesteps: 5000", "total_timesteps: 6000")
    (now / "config.yaml").write_text(config)
    rows = {row["name"]: row for row in get(server, "api/runs")["runs"]}
    assert (rows["done"]["status"], rows["done"]["score"], rows["done"]["eta"]) == ("completed", 200.0, None)
    assert (rows["now"]["status"], rows["now"]["step"], rows["now"]["eta"]) == ("running", 5000, 10.0)
    assert rows["done"]["seeds"] == [0, 1]
    assert rows["done"]["use"] == [None, None, None]  # runs of older versions do not say
    with open(now / "metrics.jsonl", "a") as log:
        line = {"step": 5500, "time": time.time(), "time/cpu_cores": 1.9, "time/memory_gib": 0.61}
        log.write(json.dumps(line) + "\n")
    rows = {row["name"]: row for row in get(server, "api/runs")["runs"]}
    assert rows["now"]["use"] == [1.9, 0.61, None]


def test_curves_have_every_seed_and_few_points(server: Dashboard, tmp_path: Path) -> None:
    make_run(tmp_path, "study", {0: 100.0, 3: 300.0}, steps=range(10, 20_001, 10))
    (row,) = get(server, "api/runs")["runs"]
    (entry,) = get(server, f"api/curves?run={row['id']}&metric=eval/mean_reward&metric=time/fps")
    first, second = entry["curves"]["eval/mean_reward"]
    assert (first["seed"], second["seed"]) == (0, 3)
    assert len(first["steps"]) == POINTS
    assert (first["steps"][-1], first["values"][-1], second["values"][-1]) == (20_000, 100.0, 300.0)
    assert first["seconds"][-1] == pytest.approx(20_000 / 500.0)
    assert "rollout/ep_rew_mean" in entry["metrics"]


def test_groups_are_runs_that_differ_only_in_their_seeds(server: Dashboard, tmp_path: Path) -> None:
    for name, seed, gamma in (("a", 0, 0.99), ("b", 1, 0.99), ("c", 2, 0.9)):
        make_run(tmp_path, name, {seed: 1.0}, gamma=gamma)
    group = {row["name"]: row["group"] for row in get(server, "api/runs")["runs"]}
    assert group["a"] == group["b"] != group["c"]


def test_new_lines_are_read_and_cut_logs_are_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", {0: 10.0}, status="running")
    log, runs = run / "metrics.jsonl", LiveRuns(tmp_path)

    def steps() -> list[float]:
        runs.refresh()
        (row,) = runs.overview()
        return list(runs.curves(row["id"], ["eval/mean_reward"])["curves"]["eval/mean_reward"][0]["steps"])

    assert steps() == [1000, 2000, 3000, 4000, 5000]
    whole = log.read_bytes()
    line = b'{"step": 6000, "time": 1.7e9, "eval/mean_reward": 11.0}\n'
    log.write_bytes(whole + line[:20])  # half-written
    assert steps()[-1] == 5000
    log.write_bytes(whole + line)
    assert steps()[-1] == 6000
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))  # a resumed run cuts its log
    assert steps() == [1000, 2000]
    log.write_bytes(b'\x00\xff not json\n[]\n{"step": "x"}\n' + whole)
    assert steps()[-1] == 5000
    log.unlink()
    runs.refresh()
    assert runs.overview()[0]["status"] == "running"


def test_damaged_files_leave_a_row(server: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", {0: 10.0})
    for name in ("config.yaml", "metadata.json", "summary.json"):
        (run / name).write_bytes(b"\xff{{{: [")
    (row,) = get(server, "api/runs")["runs"]
    assert (row["name"], row["status"], row["algo"]) == ("run", "unknown", "?")


def test_a_log_that_is_cut_and_grows_again_is_read_from_its_start(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", {0: 10.0}, status="running")
    log, runs = run / "metrics.jsonl", LiveRuns(tmp_path)
    runs.refresh()
    (row,) = runs.overview()
    before = runs.curves(row["id"], ["eval/mean_reward"])
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]))  # a resumed run: seen, but its curves are not asked for
    runs.refresh()
    log.write_bytes(b"".join(lines[:4]) + b'{"step": 2500, "time": 1.7e9, "eval/mean_reward": 11.0}\n' * 30)
    runs.refresh()
    (curve,) = runs.curves(row["id"], ["eval/mean_reward"])["curves"]["eval/mean_reward"]
    assert before["curves"]["eval/mean_reward"][0]["steps"] == [1000, 2000, 3000, 4000, 5000]
    assert curve["steps"] == [1000, 2000, *[2500] * 30]


def test_numbers_that_json_does_not_have_are_null(server: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", {0: 10.0}, stop_at_return=float("inf"))
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 6000, "time": 1.7e9, "eval/mean_reward": NaN}\n{"step": Infinity, "time": 1.7e9}\n')
    answers = []
    for path in ("api/runs", f"api/run?run={get(server, 'api/runs')['runs'][0]['id']}"):
        with urllib.request.urlopen(server.url + path) as answer:
            answers.append(json.loads(answer.read(), parse_constant=pytest.fail))
    assert (answers[0]["runs"][0]["score"], answers[0]["runs"][0]["step"]) == (None, 6000)
    assert answers[1]["settings"]["stop_at_return"] is None


def test_a_file_that_disappears_while_it_is_asked_for_is_not_found(
    server: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "run", {0: 10.0})
    (row,) = get(server, "api/runs")["runs"]
    monkeypatch.setattr(LiveRun, "file", lambda self, name: self.path / name)
    assert status_of(server, f"/{server.token}/file/{row['id']}/gone.txt") == 404


def test_detail_has_settings_and_files(server: Dashboard, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", {0: 10.0})
    (run / "videos").mkdir()
    (run / "videos" / "step 1.mp4").write_bytes(bytes(range(256)) * 10)
    (run / "checkpoints" / "secret.json").write_text("{}")
    (run / "link.json").symlink_to("/etc/passwd")
    (row,) = get(server, "api/runs")["runs"]
    detail = get(server, f"api/run?run={row['id']}")
    assert detail["settings"]["learning_rate"] == 1e-3
    files = {entry["path"]: entry["kind"] for entry in detail["files"]}
    assert files["videos/step 1.mp4"] == "video"
    assert "link.json" not in files
    assert not any("checkpoints" in name for name in files)
    request = urllib.request.Request(
        f"{server.url}file/{row['id']}/videos/step%201.mp4", headers={"Range": "bytes=2-5"}
    )
    with urllib.request.urlopen(request) as answer:
        assert (answer.status, answer.read()) == (206, bytes([2, 3, 4, 5]))
        assert answer.headers["Content-Range"] == "bytes 2-5/2560"


def test_report_page_of_selected_runs(server: Dashboard, tmp_path: Path) -> None:
    make_run(tmp_path, "run", {0: 10.0, 1: 20.0})
    (row,) = get(server, "api/runs")["runs"]
    with urllib.request.urlopen(f"{server.url}report?run={row['id']}") as answer:
        assert b"CartPole-v1" in answer.read()
        assert "sandbox" in answer.headers["Content-Security-Policy"]


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_requests_without_token_or_from_other_names_are_refused(server: Dashboard, tmp_path: Path) -> None:
    make_run(tmp_path, "run", {0: 10.0})
    (row,) = get(server, "api/runs")["runs"]
    token = server.token
    assert status_of(server, "/") == 403
    assert status_of(server, "/wrong/api/runs") == 403
    assert status_of(server, f"/{token}/api/runs", Host="evil.example") == 403
    assert status_of(server, f"/{token}/api/runs") == 200
    assert status_of(server, f"/{token}/api/runs", method="POST") == 501
    assert status_of(server, f"/{token}/api/run?run=nothing") == 404
    for name in ("../run/config.yaml", "..%2f..%2fetc/passwd", "checkpoints/x", "%00", "/etc/passwd"):
        assert status_of(server, f"/{token}/file/{row['id']}/{name}") == 404


def test_command_refuses_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], server: Dashboard) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["dashboard", str(tmp_path / "empty"), "--no-browser"]) == 2
    assert capsys.readouterr().err.strip().endswith("is empty; a run directory has a config.yaml")
    assert main(["dashboard", str(tmp_path / "missing"), "--no-browser"]) == 2
    assert "does not exist" in capsys.readouterr().err
    make_run(tmp_path, "run", {0: 10.0})
    port = str(server.server_address[1])
    assert main(["dashboard", str(tmp_path), "--no-browser", "--port", port]) == 2
    assert (
        capsys.readouterr().err
        == f"error: port {port} cannot be used (Address already in use); choose another --port\n"
    )


# --- the page in a browser --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program, reason = browser_program()
    if program is None:
        pytest.skip(reason)
    page = Browser(program, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


def wait(browser: Browser, expression: str) -> int:
    """How often the page has asked for the runs until the expression is true."""
    before, end = polls(browser), time.monotonic() + PATIENCE
    while not browser.value(expression):
        assert time.monotonic() < end, (expression, browser.problems)
        time.sleep(0.02)
    return polls(browser) - before


def polls(browser: Browser) -> int:
    return sum(url.endswith("api/runs") for url in browser.requests)


ROWS = "document.readyState === 'complete' && document.querySelectorAll('#rows tr').length"
LINES = "document.querySelectorAll('#panel svg .line').length"


@pytest.mark.slow
def test_videos_of_evaluations_appear_and_go_on_playing(server: Dashboard, tmp_path: Path, browser: Browser) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run = make_run(tmp_path, "run", {3: 50.0}, status="running", time=time.time())

    def record(step: int) -> None:
        (run / "videos").mkdir(exist_ok=True)
        file = VideoFile(run / "videos" / f"step_{step:012d}.mp4", 30.0)
        for shade in range(0, 250, 10):
            file.append(np.full((48, 64, 3), shade, np.uint8))
        file.close()

    def news(step: int, score: float) -> None:
        with open(run / "metrics.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "time": time.time(), "eval/mean_reward": score}) + "\n")
        wait(browser, f"document.getElementById('rows').textContent.includes('{score}')")

    record(6000)
    browser.show(server.url, 390, 900, True)
    wait(browser, f"({ROWS}) === 1 && {LINES} >= 1")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="3", text="3")
    wait(
        browser,
        "document.querySelectorAll('#panel video').length === 1 && document.querySelector('video').readyState > 0",
    )
    assert (
        browser.value("document.querySelector('figcaption').textContent")
        == "dqn · CartPole-v1 after 6,000 steps, seed 3"
    )
    browser.value("void document.querySelector('video').play()")
    wait(browser, "document.querySelector('video').currentTime > 0")
    news(6000, 71.5)
    record(7000)
    news(7000, 72.5)
    wait(browser, "document.querySelectorAll('#panel video').length === 2")
    old = "document.querySelectorAll('#panel video')[1]"
    assert browser.value(f"{old}.currentTime > 0 && !{old}.paused")
    assert browser.problems == []


@pytest.mark.slow
def test_page_shows_runs_live_and_names_stay_text(server: Dashboard, tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, "one", {seed: 100.0 + seed for seed in range(6)})
    run = make_run(tmp_path, HOSTILE, {0: 50.0}, algo=HOSTILE, env_id=HOSTILE, status="running", time=time.time())
    for width, dark in ((1300, False), (390, True)):
        browser.show(server.url, width, 900, dark)
        wait(browser, f"({ROWS}) === 2 && {LINES} >= 4")
        assert browser.value("document.querySelectorAll('#panel .band').length") >= 1  # six seeds
        assert not browser.value("document.documentElement.scrollWidth > innerWidth")
    with open(run / "metrics.jsonl", "a") as log:
        log.write(
            json.dumps({"step": 6000, "time": time.time(), "eval/mean_reward": 77.4, "time/cpu_cores": 1.9}) + "\n"
        )
    # The page asks once a second; two answers are enough on an idle machine.
    assert wait(browser, "document.getElementById('rows').textContent.includes('77.4')") < 10
    assert browser.value("document.getElementById('rows').textContent.includes('· 1.9 cores')")
    for key in "2341xxjk/":
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
    wait(browser, "document.activeElement.id === 'search'")
    search = "document.getElementById('search')"
    browser.value(f"{search}.value = 'dqn cart'; {search}.dispatchEvent(new Event('input'))")
    wait(browser, f"({ROWS}) === 1")
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.problems == []
    assert all(url.startswith((server.url, "data:")) for url in browser.requests)
