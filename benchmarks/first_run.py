"""How long is it from `pip install` of the wheel to a solved CartPole whose video plays in the dashboard?

Builds the wheel, then takes the time of what a new user does: an empty virtual environment, pip install, `rl-training
train` with `eval_video` until an evaluation of 20 episodes reaches 495, an evaluation of 20 other episodes (475 is
solved), and `rl-training dashboard` in a headless Chromium until the newest video plays. Nothing is cached: the home
directory is new. The time of pip depends on the network, and on which build of torch it takes (--torch 2.13.0).

    python benchmarks/first_run.py --torch 2.13.0 --cores 2 --json first_run.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from browser import Browser, find_browser  # noqa: E402

TRAIN = "train --config ppo/cartpole --set eval_video=true --set eval_episodes=20 --set stop_at_return=495 --json"
NEWEST = "document.querySelector('#panel video')"


class Session:
    """Commands in an empty home directory, and the seconds until the end of each."""

    def __init__(self, home: Path) -> None:
        kept = ("PATH", "LANG", "TMPDIR")
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        self.home = home
        self.environment = {**{key: os.environ[key] for key in kept if key in os.environ}, **pip, "HOME": str(home)}
        self.start, self.seconds = time.monotonic(), dict[str, float]()

    def mark(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self.start, 1)
        print(f"{self.seconds[name]:8.1f} s  {name}", file=sys.stderr, flush=True)

    def call(self, *words: str) -> Any:
        done = subprocess.run(words, cwd=self.home, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def rl(self, *words: str) -> Any:
        return json.loads(self.call("venv/bin/rl-training", *words))


def wait(page: Browser, expression: str, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not page.value(expression):
        if time.monotonic() > end:
            sys.exit(f"the dashboard never showed {expression}: {page.problems}")
        time.sleep(0.02)


def watch(session: Session, screenshot: Path | None) -> None:
    """Open the dashboard and wait until the newest video plays."""
    command = ["venv/bin/rl-training", "dashboard", "runs", "--no-browser"]
    server = subprocess.Popen(
        command, cwd=session.home, env=session.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    page = Browser(find_browser() or sys.exit("this needs Chromium"), session.home / "profile")
    try:
        assert server.stdout is not None
        page.show(server.stdout.readline().strip(), 1300, 900, dark=False)
        wait(page, "document.readyState === 'complete' && document.querySelectorAll('#rows tr').length === 1")
        page.send("Input.dispatchKeyEvent", type="keyDown", key="3", text="3")
        wait(page, f"{NEWEST} && {NEWEST}.readyState >= 2")
        page.value(f"void {NEWEST}.play()")
        wait(page, f"{NEWEST}.currentTime > 0")
        session.mark("its video plays in the dashboard")
        if page.problems:
            sys.exit(f"the page reported problems: {page.problems}")
        if screenshot is not None:
            page.screenshot(screenshot)
    finally:
        page.close()
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch", metavar="VERSION", help="version of torch to install; default: the newest that pip finds"
    )
    parser.add_argument("--cores", type=int, help="use only so many CPUs")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--screenshot", type=Path, help="save a picture of the dashboard")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "--directory", folder]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        session = Session(home)
        session.call(sys.executable, "-m", "venv", "venv")
        session.mark("virtual environment")
        torch = [f"torch=={options.torch}"] if options.torch else []
        session.call("venv/bin/pip", "install", "--quiet", *torch, f"{wheel}[video]")
        session.mark("installed")
        result = session.rl(*TRAIN.split(), "--no-progress")
        session.mark("solved")
        again = session.rl(
            "eval", "--checkpoint", result["run_dir"], "--num-episodes", "20", "--seed", "1000", "--json"
        )
        session.mark("evaluated on 20 other episodes")
        videos = len(list(Path(home, result["run_dir"], "videos").iterdir()))
        watch(session, options.screenshot)
        final = result["final_eval"]
        out = {
            "cores": len(os.sched_getaffinity(0)), "seconds": session.seconds, "env_steps": result["env_steps"],
            "mean_return": final["mean_return"], "episodes": final["episodes"], "other_episodes": again["mean_return"],
            "videos": videos,
        }  # fmt: skip
        print(json.dumps(out, indent=2))
        if options.json:
            options.json.write_text(json.dumps(out, indent=2) + "\n")
    if min(final["mean_return"], again["mean_return"]) < 475.0:
        sys.exit("CartPole is not solved")


if __name__ == "__main__":
    main()
