"""Pruning: compare the evaluations of running trials with Optuna's pruners, and stop the worse trials."""

import logging
import warnings
from typing import Any

from trainer.errors import optional
from trainer.sweep.search import SweepConfig
from trainer.sweep.trials import FINAL, PRUNED, Trial, TrialLog, values_of


class Pruning:
    """An Optuna study of the sweep, to which the evaluations of each trial are reported from its files.

    Trials are compared after the same number of evaluations, since their batch sizes may differ. Trials that
    ended before the sweep was started again are reported at once.
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
            sampler=optuna.samplers.RandomSampler(),  # unused, since the study suggests no values
        )
        self._states = optuna.trial.TrialState
        self._log = log
        # Optuna's trial, and the number of evaluations reported to it.
        self._reported: dict[int, tuple[Any, int]] = {}
        for trial in log.comparable():
            if trial.state in FINAL:
                self.end(trial)

    def step_to_end_at(self, trial: Trial) -> int | None:
        """Report the new evaluations of `trial`; return the step after which to stop it, or None."""
        own, known = self._reported.get(trial.number) or (self._study.ask(), 0)
        evaluations = list(self._log.evaluations(trial).items())
        found = None
        for number, (step, value) in enumerate(evaluations[known:], known + 1):
            own.report(value, number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, if all evaluations are NaN
                # Called for each evaluation, because Optuna records the rungs that a trial reaches.
                if own.should_prune() and found is None:
                    found = step
        self._reported[trial.number] = own, max(known, len(evaluations))
        return found

    def end(self, trial: Trial) -> None:
        """Report to Optuna how `trial` has ended."""
        self.step_to_end_at(trial)
        own, _ = self._reported.pop(trial.number)
        if values := values_of([trial]):
            self._study.tell(own, values[0])
        else:
            self._study.tell(own, state=self._states.PRUNED if trial.state == PRUNED else self._states.FAIL)
