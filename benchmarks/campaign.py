"""A campaign of attacks on training runs: kills, corrupted files, fuzzed input, broken environments and disks, a day.

    python benchmarks/campaign.py [--attacks corrupt,fuzz] [--size 1.0] [--share 2/4] [--json F] [--table]
    python benchmarks/campaign.py --merge a.json b.json [--json F]

Every attack has a number of cases at full size; `--size 0.01` runs a hundredth of each. Cases run in forked children of
one process that has everything imported. A child that dies or hangs is a bad outcome like any other. The JSON file
is written after every batch, and a campaign that is started again continues there. `--share 2/4` runs the second of
four parts of the cases, each with a file of its own; `--merge` adds the files up. `--table` prints the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attacks import ATTACKS, Attack

RESULTS = Path(__file__).parent / "results" / "campaign.json"
SHOWN = 20  # bad outcomes kept for each attack


def forked(attack: Attack, first: int, last: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run cases in a child; yields {"case", "tried", "kind", "bad"}, also for a case that ends the child or hangs."""
    while first < last:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                os.setsid()  # environment workers end with their group
                _work(attack, range(first, last), scratch, write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        pending = b""
        hung = False
        while True:
            ready, _, _ = select.select([read], [], [], attack.limit)
            data = os.read(read, 65536) if ready else b""
            if not data:
                hung = not ready
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                outcome = json.loads(line)
                first = outcome["case"] + 1
                yield outcome
        os.close(read)
        if hung:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if first < last:
            how = (
                f"no answer in {attack.limit:g} s"
                if hung
                else f"the process ended: {os.waitstatus_to_exitcode(status)}"
            )
            yield {"case": first, "tried": 1, "kind": "process", "bad": how}
            first += 1


def _work(attack: Attack, cases: range, scratch: Path, write: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for case in cases:
        folder = scratch / f"{attack.name}-{case}"
        folder.mkdir()
        os.chdir(folder)
        kind, tried, bad = "", 1, None
        try:
            kind, tried, bad = attack.run(random.Random(f"{attack.name} {case}"), case, folder)
        except BaseException as error:
            bad = f"{type(error).__name__}: {error}"
        os.chdir(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        os.write(write, json.dumps({"case": case, "tried": tried, "kind": kind, "bad": bad}).encode() + b"\n")


def run(attack: Attack, size: float, path: Path, part: int = 1, parts: int = 1) -> None:
    """Run the cases that the file does not have yet, of one of several parts."""
    whole = max(1, round(attack.cases * size))
    start, count = whole * (part - 1) // parts, whole * part // parts
    new = {"next": start, "tried": 0, "bad": 0, "examples": [], "kinds": {}, "seconds": 0.0}
    done = read(path).get(attack.name, new)
    if done["next"] >= count:
        return
    with tempfile.TemporaryDirectory(prefix="campaign-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        scratch = Path(name)
        attack.prepare(scratch)
        while done["next"] < count:
            started = time.monotonic()
            last = min(count, done["next"] + attack.batch)
            for outcome in forked(attack, done["next"], last, scratch):
                done["tried"] += outcome["tried"]
                kinds = done["kinds"]
                kinds[outcome["kind"]] = kinds.get(outcome["kind"], 0) + outcome["tried"]
                if outcome["bad"]:
                    done["bad"] += 1
                    example = {"case": outcome["case"], "kind": outcome["kind"], "what": outcome["bad"][:500]}
                    done["examples"] = [*done["examples"], example][:SHOWN]
            done.update(next=last, planned=attack.planned, what=attack.what)
            done["seconds"] = round(done["seconds"] + time.monotonic() - started, 1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**read(path), attack.name: done}, indent=1) + "\n")
            print(f"{attack.name}: {last} of {count} cases, {done['tried']} tried, {done['bad']} bad", flush=True)


def merge(paths: list[Path], into: Path) -> None:
    """Replace the attacks that the files have by the sums of the parts in them."""
    merged: dict[str, Any] = {}
    for path in paths:
        for name, row in read(path).items():
            sums = merged.setdefault(name, {**row, "tried": 0, "bad": 0, "examples": [], "kinds": {}, "seconds": 0.0})
            for key in ("tried", "bad"):
                sums[key] += row[key]
            sums["next"] = max(sums["next"], row["next"])
            sums["seconds"] = round(sums["seconds"] + row["seconds"], 1)
            sums["examples"] = [*sums["examples"], *row["examples"]][:SHOWN]
            sums["kinds"] = {
                k: sums["kinds"].get(k, 0) + row["kinds"].get(k, 0) for k in {**sums["kinds"], **row["kinds"]}
            }
    into.write_text(json.dumps({**read(into), **merged}, indent=1) + "\n")


def share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: write 2/4 for the second of four parts")
    return int(part), int(parts)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def table(results: dict[str, Any]) -> str:
    lines = ["| attack | kinds | planned | tried | bad |", "|---|---:|---:|---:|---:|"]
    for attack in ATTACKS:
        row = results.get(attack.name)
        if row:
            kinds = len(row["kinds"])
            lines.append(f"| {row['what']} | {kinds} | {row['planned']:,} | {row['tried']:,} | {row['bad']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--attacks", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--size", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--share", type=share, default=(1, 1), metavar="K/N", help="run part K of N of the cases")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="F", help="only add up the files of several parts")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table of the results so far")
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge, arguments.json)
    elif not arguments.table:
        torch.set_num_threads(1)
        for name in arguments.attacks.split(","):
            run(
                next(attack for attack in ATTACKS if attack.name == name),
                arguments.size,
                arguments.json,
                *arguments.share,
            )
    results = read(arguments.json)
    print(table(results))
    for name, row in results.items():
        for example in row["examples"]:
            print(f"{name} {example['case']} ({example['kind']}): {example['what']}", file=sys.stderr)
    return int(any(row["bad"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
