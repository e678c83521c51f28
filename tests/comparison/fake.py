"""A command that trains nothing: it leaves the records that a run leaves, and misbehaves when FAKE says so.

FAKE is a JSON object from a schedule, or `schedule:seed`, to `fail`, `hang` or `partial`.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SPEED = {"layer_dist": 1.0, "gpipe": 1.5, "1f1b": 1.6, "pipedream": 1.9, "pipedream_2bw": 2.0}


def train(given: dict[str, str]) -> int:
    schedule, seed, folder = given["schedule"], int(given["seed"]), Path(given["run_dir"].strip("'"))
    behaviour = json.loads(os.environ.get("FAKE", "{}"))
    what = behaviour.get(f"{schedule}:{seed}") or behaviour.get(schedule)
    with open(folder.parent / "started.txt", "a") as file:
        print(folder.name, file=file)
    if what == "fail":
        print("pipetrain: batch_size=0 must be a whole number of at least 1")
        return 1
    if what == "hang":  # as a rank of data workers does
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        worker = subprocess.Popen(sleep, start_new_session=True)
        (folder.parent / "hanging.txt").write_text(f"{os.getpid()} {worker.pid}")
        time.sleep(60)
    leave_records(given, schedule, seed, folder, what)
    return 0


def leave_records(given: dict[str, str], schedule: str, seed: int, folder: Path, what: str | None) -> None:
    model, epochs = given.get("model", "vgg16"), int(given.get("epochs", 3))
    final = {"layer_dist": 0.978, "pipedream": 0.969}.get(schedule, 0.975) + 0.002 * seed
    accuracies = [final * (1 - 0.8 * 0.4**epoch) for epoch in range(epochs - 2)]
    accuracies += [final, final - 0.004 - 0.002 * seed]
    is_text = given.get("task") == "language_modelling"
    metric = {"name": "ppl" if is_text else "acc", "higher": not is_text, "percent": not is_text}
    values = [3 + 100 * (1 - accuracy) for accuracy in accuracies] if is_text else accuracies
    best = min(values) if is_text else max(values)
    key, seconds = f"val_{metric['name']}", 31.2 / SPEED[schedule]
    with open(folder / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "val_loss", key, "elapsed_s"])
        rows.writerows(
            [epoch, 1 / epoch, f"{v:.6g}", (seconds + 2) * epoch] for epoch, v in enumerate(values, 1)
        )
    summary: dict[str, Any] = {"model": model, "data": given.get("data", "digits"), "schedule": schedule}
    summary |= {"device": "2 x cpu", "lr": 0.01, "batch_size": 64, "data_workers": 0, "buffer_size": 2}
    summary |= {"epochs": epochs, "seed": seed, "updates": 23 * epochs, "metrics": [metric]}
    summary |= {key: values[-1], f"best_{key}": best, "best_epoch": values.index(best) + 1}
    summary |= {"epoch_s": seconds + 0.3 * seed, "total_s": (seconds + 2) * epochs}
    text = json.dumps(summary)
    (folder / "summary.json").write_text(text[: len(text) // 2] if what == "partial" else text)


sys.exit(train(dict(word.lstrip("+~").split("=", 1) for word in sys.argv[1:])))
