"""A GAN on digits: critic and generator are trained in alternate steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.tasks import Evaluation, Shown


class Gan(nn.Module):
    """A generator of images with 64 pixels, and a critic.

    For the critic's turn, `forward` returns the scores of the given and then of generated images; for the
    generator's turn, only those of generated images; for the turn `show`, generated images.
    """

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64)
        )
        self.critic = nn.Sequential(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def make(self, number: int) -> Tensor:
        device = next(self.parameters()).device
        return torch.sigmoid(self.generator(torch.randn(number, self.latent, device=device)))

    def forward(self, images: Tensor, turn: str) -> Tensor:
        if turn == "critic":
            return self.critic(torch.cat([images.flatten(1), self.make(len(images)).detach()]))
        if turn == "show":
            return self.make(len(images))
        with constant(self.critic):
            return self.critic(self.make(len(images)))


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Within the context, backward passes compute no gradients for `module`, so it isn't updated."""
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


class Turns:
    """Trains the critic in odd steps, and the generator in even steps."""

    metric_names = ("mean_gap", "spread_gap")
    turn = "critic"

    def begin_step(self, step: int, last_step: int) -> None:
        self.turn = "critic" if step % 2 else "generator"

    def loss(self, model: nn.Module, batch: Any) -> Any:
        scores = model(batch[0], self.turn)
        if self.turn == "critic":
            real, made = scores.chunk(2)
            loss = F.softplus(-real).mean() + F.softplus(made).mean()
        else:
            loss = F.softplus(-scores).mean()
        return loss, {self.turn: loss}

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sums of given and generated pixels, the sums of their squares, and the image count."""
        both = torch.cat([batch[0].flatten(1), model(batch[0], "show")], 1).double()
        return torch.cat([both.sum(0), both.square().sum(0), both.new_tensor([len(both)])])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        mean, square = (sums[:-1] / sums[-1]).view(2, 2, 64)
        spread = (square - mean**2).clamp(min=0).sqrt()
        gaps = [(of[0] - of[1]).abs().mean() for of in (mean, spread)]
        return {"mean_gap": float(gaps[0]), "spread_gap": float(gaps[1])}

    def show(self, model: nn.Module, evaluation: Evaluation) -> Shown:
        made = model(evaluation.batch[0][:16], "show").view(-1, 8, 8)
        return Shown(images={"eval/made": torch.cat(list(made), 1).unsqueeze(0)})
