"""Train: `python train.py`, or `torchrun --nproc_per_node=N train.py`, then Hydra overrides."""

from ringmaster import main

if __name__ == "__main__":
    main()
