"""A vector-quantized autoencoder: `forward` updates the codebook, a buffer, from the rows of all ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import gather


class Codebook(nn.Module):
    """Returns the nearest code for each row (N, D), and its index; each code follows the mean of its rows."""

    def __init__(self, num_codes: int, dimensions: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", torch.randn(num_codes, dimensions))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(rows, codes).argmin(1)
        if self.training:
            self.update(rows, codes)
        return codes[nearest], nearest

    @torch.no_grad()
    def update(self, rows: Tensor, codes: Tensor) -> None:
        rows, _ = gather(rows)  # the rows of all ranks, so that every rank computes the same update
        nearest = F.one_hot(torch.cdist(rows, codes).argmin(1), len(codes)).float()
        self.counts.lerp_(nearest.sum(0), 1 - self.decay)
        self.sums.lerp_(nearest.T @ rows, 1 - self.decay)


class AutoEncoder(nn.Module):
    """Encodes each image (B, 1, 8, 8) as 16 codes.

    Returns the decoded images, the mean squared distance between the encoder's output and the codes, and the
    indices of the codes.
    """

    def __init__(self, width: int, dimensions: int, num_codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, dimensions, 1)
        )
        self.codebook = Codebook(num_codes, dimensions, decay=0.95)
        self.decoder = nn.Sequential(
            nn.Conv2d(dimensions, width, 1), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encoded = self.encoder(images).movedim(1, -1).float()
        rows = F.layer_norm(encoded, encoded.shape[-1:]).flatten(0, -2)  # to the scale of the initial codes
        chosen, nearest = self.codebook(rows)
        passed = rows + (chosen - rows).detach()  # straight-through gradients
        decoded = self.decoder(passed.view(encoded.shape).movedim(-1, 1))
        return decoded, F.mse_loss(rows, chosen), nearest


class Reconstruction:
    """Reconstruction error per pixel; in training, plus the distance between the rows and their codes."""

    metric_names = ("loss", "codes_used")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        decoded, distance, _ = model(batch[0])
        pixels = F.mse_loss(decoded, batch[0])
        return pixels + 0.25 * distance, {"pixels": pixels, "distance": distance}

    def eval_sums(self, model: nn.Module, batch: Any) -> Tensor:
        images = batch[0]
        decoded, _, nearest = model(images)
        sums = torch.stack(
            [(decoded - images).square().sum(), torch.tensor(images.numel(), device=images.device)]
        )
        num_codes = len(model.codebook.counts)
        return torch.cat([sums.double(), nearest.bincount(minlength=num_codes).double()])

    def summarise(self, sums: Tensor) -> dict[str, float]:
        return {"loss": float(sums[0] / sums[1]), "codes_used": float((sums[2:] > 0).sum())}
