"""Test processors before a long job: `torchrun ... -m trainer.exact.verify --minutes M [OVERRIDES]`.

All ranks repeatedly compute the gradients of the same chunks (fixed parts of the global batch), with the
configured model, data and strategy, and compare the results bit for bit. Nothing is trained or saved. If a
rank computes a wrong result, the output names that rank, and all ranks exit with status 76.
"""

import argparse
import sys
import time

from trainer import cli, config
from trainer.errors import UserError
from trainer.launch import local
from trainer.launch.exits import exits
from trainer.launch.new_process import launched_by
from trainer.launch.rank_info import publish, rank_info

_REPORT_S = 30.0  # between lines of output


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.exact.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the test (10)")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="settings, as for train.py")
    options = parser.parse_intermixed_args()
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes {options.minutes}: must be a positive number")
    arguments, sys.argv[1:] = sys.argv[1:], options.overrides
    with exits():
        for settings in cli.compose():
            settings.train.exact = settings.train.exact or max(2, rank_info().world_size)
            settings.train.verify_every = 1
            chosen = config.load(settings)
            if chosen.launch.name == "local" and launched_by() is None:
                sys.exit(local.launch(chosen, arguments, "trainer.exact.verify")[0])
            burn_in(chosen, options.minutes)


def burn_in(settings: config.Config, minutes: float) -> int:
    """Compare the results of all ranks for `minutes`; return the number of computed chunks (a collective).

    Raises:
        UserError: there is only one rank.
        WrongResultError: on every rank, if a rank computed wrong numbers.
    """
    from trainer.build.data import build_dataset, build_to_device, local_batches, split_for
    from trainer.build.model import initial_model, wrap_model
    from trainer.build.task import build_task
    from trainer.distributed.agreement import Agreement
    from trainer.distributed.process_group import process_group
    from trainer.guards.verification import GradientVerification
    from trainer.strategies.build import build_strategy
    from trainer.tasks import offers
    from trainer.tasks.base import call_begin_step
    from trainer.tasks.label_counts import count_labels

    class BurnIn(GradientVerification):
        way_out = "Keep this device out of the job, for example with SLURM's --exclude"

    assert settings.train.exact is not None
    seed = settings.seed = settings.seed or 0
    publish(here := rank_info(settings.distributed))
    if here.world_size < 2:
        raise UserError(
            "this test compares the results of at least 2 ranks, but there is 1; start it with torchrun "
            "--standalone --nproc_per_node=2 -m trainer.exact.verify, or add launch=local launch.processes=2"
        )
    with process_group(settings.distributed) as ranks:
        strategy = build_strategy(settings, ranks)
        task, train_set = build_task(settings), build_dataset(settings.data, "train")
        split = split_for(settings.train, strategy)
        initial = initial_model(settings, train_set, ranks if strategy.fills_by_unit else None)
        model = wrap_model(settings, initial, strategy)
        model.train()
        verification = BurnIn(
            every=1,
            ranks=ranks,
            strategy=strategy,
            task=task,
            model=model,
            chunks=[],
            to_device=build_to_device(settings, ranks.device, train_set),
            count=lambda batch: count_labels(task, batch, split),
            seed=seed,
            timeout_s=settings.distributed.timeout_s,
            verified_step=0,
            set_aside=lambda step, why: None,
        )
        if offers(task, "begin_step"):
            call_begin_step(task, 1, 2, strategy.unwrap(model))
        agreement, began, reported = Agreement(ranks), time.monotonic(), 0.0
        for number, batch in enumerate(local_batches(settings, train_set, split.micro_batch_size)):
            step, chunk = divmod(number, settings.train.exact)
            verification.compare(batch, chunk, step + 1)
            passed_s = agreement.on_main(lambda: time.monotonic() - began)
            is_over = passed_s > 60 * minutes
            if ranks.is_main and (is_over or passed_s - reported > _REPORT_S):
                reported = passed_s
                print(
                    f"{passed_s / 60:.1f} of {minutes:g} minutes: {number + 1:,} chunks of "
                    f"{split.micro_batch_size} samples have the same gradients on {ranks.world_size} ranks",
                    flush=True,
                )
            if is_over:
                strategy.close()
                return number + 1
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
