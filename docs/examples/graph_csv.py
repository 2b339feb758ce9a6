"""Shows: two tables are enough: the command trains on them, predicts every node, and resumes."""

from __future__ import annotations

import csv
import random
import re
import subprocess
import sys

random.seed(0)
people = [f"person {i}" for i in range(80)]
team = {name: i % 2 for i, name in enumerate(people)}
with open("people.csv", "w", newline="") as stream:
    rows = csv.writer(stream)
    rows.writerow(["name", "age", "city", "team"])
    for name in people:
        age = random.gauss(35 + 6 * team[name], 8)
        known = "red" if team[name] else "blue"
        rows.writerow(
            [name, f"{age:.0f}", random.choice("ABC"), known if random.random() < 0.7 else ""]
        )
with open("friends.csv", "w", newline="") as stream:
    rows = csv.writer(stream)
    rows.writerow(["from", "to"])
    for i, one in enumerate(people):
        for other in people[i + 1 :]:
            if random.random() < (0.15 if team[one] == team[other] else 0.01):
                rows.writerow([one, other])


def nnx(*words: str) -> str:
    command = [sys.executable, "-m", "nnx", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


said = nnx(
    "graph", "train", "people.csv", "friends.csv", "--target", "team", "--epochs", "60", "--quiet"
)
run = re.search(r"run\s+([0-9a-f]{32})", said).group(1)
predicted = list(csv.DictReader(nnx("graph", "predict", run).splitlines()))
with open("people.csv", newline="") as stream:
    unknown = {row["name"] for row in csv.DictReader(stream) if not row["team"]}
right = [
    row["predicted team"] == ("red" if team[row["name"]] else "blue")
    for row in predicted if row["name"] in unknown
]  # fmt: skip
print(f"{len(unknown)} people without a team, {100 * sum(right) / len(right):.0f}% found right")
assert [row["name"] for row in predicted] == people
assert "graph" in nnx("graph", "resume", run, "--epochs", "2", "--quiet")
