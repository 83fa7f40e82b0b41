"""Train: `python train.py`, or `torchrun --nproc_per_node=N train.py`, then Hydra overrides."""

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer import config, launch
from trainer.errors import UserError


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> None:
    with launch.exits():  # here, so that Hydra does not report the end of a run as an error of its own
        if launch.place().under_torchrun and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise UserError(
                "-m (multirun) inside torchrun would run the sweep on every rank at once; sweep outside, one "
                "launch per trial: for lr in 0.1 0.01; do torchrun ... train.py optim.lr=$lr; done"
            )
        settings = config.load(composed)

        from trainer.run import run  # torch is loaded only once the settings are good

        run(settings)


if __name__ == "__main__":
    with launch.exits():  # for what Hydra refuses before it calls main
        main()
