"""A command that trains nothing: it leaves the records that a run leaves, and misbehaves when FAKE says so.

FAKE is a JSON object from a schedule, or `schedule:seed`, to `fail`, `hang`, `empty` or `partial`.
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


def train(given: dict[str, str]) -> int:
    schedule, seed, folder = given["schedule"], int(given["seed"]), Path(given["run_dir"].strip("'"))
    model, epochs = given.get("model", "vgg16"), int(given.get("epochs", 3))
    behaviour = json.loads(os.environ.get("FAKE", "{}"))
    what = behaviour.get(f"{schedule}:{seed}") or behaviour.get(schedule)
    print(f"pipetrain: {model}, {schedule}, threads {os.environ['OMP_NUM_THREADS']}")
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
    if what == "empty":
        return 0
    leave_records(given, schedule, seed, folder, model, epochs, what)
    return 0


def leave_records(
    given: dict[str, str], schedule: str, seed: int, folder: Path, model: str, epochs: int, what: str | None
) -> None:
    speed = {"layer_dist": 1.0, "gpipe": 1.5, "1f1b": 1.6, "pipedream": 1.9, "pipedream_2bw": 2.0}[schedule]
    codec = given.get("codec.backward")  # a run without one says nothing of bytes, as old records do
    final = {"layer_dist": 0.978, "pipedream": 0.969}.get(schedule, 0.975) + 0.002 * seed
    accuracies = [final * (1 - 0.8 * 0.4**epoch) for epoch in range(epochs - 2)]
    accuracies += [final, final - 0.004 - 0.002 * seed]
    is_text = given.get("task") == "language_modelling"
    metric = {"name": "ppl" if is_text else "acc", "higher": not is_text, "percent": not is_text}
    values = [3 + 100 * (1 - accuracy) for accuracy in accuracies] if is_text else accuracies
    best = min(values) if is_text else max(values)
    key = f"val_{metric['name']}"
    seconds = 31.2 / speed * (5 if model == "resnet18" else 1)
    with open(folder / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "train_loss", key, "epoch_s", "elapsed_s"])
        for epoch, value in enumerate(values, 1):
            rows.writerow([epoch, 0.5, f"{value:.6g}", seconds, (seconds + 2) * epoch + 0.1 * seed])
    summary: dict[str, Any] = {
        "model": model,
        "data": given.get("data", "digits"),
        "schedule": schedule,
        "stages": 2,
        "device": "2 x cpu",
        "lr": float(given.get("optim.lr", 0.01)),
        "data_workers": 0,
        "partition": [8],
        "batch_size": 64,
        "microbatches": 1,
        "buffer_size": 2,
        "epochs": epochs,
        "seed": seed,
        "metrics": [metric],
        key: values[-1],
        f"best_{key}": best,
        "best_epoch": values.index(best) + 1,
        "val_loss": 0.1,
        "samples_per_s": 1437 / seconds + seed,
        "epoch_s": seconds + 0.3 * seed,
        "total_s": (seconds + 2) * epochs,
        "updates": 23 * epochs,
        "per_stage": [{"params": 1}, {"params": 2}],
    }
    if codec:
        summary |= {"bytes_per_epoch": 4e8 if codec == "identity" else 1e8, "codec_s_per_epoch": 0.5}
    text = json.dumps(summary)
    (folder / "summary.json").write_text(text[: len(text) // 2] if what == "partial" else text)


sys.exit(train(dict(word.lstrip("+~").split("=", 1) for word in sys.argv[1:])))
