"""The picture that a sweep leaves, on white as there: python docs/pictures/sweep.py."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import style

from trainer.sweep import results
from trainer.sweep.search import SweepConfig
from trainer.sweep.trials import read_trials

SWEEP = (
    "-m optim.lr=tag(log,interval(1e-3,1)) model.hidden=choice([16],[64],[64,64]) hydra.sweeper.search=tpe "
    "hydra.sweeper.trials=12 train.epochs=2 train.eval_every_epochs=2"
)
ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    style.use()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), *SWEEP.split(), f"hydra.sweep.dir={folder}"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        file = style.HERE / "sweep.svg"
        settings = SweepConfig(metric="eval/loss", mode="min")
        results.draw(file, read_trials(Path(folder)), settings)
