"""Sums of gradients as integers."""

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.exact.buffers import ChunkBuffers
from trainer.exact.chunk_sums import ChunkSums, Encoder, decode


def _sum(*gradients: Tensor, num_chunks: int = 9) -> Tensor:
    sums, count = torch.zeros(len(gradients[0]), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    encoder = Encoder(num_chunks)
    for gradient in gradients:
        encoder.add(sums, count, gradient)
    decode(sums, count, out := torch.empty_like(gradients[0]))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_order_and_split_gives_the_same_bits(dtype: torch.dtype) -> None:
    gradients = [(torch.randn(70_001) * 10.0 ** torch.randint(-9, 2, (70_001,))).to(dtype) for _ in range(9)]
    whole = _sum(*gradients)
    assert _sum(*gradients[::-1]).equal(whole)
    cut = [_sum(*(g[begin:end] for g in gradients)) for begin, end in ((0, 7), (7, 65_540), (65_540, 70_001))]
    assert torch.cat(cut).equal(whole)
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(0)
    assert (whole.double() - exact).abs().max() <= 9 * 2.0**-50 + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 512.0, -513.0, 1e38])
@pytest.mark.parametrize("place", [0, 5, 70_000])
def test_values_that_cannot_be_represented_become_nan(value: float, place: int) -> None:
    gradient = torch.ones(70_001)
    gradient[place] = value
    assert _sum(torch.ones(70_001), gradient).isnan().all()
    assert _sum(torch.ones(70_001), torch.full((70_001,), 511.9)).isfinite().all()


@pytest.mark.parametrize("num_chunks", [8, 16, 17, 64, 1024])
def test_no_sum_overflows(num_chunks: int) -> None:
    largest = torch.tensor([math.nextafter(min(512, 8192 / num_chunks), 0)], dtype=torch.float64)
    total = _sum(*[largest] * num_chunks, num_chunks=num_chunks)
    torch.testing.assert_close(total, largest * num_chunks)
    assert _sum(*[-largest] * num_chunks, num_chunks=num_chunks).equal(-total)
    assert _sum(*[largest * 1.01] * num_chunks, num_chunks=num_chunks).isnan().all()


def test_parameters_with_and_without_gradients_and_of_any_layout() -> None:
    torch.manual_seed(0)
    shapes = [(3, 4), (400, 400), (5, 2, 3, 3), (7,), (2,)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters[2].data = parameters[2].data.contiguous(memory_format=torch.channels_last)
    sums = ChunkSums({str(number): parameter for number, parameter in enumerate(parameters)}, 3)
    for _ in range(2):
        chunks = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
        sums.reset()
        for number, chunk in enumerate(chunks):
            for at, (parameter, gradient) in enumerate(zip(parameters, chunk, strict=True)):
                # One has none in the first chunk, one in none.
                parameter.grad = None if at == 4 or (at == 0 and number == 0) else gradient.clone()
            sums.add_chunk()
            assert all(parameter.grad is None for parameter in parameters)
        sums.write_gradients()
        chunks[0][0] = torch.zeros(3, 4)
        for at, parameter in enumerate(parameters[:4]):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, chunks[0][at] + chunks[1][at] + chunks[2][at])
        assert parameters[4].grad is None


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        UserError, match=r"not supported with sparse gradients, .*; create the embedding with sparse=False"
    ):
        ChunkSums(dict(table.named_parameters()), 2).add_chunk()


def test_large_integers_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.exact.buffers.sum_over_ranks", lambda values: values)
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("seen", torch.tensor([2**60]))
    buffers = ChunkBuffers(model, num_chunks=2)
    for steps in (1, 2):
        for chunk in range(2):
            buffers.start_chunk()
            model.mean += chunk
            model.seen += 1 + (steps == 2) * chunk
            buffers.end_chunk()
        if steps == 1:
            buffers.finish()
            assert model.seen.tolist() == [2**60 + 1] and model.mean.tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match=r"different values to seen, a buffer of torch\.int64, and"):
        buffers.finish()
