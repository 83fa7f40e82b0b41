"""Rerun a step of a run: `python -m trainer.replay RUN --step N [--from STEP_DIR] [OVERRIDES]`.

Starts from the newest checkpoint before step N, and reports whether losses and gradient norms are
bit-identical to those that the run recorded. Shows the samples of step N with their own losses, the norms of
each parameter, and the module in which the first NaN or Inf appeared. Writes RUN/replay/step_N/ and nothing
else. Needs the same number of processes as the run, or with train.exact any number. Exits with status 1 if a
number differs from the recorded one.
"""

import sys
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.errors import UserError
from trainer.inference.command import arguments, start


def main() -> None:
    parser = arguments("trainer.replay", __doc__, trains=True)
    parser.add_argument(
        "--step", type=int, required=True, metavar="N", help="the step to show, counted from 1"
    )
    parser.add_argument(
        "--from",
        dest="checkpoint",
        type=Path,
        metavar="STEP_DIR",
        help="the checkpoint to start from (default: the newest one before the step)",
    )
    parser.add_argument(
        "--save-batch", action="store_true", help="save the batch of each rank in batch_RANK.pt"
    )

    def do(options: Any, config: Config) -> None:
        if not isinstance(options.run, Path):
            raise UserError(f"{options.run} is a URL; copy the run to a local disk to replay it")
        if options.step < 1:
            raise UserError(f"--step is {options.step}, but must be at least 1")
        if config.train.skips(options.step):
            raise UserError(
                f"step {options.step} was skipped because of train.skip_steps={config.train.skip_steps}; add "
                "train.skip_steps=[] to see what the step would compute"
            )
        from trainer.replay.report import replay

        if not replay(options.run, options.step, options.overrides, options.checkpoint, options.save_batch):
            sys.exit(1)

    start("trainer.replay", parser, do, trains=True)


if __name__ == "__main__":
    main()
