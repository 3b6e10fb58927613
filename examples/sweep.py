"""A sweep of ``RexTrainer`` runs by Ray Tune: which policy, and which global batch, for this model on this cluster?

    python examples/sweep.py --num-workers 2
    ray job submit --working-dir . -- python examples/sweep.py --storage /mnt/results/sweep

Every trial is a whole training run with its own worker group, journal and checkpoints, in ``STORAGE/runs/NAME``; Tune's
record of them is in ``STORAGE/tune``. Copy the file, put your loop in place of ``train_loop``, your search in place of
``SEARCH``. The data, scikit-learn's digits, are on every node that has rex_ray.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback
from rex_ray import RexConfig, RexTrainer, get_session
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SEARCH = {
    "policy": tune.grid_search(["bsp", "rex"]),
    "global_batch_size": tune.grid_search([64, 128]),
}


def train_loop(config: dict[str, Any]) -> None:
    """Train a perceptron on one worker; one report per epoch, which Tune hears of too."""
    session = get_session()
    torch.manual_seed(config["seed"])
    inputs, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = torch.utils.data.random_split(
        rows, [1500, len(rows) - 1500], torch.Generator().manual_seed(0)
    )
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    loader = session.loader(train_set)
    for _ in session.epochs(config["num_epochs"]):
        for batch, targets in loader:
            functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        correct = count = 0
        with torch.no_grad():
            for batch, targets in session.eval_loader(test_set):
                correct += int((session.unwrap(model)(batch).argmax(dim=1) == targets).sum())
                count += len(targets)
        session.report({"accuracy": session.pool(correct, count)})


def trial(config: dict[str, Any], options: argparse.Namespace) -> None:
    """Run one trial: the trial's own process is the driver of a training run on the cluster."""
    selector = {"ray.io/accelerator-type": options.label_selector} if options.label_selector else None
    RexTrainer(
        train_loop,
        train_loop_config={"num_epochs": options.num_epochs, "seed": 0},
        rex_config=RexConfig(
            policy=config["policy"],
            global_batch_size=config["global_batch_size"],
            checkpoint_interval_s=0.0,  # Tune hears of an epoch when it is saved: of every one, then
        ),
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu, label_selector=selector),
        run_config=RunConfig(
            name="{policy}-{global_batch_size}".format(**config),
            storage_path=str(options.storage / "runs"),
            callbacks=[TuneReportCallback()],  # passes on what session.report says
        ),
    ).fit()


def main() -> None:
    """Sweep, and print the trials by accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="workers of each trial")
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--label-selector", help="nodes to use, e.g. 'in(T4,V100)'")
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--num-concurrent", type=int, default=1, help="trials at once; each has workers of its own")
    parser.add_argument("--storage", type=Path, default=Path("out/sweep"), help="a folder that every node can write to")
    options = parser.parse_args()
    options.storage = options.storage.resolve()
    options.storage.mkdir(parents=True, exist_ok=True)
    # Under `ray job submit` this process stands in Ray's copy of --working-dir. A second node on the same machine
    # unpacks it anew, which removes the folder under our feet; os.getcwd() would then fail. Imports are by full path.
    os.chdir(options.storage)

    tuner = tune.Tuner(
        # A trial only waits for its workers. It asks for a crumb of the head node, not for a CPU: trials that took the
        # CPUs which their own workers need would wait for ever.
        tune.with_resources(tune.with_parameters(trial, options=options), {"CPU": 0, "node:__internal_head__": 0.001}),
        param_space=SEARCH,
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=options.num_concurrent),
        run_config=tune.RunConfig(name="tune", storage_path=str(options.storage), verbose=1),
    )
    results = tuner.fit()
    if results.num_errors:
        raise SystemExit(f"{results.num_errors} of {len(results)} trials failed; their errors stand above")
    # What the trials said last, not `results.get_dataframe()`: that reads their files, which may not be there yet.
    print("policy  global_batch_size  reports  accuracy  time_total_s")
    for one in sorted(results, key=lambda one: -one.metrics["accuracy"]):
        found, said = one.config, one.metrics
        print(
            f"{found['policy']:<6}  {found['global_batch_size']:>17}  {said['training_iteration']:>7}"
            f"  {said['accuracy']:>8.4f}  {said['time_total_s']:>12.1f}"
        )


if __name__ == "__main__":
    main()
