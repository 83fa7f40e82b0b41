"""Train: `python train.py`, or `torchrun --nproc_per_node=N train.py`, then Hydra overrides."""

import sys

import hydra
from omegaconf import DictConfig

from trainer import config
from trainer.launch.exits import exits, refuse_sweep_in_ranks
from trainer.launch.place import place, publish
from trainer.overrides import for_hydra

composed: list[DictConfig] = []  # one; several in a multirun; none for --help and the like


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def compose(settings: DictConfig) -> None:
    """Only collect: Hydra would report the errors of what runs in here, and cut their tracebacks."""
    composed.append(settings)


if __name__ == "__main__":
    with exits():
        sys.argv = for_hydra(sys.argv)
        compose()
        refuse_sweep_in_ranks(len(composed))
        for settings in map(config.load, composed):
            publish(place(settings.distributed))
            from trainer.run import run  # torch is loaded only once the settings are good

            run(settings)
