"""Which running trials to stop early: a pruner of Optuna compares their evaluations."""

import logging
from typing import Any

from trainer.errors import optional
from trainer.sweep.search import SweepConfig
from trainer.sweep.trials import FINAL, PRUNED, Trial, TrialLog, values_of


class Pruning:
    """Optuna's study of a sweep, told of each evaluation as the trial's files have it.

    Trials are compared after the same number of evaluations, since their steps may have other batch sizes.
    The trials of an earlier start of the sweep are told at once.

    Raises:
        UserError: there is no Optuna.
    """

    def __init__(self, wanted: SweepConfig, log: TrialLog) -> None:
        optuna = optional("optuna", f"hydra.sweeper.pruning={wanted.pruning}", extra="sweep")
        optuna.logging.set_verbosity(logging.WARNING)
        pruner = optuna.pruners.MedianPruner()
        if wanted.pruning == "asha":
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1)
        self._study = optuna.create_study(
            direction="minimize" if wanted.mode == "min" else "maximize",
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(),  # not asked for anything
        )
        self._states = optuna.trial.TrialState
        self._log = log
        self._told: dict[int, tuple[Any, int]] = {}  # Optuna's trial, and how many evaluations it knows
        for trial in log.comparable():
            if trial.state in FINAL:
                self.end(trial)

    def step_to_end_at(self, trial: Trial) -> int | None:
        """Tell Optuna of the new evaluations of `trial`; return the step of one after which it is to end."""
        own, known = self._told.get(trial.number) or (self._study.ask(), 0)
        evaluations = list(self._log.evaluations(trial).items())
        found = None
        for number, (step, value) in enumerate(evaluations[known:], known + 1):
            own.report(value, number)
            if own.should_prune() and found is None:  # asked each time: it remembers how far a trial came
                found = step
        self._told[trial.number] = own, max(known, len(evaluations))
        return found

    def end(self, trial: Trial) -> None:
        """Tell Optuna how `trial` has ended."""
        self.step_to_end_at(trial)
        own, _ = self._told.pop(trial.number)
        if values := values_of([trial]):
            self._study.tell(own, values[0])
        else:
            self._study.tell(own, state=self._states.PRUNED if trial.state == PRUNED else self._states.FAIL)
