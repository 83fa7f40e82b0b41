"""The logger for MLflow, which writes to a tracking server, or to run_dir/mlflow.db for `mlflow ui`."""

import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.errors import UserError, on_one_line, optional
from trainer.loggers.base import Logger, pixels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AT_ONCE = 100  # maximum number of parameters per call of MLflow


class MLflow(Logger):
    """One MLflow run for each run and its resumes, found by the tag `ringmaster.run_id`.

    Texts, images and figures become artifacts, one file per step. MLflow has no histograms.

    Args:
        tracking_uri: URI of a server, such as http://host:5000; None uses MLFLOW_TRACKING_URI or
            run_dir/mlflow.db.
        experiment: name of the experiment, which is created if it does not exist.
        name: name of the run; None uses the name of run_dir.

    Raises:
        UserError: mlflow is not installed, or the server does not answer.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        first_step: int,
        settings: Mapping[str, Any],
        tracking_uri: str | None = None,
        experiment: str = "ringmaster",
        name: str | None = None,
    ) -> None:
        mlflow = optional("mlflow", "logger.mlflow")
        here = f"sqlite:///{run_dir.resolve()}/mlflow.db"
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or here
        self._metric = mlflow.entities.Metric
        try:
            self._client = mlflow.MlflowClient(uri)
            of = self._client.get_experiment_by_name(experiment)
            at = {"artifact_location": (run_dir.resolve() / "mlflow").as_uri()} if uri == here else {}
            number = self._client.create_experiment(experiment, **at) if of is None else of.experiment_id
            known = self._client.search_runs([number], f"tags.`ringmaster.run_id` = '{run_id}'")
            tags = {"ringmaster.run_id": run_id}
            run = (
                known[0]
                if known
                else self._client.create_run(number, run_name=name or run_dir.resolve().name, tags=tags)
            )
            self._run = run.info.run_id
            if not known:
                params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in settings.items()]
                for first in range(0, len(params), _AT_ONCE):
                    self._client.log_batch(self._run, params=params[first : first + _AT_ONCE])
        except mlflow.exceptions.MlflowException as error:
            raise UserError(f"logger.mlflow: {uri}: {on_one_line(error)}") from error
        self.look = uri if uri != here else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_named(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._run, text, f"{_named(name)}/{step}.md")

    def image(self, name: str, image: Tensor, step: int) -> None:
        self._client.log_image(self._run, pixels_of(image), f"{_named(name)}/{step}.png")

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        self._client.log_figure(self._run, figure, f"{_named(name)}/{step}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _named(name: str) -> str:
    return re.sub(r"[^\w/. -]", "_", name)
