"""How much of a step is computing, up to 16,384 ranks: python docs/pictures/efficiency.py.

A real run on this machine is predicted for hosts of eight ranks, as docs/howto/which-all-reduce.md has it.
"""

import os
import tempfile

import style

import trainer
from planner.comm import main

RUN = (
    "experiment=text_gpt comm=ring model.width=256 model.depth=6 train.global_batch_size=8 train.max_steps=40"
    " train.eval_every_epochs=0"
)
HOSTS = (
    "--hosts 2048 --per-host 8 --gbit 10 --latency-us 50 --local-gbit 400 --local-latency-us 2 "
    "--hosts-per-switch 16 --oversubscription 4"
)

if __name__ == "__main__":
    style.use()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trainer.train([*RUN.split(), "run_dir=run"], processes=2)
        file = style.HERE / "efficiency-light.svg"
        main(["--train", "run", *HOSTS.split(), "--plot", str(file)])
    style.darken(file)
